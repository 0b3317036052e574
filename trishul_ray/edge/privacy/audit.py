"""Estimate epsilon from clients that send random directions, and how far the model follows them.

Andrew et al.: "One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024, arXiv
2302.03098. Canary j sends S c_j, with c_j uniform on the unit sphere. The cosines of the canaries
with the model's movement are compared with those of directions that nobody sent, N(0, 1/P). This
is an estimate, no bound: it can be below the true epsilon.

Legend: P numbers of the shared part, k canaries.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from trishul_ray.lazy import scipy
from trishul_ray.rng import numpy_rng


def canaries(seed: int, count: int, size: int) -> Iterator[np.ndarray]:
    """Yield each c_j, [P] float64 of norm 1, uniform on the sphere.

    They come one at a time: together they may not fit in memory.
    """
    for number in range(count):
        direction = numpy_rng(seed, "canary", number).standard_normal(size)
        yield direction / math.sqrt(float(np.square(direction).sum()))


def cosines(seed: int, count: int, moved: np.ndarray) -> np.ndarray:
    """Return [k] float64, the cosine of each canary with a movement [P]; zero for no movement."""
    length = math.sqrt(float(np.square(moved, dtype=np.float64).sum())) or 1.0
    dots = [float((each * moved).sum()) for each in canaries(seed, count, len(moved))]
    return np.array(dots) / length


def estimate(cosines: Sequence[float] | np.ndarray, size: int, delta: float) -> float:
    """Return ε such that thresholds on a cosine tell canaries from unseen directions so well.

    A normal distribution is fitted to the cosines; that of unseen directions is N(0, 1/P). The
    estimate is the largest ε, at least 0, at which a threshold, in either direction, breaks
    ``P[A] <= e^ε Q[A] + δ``.

    Args:
        cosines: [k], at least two.
        size: P.
        delta: δ.
    """
    found = np.asarray(cosines, dtype=np.float64) * math.sqrt(size)  # unseen ones: N(0, 1)
    mean, deviation = float(found.mean()), float(found.std(ddof=1))
    spread = max(deviation, 1e-12)
    # Thresholds as quantiles of both: beyond the δ-quantiles no event has a mass above δ.
    tails = scipy.stats.norm.isf(np.geomspace(delta, 0.5, 2000))
    steps = np.concatenate([-tails, tails[::-1]])
    thresholds = np.concatenate([steps, mean + spread * steps])
    best = 0.0
    for tail in (scipy.stats.norm.logsf, scipy.stats.norm.logcdf):
        seen, unseen = tail(thresholds, mean, spread), tail(thresholds)
        for first, second in ((seen, unseen), (unseen, seen)):
            over = first > math.log(delta)
            if over.any():
                mass = first[over] + np.log1p(-np.exp(math.log(delta) - first[over]))
                best = max(best, float((mass - second[over]).max()))
    return best
