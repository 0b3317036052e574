"""Sweeps: grids and searches of runs, on Ray Tune."""
