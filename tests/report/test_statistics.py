"""Statistics of a page, on simulated tables of known truth and on small ones computed by hand."""

import itertools

import numpy as np
import pytest
from scipy import stats

from trishul_ray.report import statistics
from trishul_ray.report.statistics import (
    ALPHA,
    best_row,
    compare_rows,
    complete_block,
    estimate,
    seeds_needed,
    smallest_p_value,
)


def simulate(rng, means, seeds, *, shared=0.0, noise=0.5, tails=None, test_rows=None):
    """Values [rows, seeds, columns] around the true ``means`` [rows, columns].

    ``noise`` is independent; ``shared`` is what a seed gives a row in all columns. What a seed
    gives a column in all rows is always there: pairs do not see it. With ``test_rows``, values are
    accuracies on so many rows.
    """
    rows, columns = means.shape
    size = (rows, seeds, columns)
    draws = rng.normal(size=size) if tails is None else rng.standard_t(tails, size=size)
    of_seed = rng.normal(size=(rows, seeds, 1)) * shared
    values = means[:, None, :] + noise * draws + of_seed + 2 * rng.normal(size=(1, seeds, columns))
    return values if test_rows is None else np.round(values * test_rows / 100) * 100 / test_rows


def wrong(groups, truths):
    """Whether a page calls a row worse than the best that truly is not."""
    for comparison, means in zip(compare_rows(groups), truths, strict=True):
        levels = means.mean(axis=1)
        for row, result in enumerate(comparison.rows):
            if result and result.decided and levels[row] >= levels[comparison.best] - 1e-9:
                return True
    return False


def null(rng, rows, columns):
    return np.zeros((rows, columns))


