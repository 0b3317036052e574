"""Computational heterogeneity: how much of the budget each client can train.

A client's share is drawn once and holds for the whole run. Levels are those of RAVAN (arXiv
2506.05568, A.3). The proportions of its profiles are published only as a bar chart; the ones here
are read off in its spirit and named, so that a report can say them.
"""

from collections.abc import Sequence

import numpy as np

from trishul_ray.rng import numpy_rng

#: Shares of the full budget.
LEVELS = (0.25, 0.5, 0.75, 1.0)

#: Probability of each level, by profile.
PROFILES = {
    "full": (0.0, 0.0, 0.0, 1.0),
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "bell": (0.1, 0.4, 0.4, 0.1),
    "skewed-right": (0.5, 0.3, 0.15, 0.05),
}


def capacity(profile: str, seed: int, client: int, shares: Sequence[float] | None = None) -> float:
    """Return the share of the budget that ``client`` can train, one of ``LEVELS``.

    Args:
        profile: ``federation.compute``.
        seed: the experiment's.
        client: which.
        shares: the probability of each level; None takes those of the profile.
    """
    wanted = np.asarray(PROFILES[profile] if shares is None else shares, dtype=np.float64)
    draw = numpy_rng(seed, "capacity", client).choice(len(LEVELS), p=wanted / wanted.sum())
    return LEVELS[int(draw)]
