"""Tests of differences, on simulated tables of known truth and on small ones computed by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from trishul_ray.report.statistics import ALPHA, compare_rows, compare_scores


def frame(values):
    """Return values [rows, seeds, columns] as :func:`compare_rows` expects them."""
    rows, seeds, columns = values.shape
    names = pd.MultiIndex.from_product([range(columns), range(seeds)])
    return pd.DataFrame(values.transpose(0, 2, 1).reshape(rows, -1), columns=names)


def compare(*groups):
    return compare_rows([frame(np.asarray(values, float)) for values in groups])


def simulate(rng, means, seeds, *, shared=0.0, spread=1.0, missing=0.0):
    """Draw values [rows, seeds, columns] around the true ``means`` [rows, columns].

    ``shared`` is the deviation of a seed in all columns of a row, and ``spread`` the deviation of
    each row. The deviation of a seed in all rows of a column is always present, but pairs do not
    see it.
    """
    rows, columns = means.shape
    noise = 0.5 * rng.normal(size=(rows, seeds, columns))
    noise += shared * rng.normal(size=(rows, seeds, 1))
    values = means[:, None] + noise * np.broadcast_to(spread, rows)[:, None, None]
    values += 2 * rng.normal(size=(1, seeds, columns))
    values[rng.random(values.shape) < missing] = np.nan
    return values


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((7, 3, 8), {}),
        ((7, 3, 8), {"shared": 1.0}),
        ((2, 2, 1), {}),
        ((6, 4, 4), {"shared": 0.5, "missing": 0.2}),
        ((7, 5, 3), {"shared": 0.5, "spread": [10.0, *[1.0] * 6]}),
        ((7, 10, 3), {"spread": 2.0 ** -np.arange(7)}),
    ],
)
def test_equal_rows_are_called_worse_on_few_tables(shape, options):
    rng, tables = np.random.default_rng(7), 100
    rows, seeds, columns = shape
    wrong = 0
    for _ in range(tables):
        made = [simulate(rng, np.zeros((rows, columns)), seeds, **options) for _ in range(2)]
        found, _ = compare(*made)
        wrong += any(row.decided for _, others in found for row in others.values())
    # Exceeding this has a probability of 0.1% if the true share is ALPHA.
    assert wrong <= stats.binom.ppf(0.999, tables, ALPHA)


def test_p_values_come_from_paired_tests_by_holm():
    values = simulate(np.random.default_rng(5), np.array([[2.0] * 2, [0.0] * 2, [-1.0] * 2]), 6)
    ((best, others),), pairs = compare(values)
    assert (best, pairs) == (0, 3)
    means = values.mean(axis=2)
    tests = {row: stats.ttest_rel(means[row], means[0]) for row in (1, 2)}
    first, second = sorted(tests, key=lambda row: tests[row].pvalue)
    expected = min(1.0, 3 * tests[first].pvalue)
    assert others[first].p_value == pytest.approx(expected)
    expected = max(expected, min(1.0, 2 * tests[second].pvalue))
    assert others[second].p_value == pytest.approx(expected)
    for row in tests:
        assert others[row].difference == pytest.approx((means[row] - means[0]).mean())


def test_pairs_of_all_groups_count():
    values = simulate(np.random.default_rng(4), np.array([[2.0] * 4, [0.0] * 4]), 5)
    others = [simulate(np.random.default_rng(n), np.zeros((2, 4)), 5) for n in range(3)]
    (alone,), pairs = compare(values)
    (together, *_), more = compare(values, *others, np.full((3, 5, 4), np.nan))
    assert (pairs, more) == (1, 4)
    assert together[1][1].p_value == pytest.approx(4 * alone[1][1].p_value)


def test_seeds_without_spread_decide_nothing():
    values = np.array([[[80.0]] * 3, [[50.0]] * 3])
    for shown in (values, values + np.array([0.0, 1.0, 5.0])[:, None], values[:, :1]):
        (row,) = compare(shown)[0][0][1].values()
        assert (row.decided, row.p_value, row.difference) == (False, None, -30)
    values[1] += 30 + 0.1 + 0.2 - 0.3  # not zero, but not a difference either
    assert compare(values)[0][0][1][1].difference == 0


def test_only_common_seeds_and_columns_are_compared():
    values = np.full((3, 3, 2), np.nan)
    values[0], values[1, :, 0] = 80 + np.arange(6).reshape(3, 2), [70, 72, 75]
    ((best, others),), pairs = compare(values)
    assert (best, pairs, set(others)) == (0, 1, {1})
    assert others[1].difference == pytest.approx((70 + 72 + 75 - 80 - 82 - 84) / 3)
    values[2, :, 1] = 90  # Complete rows are the candidates for the best.
    assert compare(values)[0][0][0] == 0
    assert compare(np.full((2, 3, 1), np.nan))[0][0][0] is None
    assert compare(values[:1])[0][0][0] is None


def test_two_models_on_the_same_rows():
    rng = np.random.default_rng(0)
    first, second = (rng.random((2, 400)) < [[0.7], [0.6]]).astype(np.float32)
    found = compare_scores(first, second)
    only = [int(((first == 1) & (second == 0)).sum()), int(((first == 0) & (second == 1)).sum())]
    assert [found.first_better, found.second_better] == only
    assert found.p_value == pytest.approx(stats.binomtest(only[0], sum(only)).pvalue)
    assert found.difference == pytest.approx((only[0] - only[1]) / 400)
    low, high = found.interval
    assert low < found.difference < high
    assert compare_scores(first, first).p_value == 1
    scores = rng.random((2, 50))
    expected = stats.ttest_rel(*scores)
    found = compare_scores(*scores)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))


def test_few_different_rows_have_a_wide_interval():
    five = np.zeros((2, 100))
    five[0, :5] = 1
    low, high = compare_scores(*five).interval
    # Bonett and Price 2012, equation 3, by hand.
    p, q = 6 / 102, 1 / 102
    half = stats.norm.ppf(0.975) * np.sqrt((p + q - (p - q) ** 2) / 102)
    assert (low, high) == pytest.approx((p - q - half, p - q + half))
    assert low < 0 < high and compare_scores(*five).p_value > 0.05
    assert compare_scores(five[1], five[1]).interval[1] > 0.01
