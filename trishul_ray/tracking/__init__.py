"""Track runs in MLflow, and display their progress on a terminal."""
