"""A single run, from its configuration to its results."""
