"""How much of the budget each client can train."""

import math
from functools import lru_cache

import numpy as np

from trishul_ray.config import COMPUTE_LEVELS, COMPUTE_PROFILES
from trishul_ray.methods.base import exact_share
from trishul_ray.rng import numpy_rng


@lru_cache(maxsize=4)  # asked for by every client of every round
def capacities(
    profile: str, seed: int, clients: int, shares: tuple[float, ...] | None = None
) -> tuple[float, ...]:
    """Return the share of the full budget that each client can train, of :data:`COMPUTE_LEVELS`.

    As many clients have a level as its proportion says, rounded by largest remainders (of equal
    ones, the lower level's first). Which clients have it is drawn from the seed. ``shares`` are
    proportions of the levels instead of the profile's.
    """
    parts = [exact_share(clients, share) for share in shares or COMPUTE_PROFILES[profile]]
    parts = [clients * part / sum(parts) for part in parts]
    counts = [math.floor(part) for part in parts]
    by_remainder = sorted(range(len(COMPUTE_LEVELS)), key=lambda k: counts[k] - parts[k])
    for level in by_remainder[: clients - sum(counts)]:
        counts[level] += 1
    levels = np.repeat(COMPUTE_LEVELS, counts)
    return tuple(numpy_rng(seed, "capacities").permutation(levels).tolist())
