"""The sweeps of the package, each of whose thousands of cells is checked once."""

import functools

from trishul_ray.sweeps.loading import find_sweeps


@functools.cache
def shipped(profile):
    """Return all sweeps of the paper in a profile, in its order, keyed by name."""
    return {sweep.name: sweep for sweep in find_sweeps(["all"], profile)}
