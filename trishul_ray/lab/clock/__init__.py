"""Clients on a simulated clock: their devices, and the clients of a round that answer in time."""
