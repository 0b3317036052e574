"""Datasets as memory-mapped Arrow files, and the partition of their rows among the clients.

``prepare.py`` looks up a dataset by name and writes it to the cache; ``dataset.py`` is the format
of the files. ``datasets/`` has the public datasets, and ``user/`` reads user data.
"""
