"""Simulated clock: devices of clients, cohorts that depend on time, and asynchronous rounds."""
