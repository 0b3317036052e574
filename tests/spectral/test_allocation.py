"""Water-filling is optimal and exact; rounding keeps the total and the caps."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize

from trishul_ray.errors import InputError
from trishul_ray.spectral.allocation import (
    round_to_total,
    uniform,
    water_fill,
)

SCORES = st.lists(st.floats(-4, 4).map(lambda e: 10.0**e), min_size=1, max_size=30)


def utility(scores, heads):
    """Compute ``sum_l a_l log(1 + h_l)``, the objective of TRISHUL, eq. waterfill_opt."""
    return math.fsum(a * math.log1p(h) for a, h in zip(scores, heads, strict=True))


@st.composite
def capped_problems(draw) -> tuple[list[float], float, list[float]]:
    scores = draw(SCORES)
    caps = [draw(st.floats(0, 10) | st.integers(0, 6)) for _ in scores]
    total = draw(st.floats(0, 1)) * math.fsum(caps)
    return scores, total, caps


def assert_optimal(scores, heads, total, caps):
    """Check Karush-Kuhn-Tucker: equal marginal gains inside, smaller at 0, larger at a cap."""
    assert math.fsum(heads) == pytest.approx(total, rel=1e-12, abs=1e-12)
    assert all(0 <= h <= cap for h, cap in zip(heads, caps, strict=True))
    gain = [a / (1 + h) for a, h in zip(scores, heads, strict=True)]
    may_grow = [g for g, h, cap in zip(gain, heads, caps, strict=True) if h < cap]
    may_shrink = [g for g, h in zip(gain, heads, strict=True) if h > 0]
    if may_grow and may_shrink:
        assert max(may_grow) <= min(may_shrink) * (1 + 1e-9)


@settings(deadline=None, max_examples=200)
@given(scores=SCORES, total=st.floats(0, 500))
def test_optimality_conditions(scores, total):
    assert_optimal(scores, water_fill(scores, total), total, [math.inf] * len(scores))


@settings(deadline=None, max_examples=200)
@given(problem=capped_problems())
def test_optimality_conditions_under_caps(problem):
    scores, total, caps = problem
    assert_optimal(scores, water_fill(scores, total, caps), total, caps)


@settings(deadline=None, max_examples=60)
@given(problem=capped_problems())
def test_agrees_with_bisection_on_the_water_level(problem):
    scores, total, caps = problem
    a, limit = np.array(scores), np.array(caps)
    assume(1e-6 < total < limit.sum() * (1 - 1e-6))

    def heads(log_mu: float) -> np.ndarray:
        return np.clip(a / math.exp(log_mu) - 1, 0, limit)

    log_mu = brentq(lambda x: heads(x).sum() - total, -40, 40, xtol=1e-14)
    np.testing.assert_allclose(water_fill(scores, total, caps), heads(log_mu), atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(
    scores=st.lists(st.floats(0.2, 3), min_size=2, max_size=8),
    total=st.floats(0.5, 20),
    cap=st.floats(3, 12),
)
def test_agrees_with_a_general_convex_solver(scores, total, cap):
    assume(total < 0.95 * cap * len(scores))
    a = np.array(scores)
    result = minimize(
        lambda h: -float(a @ np.log1p(h)),
        np.full(len(a), total / len(a)),
        jac=lambda h: -a / (1 + h),
        bounds=[(0, cap)] * len(a),
        constraints=[{"type": "eq", "fun": lambda h: h.sum() - total, "jac": np.ones_like}],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assume(result.success)
    heads = water_fill(scores, total, [cap] * len(scores))
    assert utility(scores, heads) >= -result.fun - 1e-9
    np.testing.assert_allclose(heads, result.x, atol=2e-4)


@settings(deadline=None, max_examples=100)
@given(scores=SCORES, total=st.floats(0.1, 200))
def test_dominates_uniform(scores, total):
    best = utility(scores, water_fill(scores, total))
    even = utility(scores, [total / len(scores)] * len(scores))
    assert best >= even * (1 - 1e-12)
    # A uniform allocation then violates the optimality conditions.
    if max(scores) > 1.01 * min(scores):
        assert best > even


def test_a_case_by_hand():
    # mu = 1: h = a - 1 for the first two, nothing for the third.
    assert water_fill([4.0, 2.0, 0.5], 4.0) == pytest.approx([3.0, 1.0, 0.0])
    # The first is full at 2; the others share 2 at mu = 2 / 3.
    assert water_fill([4.0, 2.0, 0.5], 4.0, [2, 9, 9]) == pytest.approx([2.0, 2.0, 0.0])


def test_only_ratios_of_scores_matter():
    scores = [3.0, 1.0, 2.5]
    one = water_fill(scores, 12.0)
    for scale in (1e-300, 1e-12, 1e290):
        assert water_fill([a * scale for a in scores], 12.0) == pytest.approx(one, rel=1e-12)
    assert water_fill([1e300, 1e-300], 5.0, [3, 3]) == pytest.approx([3.0, 2.0])


def test_equal_scores_get_equal_shares():
    assert water_fill([7.0] * 12, 48) == pytest.approx([4.0] * 12, rel=1e-15)
    assert water_fill([1.0, 2.0, 3.0], 9, [2, 3, 4]) == [2.0, 3.0, 4.0]
    assert water_fill([1.0, 2.0], 0.0) == [0.0, 0.0]


@settings(deadline=None, max_examples=200)
@given(scores=SCORES, total=st.integers(0, 200))
def test_rounding_keeps_total_within_one_head(scores, total):
    continuous = water_fill(scores, total)
    heads = round_to_total(continuous, total)
    assert sum(heads) == total
    assert all(isinstance(h, int) and h >= 0 for h in heads)
    assert all(abs(h - x) < 1 + 1e-9 for h, x in zip(heads, continuous, strict=True))


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(
        st.tuples(st.floats(-2, 2).map(lambda e: 10.0**e), st.integers(0, 7)),
        min_size=1,
        max_size=20,
    ),
    share=st.floats(0, 1),
)
def test_rounding_respects_caps(rows, share):
    scores, caps = [a for a, _ in rows], [cap for _, cap in rows]
    total = math.floor(share * sum(caps))
    heads = round_to_total(water_fill(scores, total, caps), total, caps)
    assert sum(heads) == total
    assert all(0 <= h <= cap for h, cap in zip(heads, caps, strict=True))
    even = uniform(len(caps), total, caps)
    assert sum(even) == total
    assert all(0 <= h <= cap for h, cap in zip(even, caps, strict=True))


def test_rounding_by_largest_residue_ties_by_index():
    assert round_to_total([3.2, 4.7, 2.6, 1.5], 12) == [3, 5, 3, 1]
    assert round_to_total([1.5, 1.5, 1.5, 1.5], 6) == [2, 2, 1, 1]
    # Values that are equal up to rounding also tie.
    assert round_to_total([1.5, 1.5 + 1e-12, 1.5, 1.5 - 1e-12], 6) == [2, 2, 1, 1]
    assert round_to_total([2.0 - 1e-13, 1.0 + 1e-13], 3) == [2, 1]
    assert round_to_total([2.0 + 1e-13, 1.0], 3) == [2, 1]


def test_rounding_passes_on_what_a_cap_rejects():
    assert round_to_total([2.9, 2.2, 0.9], 6, [2, 3, 3]) == [2, 3, 1]
    assert round_to_total([5.0, 0.5, 0.5], 6, [2, 3, 3]) == [2, 2, 2]


def test_uniform():
    assert uniform(12, 48) == [4] * 12
    assert uniform(4, 10) == [3, 3, 2, 2]
    assert uniform(3, 10, [2, 9, 9]) == [2, 4, 4]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: water_fill([1.0, 0.0], 3), r"scores\[1\]=0\.0"),
        (lambda: water_fill([1.0, math.nan], 3), r"scores\[1\]=nan"),
        (lambda: water_fill([math.inf], 3), r"scores\[0\]=inf"),
        (lambda: water_fill([1.0, 1.0], 5, [2, 2]), "total=5 heads exceed the sum 4"),
        (lambda: round_to_total([1.0, 2.0], 3, [1, 1]), "total=3 heads exceed the sum 2"),
    ],
)
def test_invalid_input_raises(call, message):
    with pytest.raises(InputError, match=message):
        call()
