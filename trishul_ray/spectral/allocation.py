"""How many heads each layer gets: concave water-filling and integer rounding.

The continuous problem (TRISHUL, eq. waterfill_opt, here with optional caps) is

    max sum_l a_l log(1 + h_l)   subject to   sum_l h_l = h,  0 <= h_l <= cap_l,

solved by ``h_l = clip(a_l / mu - 1, 0, cap_l)`` (eq. waterfill_sol). As a function of ``1/mu`` the
total is piecewise linear and increasing, so the water level is found exactly: search the sorted
breakpoints for the right piece, then solve one linear equation.
"""

import bisect
import math
from collections.abc import Sequence

from trishul_ray.errors import InputError

#: Scores are taken relative to the greatest; smaller shares than this would overflow 1/a.
_SMALLEST_SHARE = 1e-200

#: Decimals of a residue that count: equal layers stay tied on every machine.
_RESIDUE_DECIMALS = 9


def water_fill(
    scores: Sequence[float], total: float, caps: Sequence[float] | None = None
) -> list[float]:
    """The continuous allocation that maximizes :func:`utility` (TRISHUL, eq. waterfill_sol).

    Args:
        scores: a_l > 0, one per layer; only their ratios matter.
        total: h >= 0, heads to share out.
        caps: most heads a layer may get (may be infinite); None means no limit.

    Returns:
        h_l, one per layer, whose sum is ``total`` up to rounding.

    Raises:
        InputError: for no layers, a score that is not positive and finite, a negative total, a
            negative cap, or a total above the sum of the caps.
    """
    _check_total(total)
    _check_scores(scores)
    limits = _limits(caps, len(scores), total)
    top = max(scores)
    shares = [max(a / top, _SMALLEST_SHARE) for a in scores]
    # 1/mu where a layer starts to fill, and where it is full.
    starts = [1.0 / a for a in shares]
    fulls = [(1.0 + cap) / a for a, cap in zip(shares, limits, strict=True)]

    def heads_at(inverse_level: float) -> list[float]:
        return [
            cap
            if inverse_level >= full
            else min(max(a * inverse_level - 1.0, 0.0), cap)  # the min guards against rounding
            for a, full, cap in zip(shares, fulls, limits, strict=True)
        ]

    if total == 0:
        return [0.0] * len(scores)
    breaks = sorted({p for p in (*starts, *fulls) if math.isfinite(p)})
    piece = bisect.bisect_left(breaks, total, key=lambda p: math.fsum(heads_at(p)))
    low = breaks[piece - 1] if piece else 0.0
    # On this piece layers that started by `low` and are not full there fill linearly.
    filling = [i for i in range(len(shares)) if starts[i] <= low < fulls[i]]
    full = [limits[i] for i in range(len(shares)) if fulls[i] <= low]
    if not filling:  # the caps sum to the total, but for rounding
        return heads_at(low)
    inverse_level = (total - math.fsum(full) + len(filling)) / math.fsum(shares[i] for i in filling)
    return heads_at(max(inverse_level, low))


def round_to_total(
    continuous: Sequence[float], total: int, caps: Sequence[int] | None = None
) -> list[int]:
    """Integers near ``continuous`` that sum to ``total`` (TRISHUL, eq. rounding_floor).

    Floors first; what is missing goes, one head at a time, to the layer with the largest
    remaining residue that is below its cap, ties to the first layer.

    Args:
        continuous: h_l >= 0 with sum ``total``.
        total: heads to share out.
        caps: most heads a layer may get; None means no limit.

    Raises:
        InputError: if a value is negative, the values do not sum to ``total``, or the caps do not
            leave room for it.
    """
    _check_total(total)
    if not all(math.isfinite(x) and x >= 0 for x in continuous):
        raise InputError(f"continuous={list(continuous)} must be finite and at least 0")
    if not math.isclose(math.fsum(continuous), total, rel_tol=1e-6, abs_tol=1e-6):
        raise InputError(f"continuous heads sum to {math.fsum(continuous)}, not total={total}")
    limits = _limits(caps, len(continuous), total)
    heads = [math.floor(min(x, cap)) for x, cap in zip(continuous, limits, strict=True)]
    # A sum that is right only up to rounding may floor to one head too many, never to more.
    for _ in range(sum(heads) - total):
        heads[max(i for i in range(len(heads)) if heads[i] > 0)] -= 1
    for _ in range(total - sum(heads)):
        open_layers = [i for i in range(len(heads)) if heads[i] + 1 <= limits[i]]
        if not open_layers:
            raise InputError(f"total={total} exceeds what whole heads under caps={caps} can hold")
        residue = {i: round(continuous[i] - heads[i], _RESIDUE_DECIMALS) for i in open_layers}
        heads[max(open_layers, key=lambda i: (residue[i], -i))] += 1
    return heads


def uniform(layers: int, total: int, caps: Sequence[int] | None = None) -> list[int]:
    """The same number of heads everywhere, as nearly as total and caps allow; first layers first.

    Args:
        layers: number of layers, >= 1.
        total: heads to share out.
        caps: most heads a layer may get; what a capped layer cannot take, the others share.

    Raises:
        InputError: for no layers, a negative total or caps without room for it.
    """
    return round_to_total(water_fill([1.0] * layers, total, caps), total, caps)


def utility(scores: Sequence[float], heads: Sequence[float]) -> float:
    """``sum_l a_l log(1 + h_l)``, the objective of TRISHUL, eq. waterfill_opt.

    Raises:
        InputError: if the lengths differ, a score is not positive or a head count is negative.
    """
    _check_scores(scores)
    if len(heads) != len(scores):
        raise InputError(f"{len(heads)} head counts were given for {len(scores)} scores")
    if not all(h >= 0 for h in heads):
        raise InputError(f"heads={list(heads)} must be at least 0")
    return math.fsum(a * math.log1p(h) for a, h in zip(scores, heads, strict=True))


def _check_total(total: float) -> None:
    if not (math.isfinite(total) and total >= 0):
        raise InputError(f"total={total} heads must be finite and at least 0")


def _check_scores(scores: Sequence[float]) -> None:
    if not scores:
        raise InputError("scores are empty: at least one layer is needed")
    for layer, score in enumerate(scores):
        if not (math.isfinite(score) and score > 0):
            raise InputError(f"scores[{layer}]={score} must be positive and finite")


def _limits(caps: Sequence[float] | None, layers: int, total: float) -> list[float]:
    if caps is None:
        return [math.inf] * layers
    if len(caps) != layers:
        raise InputError(f"{len(caps)} caps were given for {layers} layers")
    for layer, cap in enumerate(caps):
        if not cap >= 0:
            raise InputError(f"caps[{layer}]={cap} must be at least 0")
    if total > math.fsum(caps):
        raise InputError(f"total={total} heads exceed the sum {math.fsum(caps)} of the caps")
    return [float(cap) for cap in caps]
