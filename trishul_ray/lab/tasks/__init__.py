"""Tasks beyond the paper."""
