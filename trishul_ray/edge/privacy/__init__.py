"""Client-level differential privacy: clipped changes, noise on their sum, and what it is worth."""
