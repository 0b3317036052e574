"""Training tasks, which turn rows into batches, a loss and metrics."""
