"""Allocation of ranks over layers, of ranks within a matrix, and of heads during training.

Ranks instead of heads have a quadratic price: with total rank R_l on a layer,

    max sum_l a_l log(1 + R_l)   subject to   sum_l c_l R_l^2 <= B,  R_l <= cap_l,

is solved by ``R_l = min((-1 + sqrt(1 + 2 a_l / (c_l mu))) / 2, cap_l)``.
"""

import math
from collections.abc import Sequence

#: Ranks that differ are multiples of the first, where equal ones are the second or more.
RANK_STEPS = ((8, 64), (4, 32), (1, 1))


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
        rank: Rank of equal heads, at least one step.
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
