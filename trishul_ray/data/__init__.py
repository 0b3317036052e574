"""Datasets as memory-mapped Arrow files, and the partition of their rows across clients.

``prepare.py`` finds a dataset by name and writes it to the cache, and ``dataset.py`` defines the
file format. ``datasets/`` contains the public datasets, and ``user/`` reads user data.
"""
