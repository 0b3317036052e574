"""Where a run is told of: MLflow, and progress on the terminal."""
