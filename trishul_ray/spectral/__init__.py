"""Spectral algebra on tensors: bases, singular-value thresholding, allocation, diagnostics.

This package does not depend on models, data, methods or Ray.
"""
