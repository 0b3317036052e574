"""Federated methods, one file each, on top of the base classes in ``base``."""
