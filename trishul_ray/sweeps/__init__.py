"""Run sweeps, grids and searches of experiments, on Ray Tune."""
