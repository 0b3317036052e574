"""Statistics of a page, on simulated tables of known truth and on small ones computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from trishul_ray.report.statistics import (
    ALPHA,
    MAX_SEEDS,
    POWER,
    best_row,
    compare_rows,
    compare_scores,
    complete_block,
    estimate,
)


def simulate(
    rng, means, seeds, *, shared=0.0, noise=0.5, tails=None, test_rows=None, spread=1.0, missing=0.0
):
    """Values [rows, seeds, columns] around the true ``means`` [rows, columns].

    ``noise`` is independent; ``shared`` is what a seed gives a row in all columns; both are times
    the ``spread`` of each row. The effect of a seed on a column in all rows is always there: pairs
    do not see it. With ``test_rows``, values are accuracies on so many rows; some may be missing.
    """
    rows, columns = means.shape
    size = (rows, seeds, columns)
    draws = rng.normal(size=size) if tails is None else rng.standard_t(tails, size=size)
    of_seed = rng.normal(size=(rows, seeds, 1)) * shared
    spread = np.broadcast_to(spread, rows)[:, None, None]
    own = spread * (noise * draws + of_seed)
    values = means[:, None, :] + own + 2 * rng.normal(size=(1, seeds, columns))
    if missing:
        values[rng.random(size) < missing] = np.nan
    return values if test_rows is None else np.round(values * test_rows / 100) * 100 / test_rows


def wrong(groups, truths):
    """Whether a table calls a row worse than the best that truly is not."""
    for comparison, means in zip(compare_rows(groups).groups, truths, strict=True):
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


#: Row after row with half the spread; one noisy row among quiet ones; two of seven.
HALVING, ONE, TWO = 2.0 ** -np.arange(7), [10.0, *[1.0] * 6], [10.0, 10.0, *[1.0] * 5]


@pytest.mark.parametrize(
    ("truth", "shape", "options"),
    [
        (null, (7, 3, 8), {}),
        (null, (7, 3, 8), {"shared": 1.0}),
        (null, (7, 3, 8), {"shared": 1.0, "noise": 0.0}),
        (null, (7, 5, 4), {"shared": 0.7, "tails": 3}),
        (null, (2, 3, 6), {"shared": 0.5}),
        (null, (2, 2, 1), {}),
        (null, (3, 10, 1), {"tails": 2}),
        (null, (5, 3, 2), {"shared": 2.0, "test_rows": 60}),
        (null, (4, 3, 1), {"noise": 0.3, "test_rows": 200}),
        (mixed, (7, 3, 8), {"shared": 0.7}),
        (crossing, (7, 3, 8), {"shared": 0.3}),
        (crossing, (4, 6, 3), {}),
        (null, (6, 4, 4), {"shared": 0.5, "missing": 0.2}),
        *(
            (null, (7, seeds, 3), {"shared": 0.5, "spread": spread})
            for seeds in (3, 10)
            for spread in (HALVING, ONE, TWO)
        ),
    ],
)
def test_decided_is_wrong_on_at_most_one_table_in_twenty(truth, shape, options):
    rng, tables = np.random.default_rng(7), 200
    rows, seeds, columns = shape
    count = 0
    for _ in range(tables):
        truths = [truth(rng, rows, columns) for _ in range(2)]
        count += wrong([simulate(rng, means, seeds, **options) for means in truths], truths)
    # More than this has a chance of one in a thousand where the true share is ALPHA.
    assert count <= stats.binom.ppf(0.999, tables, ALPHA)


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


def test_three_seeds_decide_one_column_of_few_rows():
    values = 80 + np.array([0.0, -5.0, -30.0])[:, None, None] + np.zeros((3, 3, 1))
    values[:, :, 0] += np.array([[0.0, 0.1, 0.2], [0.1, 0.1, 0.3], [0.0, 0.2, 0.1]])
    (result,) = compare_rows([values]).groups
    assert result.best == 0
    assert [row.decided for row in result.rows[1:]] == [True, True]
    # Each p-value is that of its own runs: no floor that all share.
    assert result.rows[2].p_value < result.rows[1].p_value / 10


def test_p_values_are_the_larger_of_two_exact_tests():
    rng = np.random.default_rng(5)
    values = simulate(rng, np.array([[1.0] * 2, [0.0] * 2, [-1.0] * 2]), 6)
    comparison = compare_rows([values])
    (result,) = comparison.groups
    assert comparison.pairs == 3
    means = values.mean(axis=2)
    # The pooled variance is that of the residuals of a two-way analysis of variance.
    rest = means - means.mean(axis=0) - means.mean(axis=1, keepdims=True) + means.mean()
    error = np.sqrt((rest**2).sum() / 10)
    for row in {0, 1, 2} - {result.best}:
        paired = means[row] - means[result.best]
        t = abs(paired.mean()) / (error * np.sqrt(2 / 6))
        pooled = 3 * 2 * stats.t.sf(t, 10)
        own = 2 * stats.ttest_1samp(paired, 0.0).pvalue
        assert result.rows[row].p_value == pytest.approx(min(1, max(pooled, own)))
        assert result.rows[row].difference == pytest.approx(paired.mean())


def test_the_threshold_is_the_smallest_difference_that_is_decided():
    values = simulate(np.random.default_rng(2), np.array([[3.0] * 2, [0.0] * 2, [0.0] * 2]), 4)
    (result,) = compare_rows([values]).groups
    row = result.rows[1]
    for factor, decided in ((1.001, True), (0.999, False)):
        moved = values.copy()
        moved[0] += factor * row.threshold + row.difference
        moved[2] -= 100  # the best stays the best
        assert compare_rows([moved]).groups[0].rows[1].decided == decided


def test_the_verdict_of_a_table_depends_on_its_own_pairs_alone():
    rng = np.random.default_rng(4)
    truth = np.zeros((2, 4))
    truth[0] = 2
    groups = [simulate(rng, truth, 5) for _ in range(12)]
    alone, together = compare_rows(groups[:1]), compare_rows(groups)
    assert (alone.pairs, together.pairs) == (1, 12)
    p_values = [r.p_value for t in (alone, together) for r in t.groups[0].rows if r]
    assert p_values[0] < p_values[1]
    # Groups, and rows of a group, that are the same runs count once.
    assert compare_rows([groups[0], groups[0]]).groups[0] == alone.groups[0]
    twice = compare_rows([np.concatenate([groups[0], groups[0][1:]])])
    assert (twice.pairs, twice.groups[0].rows[1]) == (1, alone.groups[0].rows[1])
    # Rows without numbers are no pairs.
    empty = np.full((3, 5, 4), np.nan)
    assert compare_rows([np.concatenate([groups[0], empty]), empty]).groups[0].rows[:2] == (
        alone.groups[0].rows
    )


def test_equal_rows_are_not_decided():
    values = np.repeat(np.arange(12.0).reshape(1, 3, 4), 3, axis=0)
    values[2] += 0.1 + 0.2 - 0.3  # not zero, but no difference either
    (result,) = compare_rows([values]).groups
    assert not any(row.decided for row in result.rows if row)
    assert all(row.seeds_needed is None for row in result.rows if row)
    assert [row.difference for row in result.rows if row] == [0, 0]


def test_seeds_that_show_no_spread_decide_nothing():
    values = np.array([[[80.0]] * 3, [[50.0]] * 3])
    for shown in (values, values + np.array([0.0, 1.0, 5.0])[:, None], values[:, :1]):
        (row,) = (row for row in compare_rows([shown]).groups[0].rows if row)
        assert (row.decided, row.p_value, row.threshold, row.seeds_needed) == (False, *[None] * 3)
        assert row.difference == -30
    # A pair that agrees by rounding is judged by the spread of the other rows.
    third = np.array([[[20.0], [21.0], [19.0]]])
    row = compare_rows([np.concatenate([values, third])]).groups[0].rows[1]
    assert 0 < row.p_value < 0.05


def test_missing_runs():
    rng = np.random.default_rng(0)
    values = simulate(rng, np.zeros((3, 4)), 3)
    values[:, :, 0] -= 1000  # a difficult column, which the first row lacks
    values[0, :, 0] = np.nan
    values[1] += 10
    values[2, 1:, 1:] = np.nan
    (result,) = compare_rows([values]).groups
    assert result.best == 1  # though the first row has by far the highest mean
    assert (result.rows[0].seeds, result.rows[0].columns) == (3, 3)
    # Three seeds of one column, and not four columns of one seed.
    assert (result.rows[2].seeds, result.rows[2].columns) == (3, 1)
    empty = np.full((2, 3, 4), np.nan)
    assert compare_rows([empty]).groups[0].best is None
    assert best_row(values[:1]) is None
    # Rows that share no column.
    empty[0, :, 0], empty[1, :, 1] = 1, 2
    assert set(compare_rows([empty]).groups[0].rows) == {None}
    assert compare_rows([]).groups == ()


@given(
    values=hnp.arrays(np.float64, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5),
                      elements=st.sampled_from([0.0, 0.25, 0.5, 1.0, np.nan]))
)  # fmt: skip
def test_the_best_row_is_that_of_the_additive_fit_of_rows_and_pairs(values):
    runs = values.reshape(len(values), -1)
    known = np.isfinite(runs)
    sets = []  # of rows that a chain of common runs links
    for row in range(len(runs)):
        joined = [each for each in sets if known[row] @ known[list(each)].any(axis=0)]
        sets = [each for each in sets if each not in joined] + [{row}.union(*joined)]
    largest = max(len(each) for each in sets)
    found = best_row(values)
    if largest < 2:
        assert found is None
        return
    (rivals,) = [sorted(each) for each in sets if found in each]
    assert len(rivals) == largest
    rows, pairs = np.nonzero(known[rivals])
    design = np.hstack([np.eye(len(rivals))[rows], np.eye(runs.shape[1])[pairs]])
    effects = np.linalg.lstsq(design, runs[rivals][rows, pairs])[0][: len(rivals)]
    assert effects[rivals.index(found)] >= effects.max() - 1e-9


def test_a_row_without_what_is_difficult_is_not_the_best_for_it():
    values = np.array([[[90.0, 50.0]], [[89.0, 51.5]], [[89.5, np.nan]]])
    assert best_row(values) == best_row(values.swapaxes(1, 2)) == 1  # a column, a seed
    values[2, 0, 0] = 93.0
    assert best_row(values) == best_row(values.swapaxes(1, 2)) == 2


def test_a_row_that_is_ahead_in_what_both_have_is_not_called_worse(monkeypatch):
    """A row with missing runs may still not be the best."""
    monkeypatch.setattr("trishul_ray.report.statistics.best_row", lambda _: 1)
    values = simulate(np.random.default_rng(0), np.array([[1.0] * 8, [0.0] * 8]), 4, noise=0.01)
    (result,) = compare_rows([values]).groups
    assert result.rows[0].difference == pytest.approx(1, abs=0.01)
    assert not result.rows[0].decided


def test_the_largest_complete_part_is_compared():
    known = np.ones((3, 4), dtype=bool)

    def block():
        return [indices.tolist() for indices in complete_block(known)]

    assert block() == [[0, 1, 2], [0, 1, 2, 3]]
    known[1, 1:] = False
    assert block() == [[0, 2], [0, 1, 2, 3]]
    known[2, 2:] = False
    # Four numbers either way: with several seeds.
    assert block() == [[0, 2], [0, 1]]
    known[2, 1:] = False
    assert block() == [[0, 1, 2], [0]]  # and not the four columns of one seed
    known[:] = False
    assert block() == [[], []]


def test_the_seeds_needed_decide_four_tables_in_five():
    rng, truth = np.random.default_rng(9), np.array([[0.6], [0.0], [0.0], [0.0]])

    def share(seeds):
        tables = (compare_rows([simulate(rng, truth, seeds, noise=0.3)]) for _ in range(200))
        rows = (table.groups[0].rows[1] for table in tables)
        return sum(row is not None and row.decided for row in rows) / 200

    enough = next(seeds for seeds in range(3, 30) if share(seeds) >= POWER)
    assert 5 <= enough <= 9
    # Three seeds, if their difference is the true one: both ends of an interval around it.
    found = []
    for _ in range(200):
        values = simulate(rng, truth, 3, noise=0.3)
        values += truth[:, None] - values.mean(axis=1, keepdims=True)
        row = compare_rows([values]).groups[0].rows[1]
        assert (row.seeds_needed is None) == row.decided
        if row.seeds_needed:
            found.append(row.seeds_needed)
    assert len(found) > 50
    assert np.mean([few - 1 <= enough <= many + 1 for few, many in found]) >= 0.95
    assert all(3 < few <= many for few, many in found)


def test_more_seeds_are_needed_than_we_look_for():
    values = 80 + np.array([[[0.0], [5.0], [-5.0]], [[0.0], [-5.0], [5.01]]])
    row = next(row for row in compare_rows([values]).groups[0].rows if row)
    assert row.seeds_needed[1] == MAX_SEEDS + 1


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
    # The same rows: far more certain than two shares of so many rows, each with its own error.
    copied = np.where(rng.random(400) < 0.05, 1 - first, first)
    assert np.diff(compare_scores(first, copied).interval) < 0.4 * np.diff(found.interval)
    assert compare_scores(first, first).p_value == 1
    scores = rng.random((2, 50))
    expected = stats.ttest_rel(*scores)
    found = compare_scores(*scores)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))
    assert compare_scores(scores[0], scores[0]).p_value == 1


def test_estimates():
    assert estimate([]) is None
    assert estimate([np.nan]) is None
    one = estimate([80.0])
    assert (one.mean, one.deviation, one.count, one.interval()) == (80.0, None, 1, None)
    equal = estimate([233.9012] * 3)
    assert (equal.mean, equal.deviation) == (233.9012, 0.0)
    two = estimate([80.0, np.nan, 82.0])
    assert (two.mean, two.count) == (81.0, 2)
    assert two.interval() == pytest.approx((81 - 12.706, 81 + 12.706), abs=1e-3)


def test_few_rows_that_differ_have_an_interval_that_covers_as_it_says():
    five = np.zeros((2, 100))
    five[0, :5] = 1
    low, high = compare_scores(*five).interval
    # Bonett and Price 2012, equation 3, by hand.
    p, q = 6 / 102, 1 / 102
    half = stats.norm.ppf(0.975) * np.sqrt((p + q - (p - q) ** 2) / 102)
    assert (low, high) == pytest.approx((p - q - half, p - q + half))
    assert low < 0 < high and compare_scores(*five).p_value > 0.05
    assert compare_scores(five[1], five[1]).interval[1] > 0.01
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        rows = rng.choice(3, size=500, p=[0.994, 0.006, 0.0])
        low, high = compare_scores(rows == 1, rows == 2).interval
        covered += low <= 0.006 <= high
    assert covered >= 0.93 * 400
