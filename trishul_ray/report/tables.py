"""Tables that the cells of sweeps form: means over seeds, the best in bold, and what is decided.

:mod:`trishul_ray.report.formats` writes them.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trishul_ray.methods.base import method_class, method_names
from trishul_ray.report.outcomes import SEED, CellOutcome, SweepOutcome, TableLayout, has_order
from trishul_ray.report.references import of_table
from trishul_ray.report.statistics import ALPHA, Comparison
from trishul_ray.report.table_cells import (
    TableCell,
    average_columns,
    average_runs,
    decimals_of,
    with_paper,
)
from trishul_ray.report.verdicts import RowGroup, TableRow, judge, mark_best

#: The column of the mean over all others; also the paper's label of it.
AVERAGE = "average"
#: Symbols of fields in the head of a column.
SYMBOLS = {"alpha": "α", "lam": "λ"}


@dataclass(frozen=True)
class SweepTable:
    """A table: its sweep, how its cells form it, and its groups of rows.

    Attributes:
        columns: Displayed labels of each column, one for each of the layout's column axes; the
            average over columns is ``("average", "", ...)``.
        metrics: Metrics that are shown, in order.
        cells: The runs that it shows.
        judged: Whether rows are compared. They are not if columns have different units, or are
            several measures of the same runs, whose average would be a measure of nothing; nor in
            the profile smoke, whose numbers say nothing about methods.
        pairs: Number of pairs of rows that its verdicts are about.
    """

    sweep: SweepOutcome
    layout: TableLayout
    columns: tuple[tuple[str, ...], ...]
    groups: tuple[RowGroup, ...]
    metrics: tuple[str, ...]
    cells: tuple[CellOutcome, ...]
    judged: bool = True
    pairs: int = 0

    @property
    def profile(self) -> str:
        """The profile of the sweep."""
        return self.sweep.profile

    @cached_property
    def departures(self) -> tuple[str, ...]:
        """Departures of its runs from the profile: overridden fields, parts of datasets."""
        return self.sweep.departures(self.cells)

    @property
    def comparable(self) -> bool:
        """Whether its numbers may be compared with the paper's."""
        return self.sweep.is_comparable(self.cells)

    @property
    def reservation(self) -> str:
        """Caveats of the table; empty if its numbers may be compared with the paper's."""
        if self.comparable:
            return ""
        return "; ".join(("not comparable with the paper's numbers", *self.departures))

    @property
    def note(self) -> str:
        """The reservation beside a table on a page, which names departures once for a sweep.

        In the profile paper, where other tables may be compared, they are named here as well.
        """
        return self.reservation if self.profile == "paper" else self.reservation.partition(";")[0]

    @property
    def paper_table(self) -> str:
        """Number and label of the table of the paper that it reproduces; empty if none."""
        number = of_table(self.layout.paper).tables().get(self.layout.paper or "")
        return f"Table {number} of the paper ({self.layout.paper})" if number else ""

    @property
    def slips(self) -> tuple[str, ...]:
        """Contradictions of the paper in the table that it reproduces."""
        return tuple(of_table(self.layout.paper).slips(self.layout.paper or ""))

    @property
    def omitted(self) -> str:
        """Sources of variance that deviations and intervals leave out; empty if there are none."""
        if self.seeds < 2:
            return ""
        errors = [
            (cell.estimate.mean, run.result.data.test.used)
            for row in self.rows
            for cell in row.cells
            for run in cell.runs
            if cell.estimate is not None and run.metric == "accuracy" and run.summary
        ]
        text = "Deviations and intervals are over seeds, which all score the same test rows"
        if not errors:
            return f"{text}: the error of these is not in them."
        half = max(1.96 * math.sqrt(max(0.0, p * (100 - p)) / rows) for p, rows in errors)
        return (
            f"{text}: with other rows, a mean could differ by up to {half:.1f} points more (95 %)."
        )

    @property
    def slug(self) -> str:
        """Profile, sweep and table in characters that file names and ids may have."""
        names = dict.fromkeys((self.profile, self.sweep.name, self.layout.name))
        return make_slug(*names)

    @property
    def row_axis(self) -> str:
        """The axis whose labels name a row within its group."""
        return self.layout.rows[-1] if self.layout.rows else ""

    @property
    def rows(self) -> Iterator[TableRow]:
        """All rows."""
        return (row for group in self.groups for row in group.rows)

    @property
    def seeds(self) -> int:
        """Number of seeds of each number."""
        return max((len(cell.seeds) for row in self.rows for cell in row.cells), default=0)

    @property
    def amounts(self) -> bool:
        """Whether no number is a percentage: all are better if lower."""
        return all(cell.unit != "%" for cell in self.cells)

    @property
    def unit(self) -> str:
        """The quantity that is shown, such as ``accuracy, %``."""
        if self.layout.column is not None:
            return self.layout.column.label(self.sweep)
        names = " and ".join(metric.replace("_", " ") for metric in self.metrics)
        return names if self.amounts else f"{names}, %"

    @property
    def assumed(self) -> str:
        """Caveats of its column and of its methods, in sentences; perhaps empty."""
        column, known = self.layout.column, set(method_names())
        numbers = "" if column is None else "; ".join(column.caveats(self.cells))
        names = dict.fromkeys(
            cell.result.config["method"]["name"] for cell in self.cells if cell.status == "finished"
        )
        caveats = [method_class(name).caveat for name in names if name in known]
        return " ".join(sentence(text) for text in (numbers, *caveats) if text)

    @property
    def states(self) -> Counter[str]:
        """Number of runs by state; runs of several cells count once."""
        return Counter({cell.id: cell.status for cell in self.cells}.values())

    @property
    def _comparisons(self) -> list[Comparison]:
        return [row.verdict.comparison for row in self.rows if row.verdict.comparison is not None]

    @property
    def undecidable(self) -> bool:
        """Whether rows are compared, and none could be decided however large its difference."""
        return bool(self._comparisons) and all(c.threshold is None for c in self._comparisons)

    @property
    def power(self) -> str:
        """Differences that the table can decide, in a sentence; empty if it compares no rows."""
        if not self._comparisons:
            return ""
        pairs = f"{self.pairs} pairs of rows" if self.pairs > 1 else "one pair of rows"
        if self.undecidable:
            several = any(comparison.seeds > 1 for comparison in self._comparisons)
            why = "its seeds do not differ" if several else "one seed shows no spread"
            return (
                "This table cannot decide any row, at the level of "
                f"{100 * ALPHA:g} % for its {pairs}: {why}."
            )
        percent = not self.amounts
        least = min(c.threshold for c in self._comparisons if c.threshold is not None)
        cell = TableCell((), {}, percent, decimals=decimals_of(self.cells))
        return (
            f"The level of {100 * ALPHA:g} % is for the {pairs} of this table together; with the "
            f"spread of its seeds it cannot decide a difference below {cell.format(least)}"
            f"{' points' * percent}."
        )

    def header(self) -> list[list[tuple[str, int]]]:
        """Return the levels of the column header: labels, and how many columns each spans."""
        levels = []
        for level in range(max(1, len(self.layout.columns))):
            spans = Counter(column[: level + 1] for column in self.columns)
            levels.append([(labels[-1], span) for labels, span in spans.items()])
        return levels


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter and ends with a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def make_slug(*names: str) -> str:
    """Join names to one of lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-") or "x"


def labels_text(sweep: SweepOutcome, labels: Mapping[str, str]) -> str:
    """Return the displayed labels of a cell in one line."""
    return ", ".join(
        f"{SEED} {label}" if axis == SEED else sweep.shown_label(axis, label)
        for axis, label in labels.items()
    )


def build_tables(sweeps: Sequence[SweepOutcome]) -> tuple[SweepTable, ...]:
    """Make the tables of sweeps, and decide which of their rows are worse than the best."""
    return tuple(_build(sweep, layout) for sweep in sweeps for layout in sweep.tables)


def _build(sweep: SweepOutcome, layout: TableLayout) -> SweepTable:
    cells: Sequence[CellOutcome] = sweep.within(layout.where)
    if layout.column is not None:
        cells = layout.column.outcomes(cells)
    comparable, reference = sweep.is_comparable(cells), of_table(layout.paper)
    by_place: dict[tuple[tuple[str, ...], tuple[str, ...]], list[CellOutcome]] = {}
    for cell in cells:
        place = cell.labels_of(layout.rows), cell.labels_of(layout.columns)
        by_place.setdefault(place, []).append(cell)
    rows = sweep.in_order(layout.rows, [row for row, _ in by_place])
    columns = sweep.in_order(layout.columns, [column for _, column in by_place])

    def number(row: tuple[str, ...], column: tuple[str, ...]) -> TableCell:
        runs = by_place.get((row, column), [])
        labels = dict(zip(layout.rows + layout.columns, row + column, strict=True))
        labels |= {axis: only[0] for axis, only in layout.where.items() if len(only) == 1}
        return with_paper(average_runs(runs), comparable, reference, layout.paper, labels)

    def average(row: tuple[str, ...], found: Sequence[TableCell]) -> TableCell:
        labels = dict(zip(layout.rows, row, strict=True)) | dict.fromkeys(layout.columns, AVERAGE)
        return with_paper(average_columns(found), comparable, reference, layout.paper, labels)

    groups = []
    for head, members in itertools.groupby(rows, key=lambda row: row[:-1]):
        table_rows = []
        for row in members:
            found = [number(row, column) for column in columns]
            if layout.average:
                found.append(average(row, found))
            label = sweep.shown_label(layout.rows[-1], row[-1]) if row else layout.title
            table_rows.append(TableRow(label, tuple(found)))
        label = ", ".join(
            f"{axis}: {sweep.shown_label(axis, name)}"
            for axis, name in zip(layout.rows[:-1], head, strict=True)
        )
        marked = mark_best(table_rows) if sweep.decides else tuple(table_rows)
        groups.append(RowGroup(label, marked))
    metrics = tuple(dict.fromkeys(cell.metric for cell in cells))
    one_unit = len({cell.unit for cell in cells}) == 1
    one_measure = len({(c.id, c.metric) for c in cells}) == len({c.id for c in cells})
    judged = sweep.decides and one_unit and one_measure and all(map(has_order, metrics))
    shown, pairs = judge(groups, len(columns)) if judged else (tuple(groups), 0)
    heads = _heads(sweep, layout, columns)
    table = SweepTable(sweep, layout, heads, shown, metrics, tuple(cells), judged, pairs)
    if not layout.columns and heads:  # the only column is headed by what it shows
        table = replace(table, columns=((table.unit,), *heads[1:]))
    return table


def _heads(
    sweep: SweepOutcome, layout: TableLayout, columns: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """Return :attr:`SweepTable.columns`, given the labels of each."""
    heads = [
        tuple(_head(sweep, axis, label) for axis, label in zip(layout.columns, column, strict=True))
        or ("",)
        for column in columns
    ]
    average = (AVERAGE, *[""] * (len(layout.columns) - 1))
    return (*heads, *[average] * layout.average)


def _head(sweep: SweepOutcome, axis: str, label: str) -> str:
    """Return the head of a column: a label that is a number has its axis beside it."""
    head = sweep.shown_label(axis, label)
    is_number = head == label and re.fullmatch(r"[-+.e\d]*\d[-+.e\d]*", label) is not None
    return f"{SYMBOLS.get(axis.rpartition('.')[2], axis)} = {label}" if is_number else head
