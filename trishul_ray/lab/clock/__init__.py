"""Clients on a simulated clock: devices, clients of a round that count, asynchronous rounds."""