def mixed(rng, rows, columns):
    """Some rows share the best mean, others are 1 to 30 points below."""
    below = np.where(np.arange(rows) < rows // 2, 0.0, rng.choice([1.0, 5.0, 30.0], size=rows))
    return np.repeat(-below[:, None], columns, axis=1)


def crossing(rng, rows, columns):
    """Every row has the same mean over the columns, and different ones in each of them."""
    effects = 3 * rng.normal(size=(rows, columns))
    return effects - effects.mean(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("truth", "shape", "options"),
    [
        (null, (7, 3, 8), {}),
        (null, (7, 3, 8), {"shared": 1.0}),
        (null, (7, 3, 8), {"shared": 1.0, "noise": 0.0}),
        (null, (7, 5, 4), {"shared": 0.7, "tails": 3}),
        (null, (2, 3, 6), {"shared": 0.5}),
        (null, (3, 10, 1), {"tails": 2}),
        (null, (5, 3, 2), {"shared": 2.0, "test_rows": 60}),
        (mixed, (7, 3, 8), {"shared": 0.7}),
        (crossing, (7, 3, 8), {"shared": 0.3}),
        (crossing, (4, 6, 3), {}),
    ],
)
def test_decided_is_wrong_on_at_most_one_page_in_twenty(truth, shape, options, monkeypatch):
    # Without the sign-flip test there are more wrong pages, and the simulation takes seconds.
    monkeypatch.setattr(statistics, "_sign_flip_p_value", lambda *_: 0.0)
    rng, pages = np.random.default_rng(7), 200
    rows, seeds, columns = shape
    count = 0
    for _ in range(pages):
        truths = [truth(rng, rows, columns) for _ in range(2)]
        count += wrong([simulate(rng, means, seeds, **options) for means in truths], truths)
    # More than this has a chance of one in a thousand where the true share is ALPHA.
    assert count <= stats.binom.ppf(0.999, pages, ALPHA)


def test_both_tests_together_are_wrong_on_at_most_one_page_in_twenty():
    rng, pages = np.random.default_rng(3), 150
    count = 0
    for _ in range(pages):
        truths = [mixed(rng, 4, 3), null(rng, 2, 6)]
        groups = [simulate(rng, means, 5, shared=0.5) for means in truths]
        count += wrong(groups, truths)
    assert count <= stats.binom.ppf(0.999, pages, ALPHA)


def test_the_sign_flip_test_alone_would_be_wrong_where_columns_share_their_seeds(monkeypatch):
    """Why there are two tests."""
    monkeypatch.setattr(statistics, "_student_p_value", lambda _: 0.0)
    rng = np.random.default_rng(0)
    truth = np.zeros((4, 6))
    count = sum(wrong([simulate(rng, truth, 3, shared=1.0)], [truth]) for _ in range(30))
    assert count > 10


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("draw", ["normal", "heavy tails", "accuracy"])
def test_intervals_cover_the_true_mean(seeds, draw):
    rng, tables = np.random.default_rng(1), 4000
    samples = {
        "normal": lambda: 80 + rng.normal(size=(tables, seeds)),
        "heavy tails": lambda: 80 + rng.standard_t(4, size=(tables, seeds)),
        "accuracy": lambda: rng.binomial(400, rng.normal(0.8, 0.02, size=(tables, seeds))) / 4,
    }[draw]()
    covered = 0
    for values in samples:
        low, high = estimate(values).interval()
        covered += low <= 80 <= high
    assert covered / tables >= 0.93


def test_large_differences_are_decided_with_three_seeds():
    rng, found = np.random.default_rng(2), 0
    truth = np.zeros((7, 8))
    truth[3] = 12
    for _ in range(5):
        (result,) = compare_rows([simulate(rng, truth, 3)])
        assert result.best == 3
        found += sum(row.decided for row in result.rows if row)
    assert found >= 0.9 * 5 * 6


def test_moderate_differences_are_decided_with_more_seeds():
    rng, found = np.random.default_rng(2), 0
    truth = np.array([[0.0] * 4, [1.0] * 4, [0.0] * 4])
    for _ in range(10):
        (result,) = compare_rows([simulate(rng, truth, 8, shared=0.2)])
        found += sum(row.decided for row in result.rows if row)
    assert found >= 15


@pytest.mark.parametrize("gap", [0.5, 5.0, 500.0])
def test_three_seeds_do_not_decide_one_column(gap):
    values = np.array([[[80.0], [80.1], [80.2]], [[80.0], [80.1], [80.3]]])
    values[0] += gap
    (result,) = compare_rows([values])
    assert result.best == 0
    assert not result.rows[1].decided
    assert result.rows[1].difference == pytest.approx(1 / 30 - gap)
    assert smallest_p_value(3, 1) == 0.25
    assert smallest_p_value(1, 8) == 1.0


def test_p_values_are_those_of_an_exact_test():
    """Six seeds in two columns, all 4,096 flips counted by hand."""
    rng = np.random.default_rng(5)
    differences = rng.normal(1.0, 1.0, size=(6, 2))
    values = np.stack([differences, np.zeros_like(differences)])
    (result,) = compare_rows([values])
    signs = np.array(list(itertools.product([-1, 1], repeat=12)))
    sums = np.abs(signs @ differences.ravel())
    flipped = float((sums >= abs(differences.sum()) - 1e-9).mean())
    student = stats.ttest_1samp(differences.mean(axis=1), 0.0).pvalue
    assert result.rows[1].p_value == pytest.approx(max(flipped, student))
    assert result.rows[1].difference == pytest.approx(-differences.mean())


def test_more_pairs_on_the_page_make_every_decision_harder():
    rng = np.random.default_rng(4)
    truth = np.zeros((2, 4))
    truth[0] = 2
    page = [simulate(rng, truth, 5) for _ in range(12)]
    alone = compare_rows(page[:1])[0].rows
    together = compare_rows(page)[0].rows
    p_value = [row.p_value or 1.0 for rows in (alone, together) for row in rows if row]
    assert p_value[0] < p_value[1]
    # Pairs that nothing could decide do not count.
    hopeless = [np.zeros((5, 3, 1)) for _ in range(9)]
    assert compare_rows([page[0], *hopeless])[0].rows == alone


def test_equal_rows_are_not_decided():
    values = np.repeat(np.arange(12.0).reshape(1, 3, 4), 3, axis=0)
    values[2] += 0.1 + 0.2 - 0.3  # not zero, but no difference either
    (result,) = compare_rows([values])
    assert not any(row.decided for row in result.rows if row)
    assert all(row.seeds_needed is None for row in result.rows if row)


def test_missing_runs():
    rng = np.random.default_rng(0)
    values = simulate(rng, np.zeros((3, 4)), 3)
    values[:, :, 0] -= 1000  # a difficult column, which the first row lacks
    values[0, :, 0] = np.nan
    values[1] += 10
    values[2, 1:, 1:] = np.nan
    (result,) = compare_rows([values])
    assert result.best == 1  # though the first row has by far the highest mean
    assert (result.rows[0].seeds, result.rows[0].columns) == (3, 3)
    assert (result.rows[2].seeds, result.rows[2].columns) == (1, 4)
    assert result.rows[2].seeds_needed is None
    empty = np.full((2, 3, 4), np.nan)
    assert compare_rows([empty])[0].best is None
    assert best_row(values[:1]) is None
    # Rows that share no column.
    empty[0, :, 0], empty[1, :, 1] = 1, 2
    assert set(compare_rows([empty])[0].rows) == {None}
    assert compare_rows([]) == ()


def test_a_row_without_the_difficult_column_is_not_the_best_for_it():
    values = np.array([[[90.0, 50.0]], [[89.0, 51.5]], [[89.5, np.nan]]])
    assert best_row(values) == 1
    values[2, 0, 0] = 93.0
    assert best_row(values) == 2


def test_a_row_without_the_difficult_seed_is_not_the_best_for_it():
    values = np.array([[[90.0], [80.0]], [[89.5], [np.nan]]])
    assert best_row(values) == 0
    values[1, 0, 0] = 90.5
    assert best_row(values) == 1


def test_a_row_that_is_ahead_in_what_both_have_is_not_called_worse(monkeypatch):
    """Where runs are missing, it may still not be the best."""
    monkeypatch.setattr(statistics, "best_row", lambda _: 1)
    values = simulate(np.random.default_rng(0), np.array([[1.0] * 8, [0.0] * 8]), 4, noise=0.01)
    (result,) = compare_rows([values])
    assert result.rows[0].difference == pytest.approx(1, abs=0.01)
    assert not result.rows[0].decided


def test_the_largest_complete_part_is_compared():
    differences = np.arange(12.0).reshape(3, 4)
    assert complete_block(differences) is differences
    differences[1, 1:] = np.nan
    assert complete_block(differences).tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    differences[2, 2:] = np.nan
    # Four numbers either way: with more seeds.
    assert complete_block(differences).tolist() == [[0, 1], [8, 9]]
    assert complete_block(np.full((2, 2), np.nan)).size == 0


def test_the_number_of_seeds_needed():
    rng = np.random.default_rng(9)
    differences = rng.normal(0.6, 0.5, size=(3, 4))
    needed = seeds_needed(differences, 0.01)
    assert 3 < needed < 30
    # It is needed: more seeds of the same mean and spread decide, one fewer does not.
    means = differences.mean(axis=1)
    for count, enough in ((needed, True), (needed - 1, False)):
        t = means.mean() * np.sqrt(count) / means.std(ddof=1)
        assert (2 * stats.t.sf(t, count - 1) <= 0.01) == enough
    assert seeds_needed(differences, 0.001) > needed
    # The floor of the sign-flip test: 2 / 2^n.
    clear = np.array([[50.0], [50.1], [50.2]])
    assert seeds_needed(clear, 0.05) >= 6
    assert seeds_needed(clear, 0.001) >= 11
    unclear = np.array([[1.0, -0.9], [-1.0, 0.8], [0.5, -0.3]])
    assert seeds_needed(unclear, 0.001) is None
    assert seeds_needed(clear[:1], 0.05) is None


def test_estimates():
    assert estimate([]) is None
    assert estimate([np.nan]) is None
    one = estimate([80.0])
    assert (one.mean, one.deviation, one.count, one.interval()) == (80.0, None, 1, None)
    two = estimate([80.0, np.nan, 82.0])
    assert (two.mean, two.count) == (81.0, 2)
    assert two.interval() == pytest.approx((81 - 12.706, 81 + 12.706), abs=1e-3)


def test_decisions_are_reproducible():
    rng = np.random.default_rng(6)
    truth = np.zeros((3, 7))
    truth[0] = 4
    groups = [simulate(rng, truth, 4)]
    first = compare_rows(groups)
    statistics._sign_flip_p_value.cache_clear()
    assert compare_rows(groups) == first
    assert any(row.decided for row in first[0].rows if row)
