"""One run from configuration to results."""
