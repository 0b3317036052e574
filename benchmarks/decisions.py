"""Verdicts of tables: wrong decisions on simulated pages, and their power.

    python benchmarks/decisions.py [options]

A page has the shapes of the paper's ten tables and of the one that compares equal bases: rows,
columns and groups. First no row truly differs, and every table that calls one worse is wrong; runs
vary by equal and by unequal spreads, with effects that the columns of a seed share, and by steps of
one test row. Then the numbers that the paper prints are the truth, and right decisions are counted.
"""

import argparse
import sys
from collections.abc import Callable

import numpy as np
from _results import Goal, Report, Section, told_by
from numpy.typing import NDArray
from scipy import stats

from trishul_ray.errors import InputError
from trishul_ray.paper.numbers import PAPER
from trishul_ray.report.statistics import ALPHA, compare_rows
from trishul_ray.sweeps.cells import Sweep
from trishul_ray.sweeps.loading import find_sweeps

Array = NDArray[np.float64]
#: The paper's numbers of a table: [rows, columns] for each group of rows.
Truth = list[Array]
#: Draws the deviations [rows, seeds, columns] of a group of rows from its truth.
Noise = Callable[[np.random.Generator, tuple[int, int, int]], Array]

#: Spread between seeds in points; what a seed gives a row in all columns.
SPREAD, SHARED = 0.3, 0.3


def equal(rng: np.random.Generator, size: tuple[int, int, int]) -> Array:
    """Return independent deviations."""
    return SPREAD * rng.normal(size=size)


def shared(rng: np.random.Generator, size: tuple[int, int, int]) -> Array:
    """Return deviations that are mostly of a row and seed, in all columns."""
    return equal(rng, size) + SHARED * rng.normal(size=(*size[:2], 1))


def of_spreads(scale: Callable[[int], Array]) -> Noise:
    """Return shared deviations times a spread of each row."""

    def draw(rng: np.random.Generator, size: tuple[int, int, int]) -> Array:
        spreads: Array = rng.permutation(scale(size[0]))
        return shared(rng, size) * spreads[:, None, None]

    return draw


def noisy(count: int) -> Callable[[int], Array]:
    """Return spreads of rows of which at most ``count`` vary ten times as much as the others."""
    return lambda rows: np.where(np.arange(rows) < min(count, rows - 1), 10.0, 1.0)


def pairs_alike(rng: np.random.Generator, size: tuple[int, int, int]) -> Array:
    """Return deviations that half of the rows have in common, as methods with the same bases."""
    deviations = shared(rng, size)
    half = size[0] // 2
    return np.concatenate([deviations[:1] + 0.1 * deviations[:half], deviations[half:]])


def heavy(rng: np.random.Generator, size: tuple[int, int, int]) -> Array:
    """Return deviations with heavy tails: Student's of two degrees of freedom."""
    return SPREAD * rng.standard_t(2, size=size)


def coarse(rows: int) -> Noise:
    """Return accuracies that are rounded to a number of test rows."""

    def draw(rng: np.random.Generator, size: tuple[int, int, int]) -> Array:
        return np.round(shared(rng, size) * rows / 100 + 0.37) * 100 / rows

    return draw


CASES: dict[str, Noise] = {
    "equal spreads": equal,
    "equal, seeds shared by columns": shared,
    "one row 10 times as noisy": of_spreads(noisy(1)),
    "two rows 10 times as noisy": of_spreads(noisy(2)),
    "each row half as noisy as the last": of_spreads(lambda rows: np.ldexp(1.0, -np.arange(rows))),
    "spreads drawn anew (lognormal)": lambda rng, size: (
        shared(rng, size) * np.exp(rng.normal(size=(size[0], 1, 1)))
    ),
    "half of the rows share their seeds": pairs_alike,
    "heavy tails (t, 2)": heavy,
    "steps of 500 test rows": coarse(500),
    "steps of 50 test rows": coarse(50),
}


def main() -> None:
    """Simulate, write the page."""
    parser = told_by(__doc__)
    add = parser.add_argument
    add("--pages", type=int, default=250, help="pages without differences, for each case")
    add("--paper-pages", type=int, default=50, help="pages with the paper's numbers as truth")
    add("--seeds", type=int, nargs="+", default=[3, 5, 10], help="seeds of a table")
    options = parser.parse_args()
    report = Report("decisions", options)
    try:
        truths = {name: truth for sweep in paper_sweeps() for name, truth in truths_of(sweep)}
    except InputError as error:
        sys.exit(f"error: {error}")
    report.add(wrong_decisions(options, truths))
    report.add(power(options, truths))


