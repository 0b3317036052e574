"""Spectral algebra on plain tensors: bases, singular-value thresholding, allocation, diagnostics.

Nothing here knows of models, data, federations or Ray.
"""
