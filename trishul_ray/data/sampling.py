"""Draws of cohorts, of each client's share of the budget and of its batches, from streams."""

import math
from functools import lru_cache

import numpy as np

from trishul_ray.config.fields import COMPUTE_LEVELS, COMPUTE_PROFILES, FederationConfig
from trishul_ray.runtime.proportions import exact_fraction
from trishul_ray.runtime.random_streams import numpy_rng


def participants(federation: FederationConfig, seed: int) -> np.ndarray:
    """Return the clients that may take part, ascending int64: all but those held out.

    Yuan et al.: "What Do We Mean by Generalization in Federated Learning?", ICLR 2022, arXiv
    2110.14216.
    """
    count = federation.clients - federation.participants
    out = numpy_rng(seed, "held-out").choice(federation.clients, count, replace=False)
    return np.setdiff1d(np.arange(federation.clients), out)


def uniform_cohort(seed: int, number: int, clients: int, size: int) -> list[int]:
    """Return ``size`` of the clients for a round, ascending, drawn without replacement."""
    rng = numpy_rng(seed, "cohort", number)
    return sorted(rng.choice(clients, size, replace=False).tolist())


@lru_cache(maxsize=4)  # asked for by every client of every round
def capacities(
    profile: str, seed: int, clients: int, shares: tuple[float, ...] | None = None
) -> tuple[float, ...]:
    """Return the share of the full budget that each client can train, of :data:`COMPUTE_LEVELS`.

    As many clients have a level as its proportion says, rounded by largest remainders (of equal
    ones, the lower level's first). Which clients have it is drawn from the seed. ``shares`` are
    proportions of the levels instead of the profile's.
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
    """Return the rows of every local step, [steps, size]: a fresh permutation for each epoch.

    Every client makes exactly ``steps`` full steps (the paper counts mini-batches, not epochs). A
    shard smaller than a batch wraps around, so a batch may contain a row twice.
    """
    needed = steps * size
    epochs = -(-needed // len(rows))
    order = np.concatenate([rng.permutation(rows) for _ in range(epochs)])
    return order[:needed].reshape(steps, size)