def paper_sweeps() -> tuple[Sweep, ...]:
    """Return the sweeps of the paper's protocol."""
    return find_sweeps(["all"], "paper")


def truths_of(sweep: Sweep) -> list[tuple[str, Truth]]:
    """Return the paper's numbers of each table of a sweep, without full fine-tuning.

    RAVAN's in the table of equal bases, which the paper lacks, are those of its other tables.
    """
    found = []
    for layout in sweep.tables:
        groups: dict[tuple[str, ...], dict[str, list[float]]] = {}
        for cell in sweep.cells:
            labels = dict(cell.labels)
            shown = all(labels[axis] in only for axis, only in layout.where.items())
            if not shown or labels["seed"] != "0" or labels.get("method") == "Full-FT":
                continue
            value = PAPER.table_value(layout.paper or "tab:ablation_init", labels)
            if value is None:
                ravan = {"method": "RAVAN", "clients": "20", "budget": "lower"}
                labels |= ravan | {"partition": "dirichlet(0.3)"}
                found_in = ("tab:vision", "tab:language")
                value = next(filter(None, (PAPER.table_value(k, labels) for k in found_in)), None)
            *head, row = (cell.labels[axis] for axis in layout.rows)
            groups.setdefault(tuple(head), {}).setdefault(row, []).append(value or np.nan)
        found.append((layout.name, [np.array(list(rows.values())) for rows in groups.values()]))
    return found


def wrong_decisions(options: argparse.Namespace, truths: dict[str, Truth]) -> Section:
    """Count tables that call a row worse where no row is."""
    section = Section(
        "Wrong decisions where no row differs: share of tables with any, in percent",
        ["runs", "seeds", "all tables", "the worst table", ""],
        [],
        ["The worst of eleven shares is an extreme: its own chance is in the last column."],
    )
    for case, noise in CASES.items():
        for seeds in options.seeds:
            rng = np.random.default_rng(0)
            wrong = {
                name: sum(
                    _decided([noise(rng, (len(t), seeds, t.shape[1])) for t in truth]) > 0
                    for _ in range(options.pages)
                )
                for name, truth in truths.items()
            }
            worst = max(wrong, key=lambda name: wrong[name])
            share = 100 * sum(wrong.values()) / (len(wrong) * options.pages)
            # The chance that the worst of so many tables is as bad if all are wrong in 5 %.
            tail = float(stats.binom.sf(wrong[worst] - 1, options.pages, ALPHA))
            cells = [f"{share:.1f}", f"{100 * wrong[worst] / options.pages:.1f} ({worst})"]
            extreme = f"p = {1 - (1 - tail) ** len(wrong):.2g}"
            section.rows.append([case, str(seeds), *cells, extreme])
            section.data[f"{case}, {seeds} seeds"] = wrong
            section.goals.append(Goal(f"{case}, {seeds} seeds: share of tables", share, 5.0))
    return section


def power(options: argparse.Namespace, truths: dict[str, Truth]) -> Section:
    """Count the comparisons that are decided if the paper's numbers are the truth."""
    total = sum(len(group) - 1 for truth in truths.values() for group in truth)
    section = Section(
        f"The paper's numbers as truth: comparisons decided, of {total}",
        ["spread of a run", "shared by columns", "seeds", "decided", "by table"],
        [],
        [
            "A comparison is a row against the best of its group; full fine-tuning is none. RAVAN "
            "has its numbers of the other tables in the table of equal bases."
        ],
    )
    for spread, common in ((0.3, 0.0), (0.5, 0.0), (0.3, 0.3)):
        for seeds in options.seeds:
            rng = np.random.default_rng(1)
            decided = dict.fromkeys(truths, 0)
            for name, truth in truths.items():
                for _ in range(options.paper_pages):
                    groups = [
                        t[:, None, :]
                        + spread * rng.normal(size=(len(t), seeds, t.shape[1]))
                        + common * rng.normal(size=(len(t), seeds, 1))
                        for t in truth
                    ]
                    decided[name] += _decided(groups)
            means = {name: count / options.paper_pages for name, count in decided.items()}
            by_table = ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())
            row = [f"{spread}", f"{common}", str(seeds), f"{sum(means.values()):.1f}", by_table]
            section.rows.append(row)
            section.data[f"{spread}, {common}, {seeds} seeds"] = means
    return section


def _decided(groups: list[Array]) -> int:
    rows = (row for group in compare_rows(groups).groups for row in group.rows)
    return sum(row.decided for row in rows if row is not None)


if __name__ == "__main__":
    main()
