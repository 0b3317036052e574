"""Rows of a table against each other: the best of each column, and what is decided of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from trishul_ray.report.statistics import MAX_SEEDS, Array, Comparison, compare_rows
from trishul_ray.report.table_cells import TableCell, mark_best_of

#: Full fine-tuning is a reference: neither compared nor in bold, as in the paper.
_REFERENCE_METHOD = "fullft"


@dataclass(frozen=True)
class Verdict:
    """Standing of a row against the best of its group.

    Attributes:
        kind: ``best`` has the best mean; ``tied`` shares it with others, as displayed; ``worse``
            is decided to be worse than the best; ``undecided`` is not; ``reference`` is not
            compared; ``apart`` has numbers, but no seed and column in common with the best;
            ``biased`` lacks values that are not missing at random, such as those of failed runs and
            of those that early stopping ended; ``none`` has nothing to compare.
        best: Label of the best row; empty if there is none.
        bias: Why values are missing from a biased row.
        comparison: The numbers of ``worse``, ``undecided``, and all but one of ``tied``.
    """

    kind: Literal["best", "tied", "worse", "undecided", "reference", "apart", "biased", "none"]
    best: str = ""
    bias: str = field(default="", kw_only=True)
    comparison: Comparison | None = None

    @property
    def label(self) -> str:
        """The verdict in a word or two."""
        labels = {
            "best": "best mean",
            "tied": "tied for the best mean",
            "worse": "worse, decided",
            "apart": "no run to compare",
            "biased": f"not compared: {self.bias}",
            "none": "",
        }
        return labels.get(self.kind, self.kind)

    @property
    def p_value(self) -> str:
        """The adjusted p-value, or why there is none; empty for a row that is not judged."""
        if self.comparison is None or self.kind == "tied":
            return ""
        p_value = self.comparison.p_value
        if p_value is None:
            return "one seed" if self.comparison.seeds == 1 else "no spread between seeds"
        return "p < 0.0001" if p_value < 1e-4 else f"p = {p_value:.2g}"

    @property
    def detail(self) -> str:
        """Certainty of the verdict, and what would decide it."""
        needed = None if self.comparison is None else self.comparison.seeds_needed
        if self.kind != "undecided" or needed is None:
            return self.p_value
        few, many = needed
        if few > MAX_SEEDS:
            text = f"more than {MAX_SEEDS}"
        elif many > MAX_SEEDS:
            text = f"{few} to more than {MAX_SEEDS}"
        else:
            text = str(few) if few == many else f"{few} to {many}"
        return f"{self.p_value}, {text} seeds needed"

    @property
    def text(self) -> str:
        """Label and detail."""
        return f"{self.label}: {self.detail}" if self.detail else self.label


@dataclass(frozen=True)
class TableRow:
    """A row: its label within the group, a cell for each column, and how it stands."""

    label: str
    cells: tuple[TableCell, ...]
    verdict: Verdict = field(default=Verdict("none"))

    @property
    def is_reference(self) -> bool:
        """Whether the runs train the whole backbone."""
        runs = [run for cell in self.cells for run in cell.runs if run.status == "finished"]
        return {run.method for run in runs} == {_REFERENCE_METHOD}

    @property
    def bias(self) -> str:
        """Why its mean cannot be compared: values are not missing at random. Empty if it can."""
        runs = [run for cell in self.cells for run in cell.runs if run.value is None and run.bias]
        runs.sort(key=lambda run: run.status != "failed")  # the gravest first
        return runs[0].bias if runs else ""

    @property
    def measured(self) -> int:
        """Number of its values, seeds times columns."""
        cells = [cell for cell in self.cells if cell.runs]  # without their average
        return sum(value is not None for cell in cells for value in cell.seeds.values())


@dataclass(frozen=True)
class RowGroup:
    """Rows that are compared with each other: equal in all row axes but the last."""

    label: str
    rows: tuple[TableRow, ...]


def mark_best(rows: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """Mark the best of each column; see :func:`~trishul_ray.report.table_cells.mark_best_of`."""
    skip = [row.is_reference or bool(row.bias) for row in rows]
    columns = [mark_best_of(column, skip) for column in zip(*(r.cells for r in rows), strict=True)]
    cells = zip(*columns, strict=True) if columns else [()] * len(rows)
    return tuple(replace(row, cells=own) for row, own in zip(rows, cells, strict=True))


def judge(groups: Sequence[RowGroup], columns: int) -> tuple[tuple[RowGroup, ...], int]:
    """Add how each row stands against the best of its group, over the first ``columns``.

    Return the groups, and the number of pairs of rows that these verdicts are about.
    """
    compared = compare_rows(_oriented(groups, columns))
    judged = []
    for group, result in zip(groups, compared.groups, strict=True):
        best = None if result.best is None else group.rows[result.best]
        rivals = zip(group.rows, result.rows, strict=True)
        verdicts = [_verdict(row, best, comparison) for row, comparison in rivals]
        if result.best is not None and any(verdict.kind == "tied" for verdict in verdicts):
            verdicts[result.best] = Verdict("tied", group.rows[result.best].label)
        pairs = zip(group.rows, verdicts, strict=True)
        rows = tuple(replace(row, verdict=verdict) for row, verdict in pairs)
        judged.append(replace(group, rows=rows))
    return tuple(judged), compared.pairs


def _verdict(row: TableRow, best_row: TableRow | None, comparison: Comparison | None) -> Verdict:
    best = "" if best_row is None else best_row.label
    if row.is_reference:
        return Verdict("reference")
    if row.bias:
        return Verdict("biased", bias=row.bias)
    if row is best_row:
        return Verdict("best", best)
    if comparison is None or best_row is None:
        has_numbers = any(cell.estimate is not None for cell in row.cells)
        return Verdict("apart" if best and has_numbers else "none", best)
    kind: Literal["worse", "tied", "undecided"] = "worse" if comparison.decided else "undecided"
    # A difference over some of the runs alone is not that of the means that are displayed.
    whole = comparison.seeds * comparison.columns == row.measured == best_row.measured
    if not comparison.decided and whole and row.cells[0].rounded(comparison.difference) == 0:
        kind = "tied"
    # Larger is better in a comparison; a table shows differences of what it shows.
    sign = 1.0 if all(cell.percent for cell in row.cells) else -1.0
    return Verdict(kind, best, replace(comparison, difference=sign * comparison.difference))


def _oriented(groups: Sequence[RowGroup], columns: int) -> list[Array]:
    """Return the values [rows, seeds, columns] of each group to compare, larger is better.

    References have none, and neither have rows that lack values not at random.
    """
    rows = [row for group in groups for row in group.rows]
    seeds = list(dict.fromkeys(s for row in rows for cell in row.cells for s in cell.seeds))
    found = []
    for group in groups:
        values = np.full((len(group.rows), len(seeds), columns), np.nan)
        for r, row in enumerate(group.rows):
            shown = () if row.is_reference or row.bias else row.cells[:columns]
            for c, cell in enumerate(shown):
                sign = 1.0 if cell.percent else -1.0
                for seed, value in cell.seeds.items():
                    if value is not None:
                        values[r, seeds.index(seed), c] = sign * value
        found.append(values)
    return found
