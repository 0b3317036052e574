"""Client-level differential privacy: clipped changes, noise on their sum, and its guarantee."""
