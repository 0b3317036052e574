"""Bound epsilon from below, by clients that send random directions and how far the model follows.

After Andrew et al.: "One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024,
arXiv 2302.03098. Canary j sends S c_j in the rounds it is drawn for, with c_j uniform on the unit
sphere. The movement of the model is regressed on the sum of what the canaries have sent. That sum
points in a uniform direction, whatever else has moved the model, so the coefficient over its
standard error has the law of Student's t. Its confidence interval says by how many standard
deviations one participation shifts the model along a canary, and so how well a test tells a model
with the canary from one without it. No such test can beat the true epsilon.

The paper fits mean and variance to the cosines of the canaries. We do not fit the variance: an
error of it becomes epsilon, as the test looks at the tails.

Legend: P numbers of the shared part, k canaries.
"""

import math
from collections.abc import Iterator

import numpy as np

from trishul_ray.runtime.lazy import scipy
from trishul_ray.runtime.random_streams import numpy_rng

#: The probability, at most, that the lower end of an interval is too high; as that of the upper.
ERROR = 0.05
#: Thresholds that are tried around a participation's shift, and participations.
_STEPS, _CENTERS = 200, 40


def canaries(seed: int, count: int, size: int) -> Iterator[np.ndarray]:
    """Yield each c_j, [P] float64 of norm 1, uniform on the sphere.

    They come one at a time: together they may not fit in memory.
    """
    for number in range(count):
        direction = numpy_rng(seed, "canary", number).standard_normal(size)
        yield direction / math.sqrt(float(np.square(direction).sum()))


def shift_interval(moved: np.ndarray, sent: np.ndarray) -> tuple[float, float] | None:
    """Return an interval for the shift of a movement along what canaries sent, per unit they sent.

    The shift is in standard deviations of the movement along any direction. Each end is wrong with
    probability :data:`ERROR` at most.

    Args:
        moved: [P], the movement of the model, of any law.
        sent: [P], the sum of what canaries sent, whose direction is uniform.

    Returns:
        The lower and the upper end; None if nothing was sent.
    """
    moved, sent = moved.astype(np.float64), sent.astype(np.float64)
    length = math.sqrt(float(np.square(sent).sum()))
    if length == 0:
        return None
    along = float((moved * sent).sum()) / length
    freedom = len(moved) - 1
    across = math.sqrt(float(np.square(moved - along / length * sent).sum()) / freedom)
    ratio = along / max(across, 1e-12 * abs(along)) if along else 0.0
    # A noncentral t of many degrees of freedom is normal with this deviation.
    margin = scipy.stats.norm.isf(ERROR) * math.sqrt(1 + ratio**2 / (2 * freedom))
    return (ratio - margin) / length, (ratio + margin) / length


def threshold_epsilon(shift: float, rate: float, rounds: int, delta: float) -> float:
    """Return the ε that tests on the final model reach: thresholds on its movement along a canary.

    Without the canary the movement is N(0, 1). With it, it is N(n shift, 1) for n participations,
    which are binomial. It is the largest ε, at least 0, at which a threshold, in either direction,
    breaks ``P[A] <= e^ε Q[A] + δ``. For one round it is the ε of the sampled Gaussian mechanism of
    multiplier 1 / shift; for more it is below that of their composition, which sees every round.

    Args:
        shift: Shift by one participation, in standard deviations.
        rate: The probability that a canary takes part in a round.
        rounds: Rounds so far.
        delta: δ.
    """
    if shift <= 0:
        return 0.0
    norm, counts = scipy.stats.norm, np.arange(rounds + 1)
    masses = scipy.stats.binom.logpmf(counts, rounds, rate)
    # More participations than these have no mass that counts. Fewer may decide how small a
    # probability is, however rare they are.
    most = int(counts[masses > math.log(delta) - 30].max())
    counts, masses = counts[: most + 1], masses[: most + 1]
    # Thresholds within the δ-quantiles around these shifts: no event beyond has a mass above δ.
    centers = np.linspace(0, most, 1 + min(most, math.ceil(most * min(shift, 1)), _CENTERS))
    tails = norm.isf(np.geomspace(delta / 100, 0.5, _STEPS))
    steps = np.concatenate([-tails, tails[::-1]])
    thresholds = (centers[:, None] * shift + steps).reshape(-1, 1)
    best = 0.0
    for tail in (norm.logsf, norm.logcdf):
        seen = scipy.special.logsumexp(masses + tail(thresholds - counts * shift), axis=1)
        unseen = tail(thresholds[:, 0])
        for first, second in ((seen, unseen), (unseen, seen)):
            over = first > math.log(delta)
            if over.any():
                mass = first[over] + np.log1p(-np.exp(math.log(delta) - first[over]))
                best = max(best, float((mass - second[over]).max()))
    return best
