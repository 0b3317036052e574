"""Numbers of a table: means over seeds and over columns, beside the paper's; the best in bold."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trishul_ray.report.outcomes import SEED, CellOutcome, has_order
from trishul_ray.report.references import Reference
from trishul_ray.report.statistics import Estimate, decimals_for, estimate, with_sign

#: Why runs have no number, the gravest first.
GAPS = ("failed", "corrupt", "stale", "missing", "stopped", "not measured")


@dataclass(frozen=True)
class TableCell:
    """One number of a table.

    Attributes:
        runs: Its runs, one for each seed; empty if the sweep leaves the combination out, and for
            the average over columns.
        seeds: Value of each seed, in percent unless an amount; None if it is not finished.
        percent: Whether it is a percentage, not an amount.
        difference: Mean minus the paper's number; None unless the two may be compared.
        best: Whether it is the best of its column within the group of rows.
        left_out: Columns that an average lacks, because the sweep leaves them out.
        decimals: How many it is shown with; None: as many as make four significant digits.
    """

    runs: tuple[CellOutcome, ...]
    seeds: Mapping[str, float | None]
    percent: bool
    paper: float | None = None
    difference: float | None = None
    best: bool = False
    left_out: frozenset[int] = frozenset()
    decimals: int | None = 2

    @cached_property
    def estimate(self) -> Estimate | None:
        """Mean and spread over the finished seeds."""
        return estimate([value for value in self.seeds.values() if value is not None])

    @property
    def within(self) -> str:
        """``within`` or ``outside``: where the paper's number lies to our 95 % interval."""
        interval = None if self.estimate is None else self.estimate.interval()
        if self.difference is None or self.paper is None or interval is None:
            return ""
        return "within" if interval[0] <= self.paper <= interval[1] else "outside"

    @property
    def planned(self) -> bool:
        """Whether the sweep has this combination."""
        return bool(self.seeds)

    @property
    def partial(self) -> bool:
        """Whether the mean lacks some seeds."""
        return self.estimate is not None and self.estimate.count < len(self.seeds)

    @property
    def lacks(self) -> str:
        """Seeds or columns that the mean lacks, as text; empty if none."""
        if self.estimate is None:
            return ""
        seeds = f"{self.estimate.count} of {len(self.seeds)} seeds" if self.partial else ""
        count = len(self.left_out)
        columns = f"{count} column{'s' * (count > 1)} left out" * (count > 0)
        return ", ".join(filter(None, (seeds, columns)))

    @property
    def gap(self) -> str:
        """Reason why a number is missing or lacks seeds: the gravest state of its runs."""
        gaps = {run.gap for run in self.runs if run.value is None}
        others = sorted(gaps - {*GAPS})  # those of a column
        return next((gap for gap in (*GAPS[:3], *others, *GAPS[3:]) if gap in gaps), "incomplete")

    def rounded(self, value: float) -> float:
        """Return a value as it is displayed."""
        return round(value, self._decimals_of(value))

    def format(self, value: float) -> str:
        """Return a value as text, without unit."""
        return f"{value:.{self._decimals_of(value)}f}".replace("-", "−")

    def format_difference(self, value: float) -> str:
        """Return a difference as text, with its sign and, unless it is 0, with its digits."""
        return with_sign(value, decimals_for([value], self._decimals_of(value)))

    def _decimals_of(self, value: float) -> int:
        if self.decimals is not None:
            return self.decimals
        return max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0


def average_runs(runs: Sequence[CellOutcome]) -> TableCell:
    """Average the runs of one place, seed by seed; a seed counts if all of its runs have values."""
    percent = all(run.unit == "%" for run in runs)
    by_seed: dict[str, list[float | None]] = {}
    for run in runs:
        by_seed.setdefault(run.labels.get(SEED, ""), []).append(run.value)
    seeds = {seed: _mean_of(values, 100.0 if percent else 1.0) for seed, values in by_seed.items()}
    return TableCell(tuple(runs), seeds, percent, decimals=decimals_of(runs))


def average_columns(cells: Sequence[TableCell]) -> TableCell:
    """Average columns, seed by seed; a seed counts if all columns have values."""
    planned = [cell for cell in cells if cell.planned]
    names = dict.fromkeys(seed for cell in planned for seed in cell.seeds)
    seeds = {seed: _mean_of([cell.seeds.get(seed) for cell in planned]) for seed in names}
    if len({run.unit for cell in planned for run in cell.runs}) > 1:
        seeds = {}  # a mean of different units says nothing
    percent = all(cell.percent for cell in planned)
    decimals = planned[0].decimals if planned else 2
    left_out = frozenset(place for place, cell in enumerate(cells) if not cell.planned)
    return TableCell((), seeds, percent, left_out=left_out, decimals=decimals)


def decimals_of(runs: Iterable[CellOutcome]) -> int | None:
    """Return :attr:`TableCell.decimals` of some runs: the most of any, None if one has none."""
    found = [run.decimals for run in runs]
    known = [decimals for decimals in found if decimals is not None]
    return max(known, default=2) if len(known) == len(found) else None


def _mean_of(values: Sequence[float | None], factor: float = 1.0) -> float | None:
    known = [value for value in values if value is not None]
    return factor * float(np.mean(known)) if known and len(known) == len(values) else None


def with_paper(
    cell: TableCell,
    comparable: bool,
    reference: Reference,
    key: str | None,
    labels: Mapping[str, str],
) -> TableCell:
    """Add the paper's number, and the difference from it where the two may be compared."""
    if key is None or not cell.planned or not cell.percent:  # the paper prints no loss
        return cell
    value = reference.table_value(key, labels)
    if value is None or cell.estimate is None or cell.left_out or not comparable:
        return replace(cell, paper=value)
    return replace(cell, paper=value, difference=cell.estimate.mean - value)


def mark_best_of(cells: Sequence[TableCell], skip: Sequence[bool]) -> list[TableCell]:
    """Mark the best number of a column, as displayed; where all are equal, none is.

    Means are compared that have the most columns and seeds, if these are the same ones; the cells
    to ``skip`` are not.
    """
    known = [
        cell
        for cell, out in zip(cells, skip, strict=True)
        if cell.estimate and not out and all(has_order(run.metric) for run in cell.runs)
    ]
    most = max(map(_size, known), default=(0, 0))
    known = [cell for cell in known if _size(cell) == most]
    values = {
        id(cell): cell.rounded(cell.estimate.mean) * (1 if cell.percent else -1)
        for cell in known
        if cell.estimate is not None and len(set(map(_content, known))) == 1
    }
    best, least = max(values.values(), default=0.0), min(values.values(), default=0.0)
    return [replace(cell, best=values.get(id(cell)) == best > least) for cell in cells]


def _size(cell: TableCell) -> tuple[int, int]:
    """Return how much a mean lacks and has: columns left out, as a negative number, and seeds."""
    return -len(cell.left_out), cell.estimate.count if cell.estimate is not None else 0


def _content(cell: TableCell) -> tuple[frozenset[int], frozenset[str]]:
    """Return what a mean is over: the columns that it lacks, and the seeds that it has."""
    return cell.left_out, frozenset(s for s, value in cell.seeds.items() if value is not None)
