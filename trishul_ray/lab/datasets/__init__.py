"""Datasets beyond the paper."""
