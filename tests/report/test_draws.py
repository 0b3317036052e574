"""Variance between draws, on simulated tables of known truth and against brute force."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from invented_outcomes import invent_sweep

from trishul_ray.report.draws import (
    draw_evidence,
    draws_needed,
    flip_probability,
    variance_shares,
)
from trishul_ray.report.tables import build_tables


def simulate(rng, rows, draws, seeds, parts, means=0.0):
    """Draw values [rows, draws, seeds]; parts are deviations of draw, seed, and each × row."""
    shapes = (1, draws, 1), (1, draws, seeds), (rows, draws, 1), (rows, draws, seeds)
    spread = sum(p * rng.normal(size=shape) for p, shape in zip(parts, shapes, strict=True))
    return np.reshape(means, (-1, 1, 1)) + spread


def frame(y):
    rows, draws, seeds = y.shape
    columns = pd.MultiIndex.from_product([map(str, range(draws)), map(str, range(seeds))])
    return pd.DataFrame(y.reshape(rows, -1), index=[f"r{n}" for n in range(rows)], columns=columns)


@pytest.mark.parametrize(
    "parts", [(1.0, 0.7, 0.5, 0.2), (0.0, 1.0, 1.0, 1.0), (1.0, 0.0, 0.0, 0.0)]
)
@pytest.mark.parametrize("seeds", [1, 3])
def test_shares_of_simulated_tables_are_the_true_shares(parts, seeds):
    rng, tables = np.random.default_rng(11), 500
    found = np.array([variance_shares(simulate(rng, 5, 40, seeds, parts)) for _ in range(tables)])
    variances = np.square(parts)
    true = variances / variances.sum()
    if seeds == 1:
        assert np.isnan(found[:, [1, 3]]).all()
        true = np.array([true[0] + true[1], true[2] + true[3]])
        found = found[:, [0, 2]]
    # Negative estimates become 0, and a share is a ratio: both are biased by less than a draw's
    # weight.
    error = found.std(axis=0) / math.sqrt(tables)
    assert (np.abs(found.mean(axis=0) - true) <= 4 * error + 1 / 40).all()


def test_equal_values_have_no_shares():
    assert all(map(math.isnan, variance_shares(np.ones((3, 4, 2)))))


@pytest.mark.parametrize(("draws", "n"), [(5, 1), (5, 3), (7, 5), (6, 5)])
def test_flips_agree_with_brute_force(draws, n):
    means = np.random.default_rng(draws * n).normal(size=(4, draws))
    whole = np.argmax([sum(row) for row in means])
    every = [
        np.argmax([sum(row[d] for d in subset) for row in means])
        for subset in itertools.permutations(range(draws), n)
    ]
    assert flip_probability(means, n) == pytest.approx(np.mean(np.array(every) != whole))


def test_flips_of_many_draws_are_sampled():
    means = np.random.default_rng(3).normal(size=(3, 40))
    exact = np.mean(means.argmax(axis=0) != means.mean(axis=1).argmax())
    assert flip_probability(means, 1) == pytest.approx(exact)
    assert 0 < flip_probability(means, 20) < exact


@pytest.mark.parametrize(
    ("effect", "expected"), [(0.5, 34), (0.8, 15), (1.0, 10), (0.2, 199), (0.01, None)]
)
def test_needed_draws_are_published_sample_sizes(effect, expected):
    """Compare with sample sizes of paired t-tests (G*Power 3.1, two-sided, α = 0.05, power 0.8)."""
    differences = np.random.default_rng(1).normal(size=30)
    differences = (differences - differences.mean()) / differences.std(ddof=1) + effect
    assert draws_needed(differences) == expected


def test_incomplete_draws_are_left_out_and_counted():
    y = simulate(np.random.default_rng(2), 3, 5, 2, (1.0, 1.0, 1.0, 1.0))
    values = frame(y)
    values.iloc[1, 4] = math.nan
    found, whole = draw_evidence(values), draw_evidence(frame(np.delete(y, 2, axis=1)))
    assert (found.draws, found.left_out) == (4, 1)
    assert found.shares == whole.shares and found.flips == whole.flips
    assert "excluded incomplete draws: 1" in " ".join(found.sentences)


def test_one_draw_or_row_estimates_nothing():
    y = simulate(np.random.default_rng(2), 3, 5, 2, (1.0, 1.0, 1.0, 1.0))
    assert draw_evidence(frame(y[:1])) is None
    assert draw_evidence(frame(y[:, :1])) is None


def sweep_of(draws, seeds, **options):
    axes = {
        "method": ("FedIT", "RAVAN", "TRISHUL"),
        "dataset": ("cifar100", "svhn"),
        "draw": tuple(map(str, range(draws))),
        "seed": tuple(map(str, range(seeds))),
    }
    return invent_sweep("drawn", axes, ("method",), ("dataset",), profile="custom", **options)


def test_table_with_several_draws():
    (table,) = build_tables([sweep_of(4, 2)])
    assert table.spread == "mean ± standard deviation over draws"
    number = table.rows[0].numbers[0]
    assert list(number.values.index) == ["0", "1", "2", "3"]
    values = {(c.labels["draw"]): [] for c in table.cells}
    for cell in table.cells:
        if cell.labels["method"] == "FedIT" and cell.labels["dataset"] == "cifar100":
            values[cell.labels["draw"]].append(100 * cell.value)
    np.testing.assert_allclose(number.values, [np.mean(v) for v in values.values()])
    assert table.draws[0] == "4 draws, 2 seeds in each, 3 rows."
    assert any(line.startswith("Shares of the variance within rows: draw") for line in table.draws)


def test_table_with_one_draw():
    (table,) = build_tables([sweep_of(1, 3)])
    assert table.spread == "mean ± standard deviation over seeds"
    (line,) = table.draws
    assert "requires two rows and two complete draws" in line


def test_row_without_runs_keeps_other_rows():
    def status(labels):
        return ("missing" if labels["method"] == "RAVAN" else "finished"), ""

    (table,) = build_tables([sweep_of(3, 1, status=status)])
    assert table.draws[0] == "3 draws, one seed in each, 2 rows."
