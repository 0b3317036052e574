"""Who takes part in a round, drawn from the seed alone, as epsilon counts on."""

import numpy as np

from trishul_ray.config import FederationConfig
from trishul_ray.rng import numpy_rng


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


def poisson_cohort(seed: int, number: int, clients: int, expected: int) -> list[int]:
    """Return the clients of a round, each drawn by itself with probability expected / clients."""
    drawn = numpy_rng(seed, "cohort-poisson", number).random(clients) < expected / clients
    return [int(client) for client in np.flatnonzero(drawn)]
