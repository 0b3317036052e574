"""Head allocation over layers: concave water-filling and integer rounding.

The continuous problem (TRISHUL, eq. waterfill_opt, with optional caps) is

    max sum_l a_l log(1 + h_l)   subject to   sum_l h_l = h,  0 <= h_l <= cap_l.

Its solution is ``h_l = clip(a_l / mu - 1, 0, cap_l)`` (eq. waterfill_sol). The total is piecewise
linear and increasing in ``1/mu``, so the water level is exact: bisect the sorted breakpoints for
the right piece, then solve one linear equation.

Ranks instead of heads have a quadratic price: with total rank R_l on a layer,

    max sum_l a_l log(1 + R_l)   subject to   sum_l c_l R_l^2 <= B,  R_l <= cap_l,

is solved by ``R_l = min((-1 + sqrt(1 + 2 a_l / (c_l mu))) / 2, cap_l)``.
"""

import bisect
import math
from collections.abc import Sequence

from trishul_ray.errors import InputError

#: Floor of a score relative to the largest one; below it, 1/a would overflow.
_SMALLEST_SHARE = 1e-200

#: Residues are compared to this many decimals, so that equal layers tie on every machine.
_RESIDUE_DECIMALS = 9

#: Ranks that differ are multiples of the first, where equal ones are the second or more.
RANK_STEPS = ((8, 64), (4, 32), (1, 1))


def water_fill(
    scores: Sequence[float], total: float, caps: Sequence[float] | None = None
) -> list[float]:
    """Return the continuous allocation of heads (TRISHUL, eq. waterfill_sol).

    Args:
        scores: a_l > 0, one per layer; only their ratios matter.
        total: h >= 0, number of heads to allocate.
        caps: upper bound per layer (may be infinite); None means no bounds.

    Returns:
        h_l, one per layer; they sum to ``total`` up to rounding.

    Raises:
        InputError: ``scores`` is empty, a score is not positive and finite, ``total`` or a cap is
            negative, or ``total`` exceeds the sum of the caps.
    """
    _check_total(total)
    if not scores:
        raise InputError("scores are empty: at least one layer is needed")
    for layer, score in enumerate(scores):
        if not (math.isfinite(score) and score > 0):
            raise InputError(f"scores[{layer}]={score} must be positive and finite")
    limits = _limits(caps, len(scores), total)
    top = max(scores)
    shares = [max(a / top, _SMALLEST_SHARE) for a in scores]
    # 1/mu at which a layer starts to fill and at which it is full.
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
    breakpoints = sorted({p for p in (*starts, *fulls) if math.isfinite(p)})
    piece = bisect.bisect_left(breakpoints, total, key=lambda p: math.fsum(heads_at(p)))
    low = breakpoints[piece - 1] if piece else 0.0
    # On this piece, layers that have started and are not yet full fill linearly.
    filling = [i for i in range(len(shares)) if starts[i] <= low < fulls[i]]
    full = [limits[i] for i in range(len(shares)) if fulls[i] <= low]
    if not filling:  # the caps sum to the total up to rounding
        return heads_at(low)
    inverse_level = (total - math.fsum(full) + len(filling)) / math.fsum(shares[i] for i in filling)
    return heads_at(max(inverse_level, low))


def round_to_total(
    continuous: Sequence[float], total: int, caps: Sequence[int] | None = None
) -> list[int]:
    """Round an allocation to integers that sum to ``total`` (TRISHUL, eq. rounding_floor).

    Take the floors, then give one head at a time to the layer below its cap with the largest
    remaining residue; ties go to the first layer.

    Args:
        continuous: h_l >= 0 with sum ``total``.
        total: number of heads to allocate.
        caps: upper bound per layer; None means no bounds.

    Raises:
        InputError: a value is negative, the values do not sum to ``total``, or the caps cannot
            hold ``total`` heads.
    """
    _check_total(total)
    if not all(math.isfinite(x) and x >= 0 for x in continuous):
        raise InputError(f"continuous={list(continuous)} must be finite and at least 0")
    if not math.isclose(math.fsum(continuous), total, rel_tol=1e-6, abs_tol=1e-6):
        raise InputError(f"continuous heads sum to {math.fsum(continuous)}, not total={total}")
    limits = _limits(caps, len(continuous), total)
    heads = [math.floor(min(x, cap)) for x, cap in zip(continuous, limits, strict=True)]
    # The sum is exact only up to rounding, so the floors may exceed the total, by at most one.
    for _ in range(sum(heads) - total):
        heads[max(i for i in range(len(heads)) if heads[i] > 0)] -= 1
    for _ in range(total - sum(heads)):
        open_layers = [i for i in range(len(heads)) if heads[i] + 1 <= limits[i]]
        if not open_layers:
            raise InputError(f"total={total} heads exceed what integer caps={caps} can hold")
        residue = {i: round(continuous[i] - heads[i], _RESIDUE_DECIMALS) for i in open_layers}
        heads[max(open_layers, key=lambda i: (residue[i], -i))] += 1
    return heads


