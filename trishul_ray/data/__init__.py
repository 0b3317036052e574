"""Datasets as memory-mapped Arrow files, and the partition of their rows among the clients.

``prepare.py`` looks up a dataset by name and writes it to the cache; ``prepared.py`` is the format
of the files. ``datasets/`` holds the public datasets and ``custom.py`` your own data.
"""
