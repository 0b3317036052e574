"""Computations of a worker: local training, evaluation and surveys of clients."""
