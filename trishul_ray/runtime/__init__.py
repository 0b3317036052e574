"""The device, its memory, CUDA graphs, random streams, and lazy imports."""
