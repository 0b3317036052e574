"""Training tasks: how rows become batches, a loss and metrics."""
