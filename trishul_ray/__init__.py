"""Federated parameter-efficient fine-tuning with spectral multi-head adapters, on Ray."""

from trishul_ray.version import __version__

__all__ = ["__version__"]
