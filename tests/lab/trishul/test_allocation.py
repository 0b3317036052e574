"""Ranks by layer and by head, and moves of heads, against the best integers and optimality."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.lab.trishul.allocation import (
    geometric_ranks,
    rank_step,
    reallocate,
    round_ranks,
    water_fill_ranks,
)
from trishul_ray.spectral.allocation import (
    utility,
)


@st.composite
def exchanges(draw) -> tuple[list[float], list[int], list[int]]:
    count = draw(st.integers(2, 5))
    scores = [draw(st.floats(0.01, 100)) for _ in range(count)]
    heads = [draw(st.integers(1, 4)) for _ in range(count)]
    return scores, heads, [draw(st.integers(0, 3)) for _ in range(count)]


def after_moves(heads, moves):
    now = list(heads)
    for giver, receiver in moves:
        now[giver] -= 1
        now[receiver] += 1
    return now


@settings(deadline=None, max_examples=200)
@given(problem=exchanges())
def test_moves_end_at_the_best_integers(problem):
    scores, heads, spare = problem
    now = after_moves(heads, reallocate(scores, heads, spare, [1] * len(heads), most=99))
    ranges = [range(1, h + s + 1) for h, s in zip(heads, spare, strict=True)]
    allowed = [h for h in itertools.product(*ranges) if sum(h) == sum(heads)]
    best = max(utility(scores, each) for each in allowed)
    assert utility(scores, now) == pytest.approx(best, rel=1e-12)


@settings(deadline=None, max_examples=200)
@given(problem=exchanges(), most=st.integers(1, 4), margin=st.floats(1.0, 1.5))
def test_every_move_gains_keeps_the_budget_and_the_same_signal_moves_nothing_more(
    problem, most, margin
):
    scores, heads, spare = problem
    costs = [1 + i % 2 for i in range(len(heads))]
    moves = reallocate(scores, heads, spare, costs, most, margin)
    assert len(moves) <= most and all(costs[a] == costs[b] for a, b in moves)
    now = after_moves(heads, moves)
    assert min(now) >= 1
    assert all(n <= h + s for n, h, s in zip(now, heads, spare, strict=True))
    assert np.dot(costs, now) == np.dot(costs, heads)
    assert not moves or utility(scores, now) > utility(scores, heads)
    every = reallocate(scores, heads, spare, costs, 99, margin)
    last = after_moves(heads, every)
    left = [h + s - n for h, s, n in zip(heads, spare, last, strict=True)]
    assert reallocate(scores, last, left, costs, 99, margin) == []


def test_moves_by_hand():
    # A gain of 3 log(3/2) beside a loss of log(3/2).
    assert reallocate([3.0, 1.0], [1, 2], [1, 0], [1, 1], most=5) == [(1, 0)]
    assert reallocate([3.0, 1.0], [1, 2], [1, 0], [1, 1], most=5, margin=2.99) == [(1, 0)]
    assert reallocate([3.0, 1.0], [1, 2], [1, 0], [1, 1], most=5, margin=3.01) == []
    assert reallocate([3.0, 1.0], [1, 1], [1, 0], [1, 1], most=5) == []  # the last head stays
    assert reallocate([3.0, 1.0], [1, 2], [1, 0], [1, 2], most=5) == []  # another price
    assert reallocate([0.0, 0.0], [2, 2], [1, 1], [1, 1], most=5) == []


@st.composite
def rank_problems(draw, most_layers, prices):
    count = draw(st.integers(1, most_layers))
    scores = [draw(st.floats(0.01, 100)) for _ in range(count)]
    caps = [draw(st.integers(8, 60)) for _ in range(count)]
    prices = [draw(prices) for _ in range(count)]
    most = sum(c * cap**2 for c, cap in zip(prices, caps, strict=True))
    return scores, prices, draw(st.floats(0.05, 1.2)) * most, caps


@settings(deadline=None, max_examples=200)
@given(problem=rank_problems(6, st.floats(0.1, 4)))
def test_ranks_meet_the_optimality_conditions_of_the_quadratic_price(problem):
    scores, prices, budget, caps = problem
    ranks = water_fill_ranks(scores, prices, budget, caps)
    cost = sum(c * r * r for c, r in zip(prices, ranks, strict=True))
    assert all(0 < r <= cap for r, cap in zip(ranks, caps, strict=True))
    if cost < budget * (1 - 1e-9):
        assert ranks == caps
        return
    assert cost <= budget * (1 + 1e-12)
    per_price = [a / (1 + r) / (2 * c * r) for a, c, r in zip(scores, prices, ranks, strict=True)]
    inside = [g for g, r, cap in zip(per_price, ranks, caps, strict=True) if r < cap]
    full = [g for g, r, cap in zip(per_price, ranks, caps, strict=True) if r == cap]
    assert not inside or max(inside) <= min(inside) * (1 + 1e-6)
    assert not (inside and full) or min(full) >= max(inside) * (1 - 1e-6)


@settings(deadline=None, max_examples=100)
@given(
    problem=rank_problems(3, st.integers(1, 3)),
    heads=st.integers(1, 4),
    step=st.sampled_from([1, 4, 8]),
)
def test_rounded_ranks_are_within_a_step_of_the_best_integers(problem, heads, step):
    scores, sizes, budget, caps = problem
    budget = max(int(budget), sum(sizes) * step**2)

    def worth(ranks):
        return utility(scores, [heads * r for r in ranks])

    prices = [size / heads**2 for size in sizes]
    totals = water_fill_ranks(scores, prices, budget, [heads * cap for cap in caps])
    ranks = round_ranks(totals, heads, scores, sizes, budget, caps, step)
    assert all(r % step == 0 and step <= r <= cap for r, cap in zip(ranks, caps, strict=True))
    assert sum(size * r * r for size, r in zip(sizes, ranks, strict=True)) <= budget
    levels = [range(step, cap + 1, step) for cap in caps]
    allowed = (
        each
        for each in itertools.product(*levels)
        if sum(size * r * r for size, r in zip(sizes, each, strict=True)) <= budget
    )
    best = max(map(worth, allowed))
    assert worth(ranks) <= best * (1 + 1e-12) <= utility(scores, totals) * (1 + 1e-9)
    # Greedy steps miss less than the step that did not fit.
    steps = [
        a * math.log1p(heads * step / (1 + heads * r))
        for a, r, cap in zip(scores, ranks, caps, strict=True)
        if r + step <= cap
    ]
    assert best - worth(ranks) <= max(steps, default=0.0) + 1e-9


@settings(deadline=None, max_examples=100)
@given(scores=st.lists(st.floats(0.01, 100), min_size=2, max_size=12), mean=st.integers(8, 120))
def test_a_larger_score_has_no_smaller_rank(scores, mean):
    heads, step, cap, count = 4, 8, 192, len(scores)
    budget = heads * count * mean**2
    totals = water_fill_ranks(scores, [1 / heads] * count, budget, [heads * cap] * count)
    ranks = round_ranks(totals, heads, scores, [heads] * count, budget, [cap] * count, step)
    pairs = sorted(zip(scores, ranks, strict=True))
    assert all(r <= s for (a, r), (b, s) in itertools.pairwise(pairs) if a < b)


@given(st.integers(1, 12), st.integers(1, 120), st.integers(0, 900))
def test_halved_ranks_stay_within_what_equal_ones_take(heads, rank, more):
    step = rank_step(rank)
    width = heads * step + more
    ranks = geometric_ranks(heads, rank, width, step)
    assert len(ranks) == heads and min(ranks) >= step and not any(r % step for r in ranks)
    assert sum(ranks) <= width and sum(r * r for r in ranks) <= heads * rank**2
    for i, found in enumerate(ranks):
        assert found == step or abs(found - ranks[0] / 2**i) <= step
    if width >= heads * rank:  # as wide as equal heads need: only the budget binds
        raised = [max((ranks[0] + step >> i) // step * step, step) for i in range(heads)]
        assert sum(r * r for r in raised) > heads * rank**2