def water_fill_ranks(
    scores: Sequence[float],
    prices: Sequence[float],
    budget: float,
    caps: Sequence[float],
) -> list[float]:
    """Return the continuous total rank of each layer, by bisection on the water level.

    Args:
        scores: a_l > 0.
        prices: c_l > 0: a total rank of R costs c R^2; with h heads of rank R/h, c is 1/h.
        budget: B >= 0.
        caps: The largest R_l.

    Returns:
        R_l, one per layer; together they cost the budget up to rounding, never more than it, or
        are the caps if all of these fit into it.
    """

    def ranks_at(inverse_level: float) -> list[float]:
        # (sqrt(1 + x) - 1) / 2, without cancellation for small x.
        terms = [2 * a * inverse_level / c for a, c in zip(scores, prices, strict=True)]
        found = [x / (2 * (math.sqrt(1 + x) + 1)) for x in terms]
        return [min(r, cap) for r, cap in zip(found, caps, strict=True)]

    def cost(ranks: Sequence[float]) -> float:
        return math.fsum(c * r * r for c, r in zip(prices, ranks, strict=True))

    if cost(caps) <= budget:
        return list(map(float, caps))
    low, high = 0.0, 1.0 / max(scores)
    while cost(ranks_at(high)) < budget:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(ranks_at(middle)) <= budget else (low, middle)
    return ranks_at(low)


def rank_step(equal: int) -> int:
    """Return what ranks are multiples of where equal ones would be ``equal``."""
    return next(step for step, mean in RANK_STEPS if equal >= mean)


