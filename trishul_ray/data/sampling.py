"""Sample cohorts, compute levels of clients, and batches from seeded random streams."""

import math
from functools import lru_cache

import numpy as np

from trishul_ray.config.fields import COMPUTE_LEVELS, COMPUTE_PROFILES, FederationConfig
from trishul_ray.runtime.proportions import exact_fraction
from trishul_ray.runtime.random_streams import numpy_rng


def participants(federation: FederationConfig, seed: int) -> np.ndarray:
    """Return the clients that are not held out of training, ascending int64.

    Held-out clients follow Yuan et al.: "What Do We Mean by Generalization in Federated Learning?",
    ICLR 2022, arXiv 2110.14216.
    """
    count = federation.clients - federation.participants
    out = numpy_rng(seed, "held-out").choice(federation.clients, count, replace=False)
    return np.setdiff1d(np.arange(federation.clients), out)


def uniform_cohort(seed: int, number: int, clients: int, size: int) -> list[int]:
    """Draw ``size`` clients for a round without replacement, in ascending order."""
    rng = numpy_rng(seed, "cohort", number)
    return sorted(rng.choice(clients, size, replace=False).tolist())


@lru_cache(maxsize=4)  # every client calls it in every round
def capacities(
    profile: str, seed: int, clients: int, shares: tuple[float, ...] | None = None
) -> tuple[float, ...]:
    """Return each client's trainable fraction of the full budget, from :data:`COMPUTE_LEVELS`.

    The number of clients per level is the level's proportion, rounded by largest remainders (ties
    to the lower level). The seed determines the clients of each level. ``shares`` are proportions
    that replace the profile's.
    """
    parts = [exact_fraction(clients, share) for share in shares or COMPUTE_PROFILES[profile]]
    parts = [clients * part / sum(parts) for part in parts]
    counts = [math.floor(part) for part in parts]
    by_remainder = sorted(range(len(COMPUTE_LEVELS)), key=lambda k: counts[k] - parts[k])
    for level in by_remainder[: clients - sum(counts)]:
        counts[level] += 1
    levels = np.repeat(COMPUTE_LEVELS, counts)
    return tuple(numpy_rng(seed, "capacities").permutation(levels).tolist())


def batch_order(rows: np.ndarray, steps: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Sample the rows of every local step, [steps, size], with a new permutation per epoch.

    Every client takes exactly ``steps`` full steps (the paper counts mini-batches, not epochs). A
    shard smaller than a batch wraps around, so a batch may contain a row twice.
    """
    needed = steps * size
    epochs = -(-needed // len(rows))
    order = np.concatenate([rng.permutation(rows) for _ in range(epochs)])
    return order[:needed].reshape(steps, size)
