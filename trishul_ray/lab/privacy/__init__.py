"""Differential privacy of clients or examples: clipping, noise, and the resulting guarantee."""
