"""Devices, memory, CUDA graphs, random streams, and lazy imports."""
