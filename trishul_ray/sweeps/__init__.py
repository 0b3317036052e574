"""Ray Tune around whole runs: sweeps of cells, what is left of them, and how they are run."""
