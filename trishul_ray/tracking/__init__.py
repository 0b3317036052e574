"""Tracking of runs: MLflow, and progress on the terminal."""