def geometric_ranks(heads: int, rank: int, width: int, step: int) -> tuple[int, ...]:
    """Return ranks for the heads of one matrix, each half of the one before: r, r/2, r/4, ...

    They are multiples of ``step`` of at least one step, and the largest of which the squares add up
    to no more than those of equal heads, and the ranks to no more than the width. Halves are
    rounded down, and then up where that still fits.

    Args:
        heads: h, at least 1.
        rank: Of equal heads, at least one step.
        width: Largest sum of ranks, at least h steps.
        step: At least 1.
    """

    def fits(ranks: Sequence[int]) -> bool:
        return sum(ranks) <= width and sum(r * r for r in ranks) <= heads * rank**2

    found = [step] * heads
    for first in range(step, rank * heads + 1, step):
        ranks = [max((first >> i) // step * step, step) for i in range(heads)]
        found = ranks if fits(ranks) else found
    for i in range(1, heads):
        raised = [*found[:i], found[i] + step, *found[i + 1 :]]
        found = raised if found[i] > step and fits(raised) else found
    return tuple(found)


def round_ranks(
    continuous: Sequence[float],
    heads: int,
    scores: Sequence[float],
    sizes: Sequence[int],
    budget: int,
    caps: Sequence[int],
    step: int,
) -> list[int]:
    """Return the rank of each of a layer's heads, a multiple of ``step`` of at least one step.

    Round down, give up least utility for its price where the smallest ranks cost too much, and then
    raise what gains most for its price, one step at a time, while the budget allows it. Ties go to
    the first layer.

    Args:
        continuous: R_l, total ranks.
        heads: h, heads of each layer.
        scores: a_l.
        sizes: A rank of r on a layer costs its size times r^2.
        budget: Largest sum of costs; at least that of one step everywhere.
        caps: Largest rank of a head on each layer, at least one step.
        step: At least 1.
    """
    layers = range(len(continuous))
    tops = [max(cap // step * step, step) for cap in caps]
    ranks = [
        min(max(int(total / heads) // step * step, step), top)
        for total, top in zip(continuous, tops, strict=True)
    ]
    left = budget - sum(size * r * r for size, r in zip(sizes, ranks, strict=True))

    def price(layer: int) -> int:
        """Return the price of the last step."""
        return sizes[layer] * (ranks[layer] ** 2 - (ranks[layer] - step) ** 2)

    def next_price(layer: int) -> int:
        return sizes[layer] * ((ranks[layer] + step) ** 2 - ranks[layer] ** 2)

    def gain(layer: int, low: int) -> float:
        """Return the utility of the step from a rank."""
        return scores[layer] * math.log1p(heads * step / (1 + heads * low))

    while left < 0:
        larger = [i for i in layers if ranks[i] > step]
        least = min(larger, key=lambda i: gain(i, ranks[i] - step) / price(i))
        left += price(least)
        ranks[least] -= step
    while fitting := [i for i in layers if ranks[i] < tops[i] and next_price(i) <= left]:
        best = max(fitting, key=lambda i: gain(i, ranks[i]) / next_price(i))
        left -= next_price(best)
        ranks[best] += step
    return ranks


def reallocate(
    scores: Sequence[float],
    heads: Sequence[int],
    spare: Sequence[int],
    costs: Sequence[int],
    most: int,
    margin: float = 1.0,
) -> list[tuple[int, int]]:
    """Return which layer gives a head to which, so that sum_l a_l log(1 + h_l) grows.

    One head at a time goes from the layer that loses least, ``a [log(1 + h) - log(h)]``, to the one
    that gains most, ``a [log(2 + h) - log(1 + h)]``, while the gain exceeds ``margin`` times the
    loss. With a margin of 1 and enough moves this ends at the optimum over integers. Ties go to the
    first layer. Only layers whose heads cost the same exchange them, so that the budget is kept. No
    layer gives its last head.

    Args:
        scores: a_l >= 0.
        heads: h_l.
        spare: How many heads a layer may still receive.
        costs: Parameters of one head.
        most: Largest number of moves.
        margin: At least 1.

    Returns:
        Pairs of giver and receiver, in order.
    """
    now, left = list(heads), list(spare)
    moves: list[tuple[int, int]] = []

    def gain(layer: int) -> float:
        return scores[layer] * math.log1p(1 / (1 + now[layer]))

    def loss(layer: int) -> float:
        return scores[layer] * math.log1p(1 / now[layer])

    while len(moves) < most:
        best: tuple[float, int, int] | None = None
        for cost in dict.fromkeys(costs):
            alike = [i for i in range(len(now)) if costs[i] == cost]
            receiver = max((i for i in alike if left[i] > 0), key=gain, default=None)
            giver = min((i for i in alike if now[i] > 1 and i != receiver), key=loss, default=None)
            if receiver is None or giver is None or gain(receiver) <= margin * loss(giver):
                continue
            better = gain(receiver) - loss(giver)
            if best is None or better > best[0]:
                best = better, giver, receiver
        if best is None:
            break
        _, giver, receiver = best
        now[giver] -= 1
        now[receiver] += 1
        left[receiver] -= 1
        moves.append((giver, receiver))
    return moves


def uniform(layers: int, total: int, caps: Sequence[int] | None = None) -> list[int]:
    """Allocate ``total`` heads evenly; the first layers get the remainder.

    Heads that a capped layer cannot take go to the other layers.

    Raises:
        InputError: ``layers`` is 0, ``total`` is negative, or the caps cannot hold ``total`` heads.
    """
    return round_to_total(water_fill([1.0] * layers, total, caps), total, caps)


def utility(scores: Sequence[float], heads: Sequence[float]) -> float:
    """Return ``sum_l a_l log(1 + h_l)`` (TRISHUL, eq. waterfill_opt)."""
    return math.fsum(a * math.log1p(h) for a, h in zip(scores, heads, strict=True))


def best_integers(scores: Sequence[float], total: int) -> list[int]:
    """Return integers that sum to ``total`` and have the largest :func:`utility`.

    Each head in turn goes where it adds most, which is exact for a concave utility: the reference
    for :func:`round_to_total`, which is not always the best. Ties go to the first layer.

    Raises:
        InputError: ``scores`` is empty or ``total`` is negative.
    """
    _check_total(total)
    if not scores:
        raise InputError("scores are empty: at least one layer is needed")
    heads = [0] * len(scores)
    for _ in range(total):
        gains = [a * math.log1p(1 / (1 + h)) for a, h in zip(scores, heads, strict=True)]
        heads[gains.index(max(gains))] += 1
    return heads


def _check_total(total: float) -> None:
    if not (math.isfinite(total) and total >= 0):
        raise InputError(f"total={total} heads must be finite and at least 0")


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
