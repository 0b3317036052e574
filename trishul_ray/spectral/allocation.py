"""Allocate heads to layers by concave water-filling and integer rounding.

The continuous problem (TRISHUL, eq. waterfill_opt, with optional caps) is

    max sum_l a_l log(1 + h_l)   subject to   sum_l h_l = h,  0 <= h_l <= cap_l.

Its solution is ``h_l = clip(a_l / mu - 1, 0, cap_l)`` (eq. waterfill_sol). The total is piecewise
linear and increasing in ``1/mu``, so the water level is exact: bisect the sorted breakpoints to
find the piece, then solve one linear equation.
"""

import bisect
import math
from collections.abc import Sequence

from trishul_ray.errors import InputError

#: Minimum score relative to the largest score; below it, 1/a would overflow.
_SMALLEST_SHARE = 1e-200

#: Number of decimals for comparing residues, so that equal layers tie on every machine.
_RESIDUE_DECIMALS = 9


def water_fill(
    scores: Sequence[float], total: float, caps: Sequence[float] | None = None
) -> list[float]:
    """Compute the continuous allocation of heads (TRISHUL, eq. waterfill_sol).

    Args:
        scores: a_l > 0, one per layer; only their ratios matter.
        total: h >= 0, number of heads to allocate.
        caps: Upper bound per layer (may be infinite); None means no bounds.

    Returns:
        h_l, one per layer; they sum to ``total`` up to rounding.

    Raises:
        InputError: A score is not positive and finite, or ``total`` exceeds the sum of the caps.
    """
    assert math.isfinite(total) and total >= 0, total
    assert scores, "scores are empty"
    for layer, score in enumerate(scores):
        if not (math.isfinite(score) and score > 0):
            raise InputError(f"scores[{layer}]={score} must be positive and finite")
    limits = _limits(caps, len(scores), total)
    top = max(scores)
    shares = [max(a / top, _SMALLEST_SHARE) for a in scores]
    # Values of 1/mu at which a layer starts to fill and is full.
    starts = [1.0 / a for a in shares]
    fulls = [(1.0 + cap) / a for a, cap in zip(shares, limits, strict=True)]

    def heads_at(inverse_level: float) -> list[float]:
        return [
            cap
            if inverse_level >= full
            else min(max(a * inverse_level - 1.0, 0.0), cap)  # The minimum guards against rounding.
            for a, full, cap in zip(shares, fulls, limits, strict=True)
        ]

    if total == 0:
        return [0.0] * len(scores)
    breakpoints = sorted({p for p in (*starts, *fulls) if math.isfinite(p)})
    piece = bisect.bisect_left(breakpoints, total, key=lambda p: math.fsum(heads_at(p)))
    low = breakpoints[piece - 1] if piece else 0.0
    # On this piece, layers that have started but are not full fill linearly.
    filling = [i for i in range(len(shares)) if starts[i] <= low < fulls[i]]
    full = [limits[i] for i in range(len(shares)) if fulls[i] <= low]
    if not filling:  # The caps sum to the total up to rounding.
        return heads_at(low)
    inverse_level = (total - math.fsum(full) + len(filling)) / math.fsum(shares[i] for i in filling)
    return heads_at(max(inverse_level, low))


def round_to_total(
    continuous: Sequence[float], total: int, caps: Sequence[int] | None = None
) -> list[int]:
    """Round an allocation to integers that sum to ``total`` (TRISHUL, eq. rounding_floor).

    Start with the floors. Then add one head at a time to the layer below its cap with the largest
    remaining residue; ties go to the first layer.

    Args:
        continuous: h_l >= 0 with sum ``total``.
        total: Number of heads to allocate.
        caps: Upper bound per layer; None means no bounds.

    Returns:
        Number of heads per layer.

    Raises:
        InputError: ``total`` exceeds the integer caps.
    """
    assert math.isfinite(total) and total >= 0, total
    assert all(math.isfinite(x) and x >= 0 for x in continuous), continuous
    assert math.isclose(math.fsum(continuous), total, rel_tol=1e-6, abs_tol=1e-6), continuous
    limits = _limits(caps, len(continuous), total)
    heads = [math.floor(min(x, cap)) for x, cap in zip(continuous, limits, strict=True)]
    # The sum is exact only up to rounding, so the floors may exceed the total by at most one.
    for _ in range(sum(heads) - total):
        heads[max(i for i in range(len(heads)) if heads[i] > 0)] -= 1
    for _ in range(total - sum(heads)):
        open_layers = [i for i in range(len(heads)) if heads[i] + 1 <= limits[i]]
        if not open_layers:
            raise InputError(f"total={total} heads exceed the integer caps={caps}")
        residue = {i: round(continuous[i] - heads[i], _RESIDUE_DECIMALS) for i in open_layers}
        heads[max(open_layers, key=lambda i: (residue[i], -i))] += 1
    return heads


def uniform(layers: int, total: int, caps: Sequence[int] | None = None) -> list[int]:
    """Allocate ``total`` heads evenly; the first layers receive the remainder.

    Heads that exceed the cap of a layer go to the other layers.

    Raises:
        InputError: ``total`` exceeds the sum of the caps.
    """
    return round_to_total(water_fill([1.0] * layers, total, caps), total, caps)


def _limits(caps: Sequence[float] | None, layers: int, total: float) -> list[float]:
    if caps is None:
        return [math.inf] * layers
    assert len(caps) == layers and min(caps) >= 0, caps
    if total > math.fsum(caps):
        raise InputError(f"total={total} heads exceed the sum {math.fsum(caps)} of the caps")
    return [float(cap) for cap in caps]
