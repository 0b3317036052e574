"""Spectral algebra on tensors: bases, singular-value thresholding, allocation, diagnostics.

This package knows nothing of models, data, methods or Ray.
"""
