"""Who takes part in a round, drawn from the seed alone, as epsilon counts on."""

import numpy as np

from trishul_ray.rng import numpy_rng


def uniform_cohort(seed: int, number: int, clients: int, size: int) -> list[int]:
    """Return ``size`` of the clients for a round, ascending, drawn without replacement."""
    rng = numpy_rng(seed, "cohort", number)
    return sorted(rng.choice(clients, size, replace=False).tolist())


def poisson_cohort(seed: int, number: int, clients: int, expected: int) -> list[int]:
    """Return the clients of a round, each drawn by itself with probability expected / clients."""
    drawn = numpy_rng(seed, "cohort-poisson", number).random(clients) < expected / clients
    return [int(client) for client in np.flatnonzero(drawn)]
