"""Costs of training: megabytes, simulated hours, energy, privacy; in tables and figures."""
