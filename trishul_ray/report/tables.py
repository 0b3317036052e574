"""Tables that the cells of sweeps form: means over seeds, the best in bold, and what is decided.

:mod:`trishul_ray.report.formats` writes them.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from trishul_ray.methods.base import method_class, method_names
from trishul_ray.report.outcomes import (
    SEED,
    CellOutcome,
    SweepOutcome,
    TableLayout,
    has_order,
)
from trishul_ray.report.references import Reference, of_table
from trishul_ray.report.statistics import (
    ALPHA,
    MAX_SEEDS,
    Array,
    Comparison,
    Estimate,
    compare_rows,
    decimals_for,
    estimate,
    with_sign,
)

#: The column of the mean over all others; also the paper's label of it.
AVERAGE = "average"
#: Symbols of fields in the head of a column.
SYMBOLS = {"alpha": "α", "lam": "λ"}
#: Full fine-tuning is a reference: neither compared nor in bold, as in the paper.
_REFERENCE_METHOD = "fullft"
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


@dataclass(frozen=True)
class Verdict:
    """Standing of a row against the best of its group.

    Attributes:
        kind: ``best`` has the best mean; ``tied`` shares it with others, as displayed; ``worse``
            is decided to be worse than the best; ``undecided`` is not; ``reference`` is not
            compared; ``apart`` has numbers, but no seed and column in common with the best;
            ``biased`` lacks values that are not missing at random, such as those of failed runs;
            ``none`` has nothing to compare.
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
        text = (
            TableCell((), {}, percent, decimals=_decimals(self.cells)).format(least)
            + " points" * percent
        )
        return (
            f"The level of {100 * ALPHA:g} % is for the {pairs} of this table together; with the "
            f"spread of its seeds it cannot decide a difference below {text}."
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
    return tuple(_judge(_build(sweep, layout)) for sweep in sweeps for layout in sweep.tables)


def _judge(table: SweepTable) -> SweepTable:
    """Add how each row stands against the best of its group."""
    compared = compare_rows(_oriented(table))
    # Larger is better in a comparison; a table shows differences of what it shows.
    sign = -1.0 if table.cells and table.amounts else 1.0
    groups = []
    for group, result in zip(table.groups, compared.groups, strict=True):
        best = None if result.best is None else group.rows[result.best]
        rivals = zip(group.rows, result.rows, strict=True)
        verdicts = [_verdict(row, best, comparison, sign) for row, comparison in rivals]
        if result.best is not None and any(verdict.kind == "tied" for verdict in verdicts):
            verdicts[result.best] = Verdict("tied", group.rows[result.best].label)
        pairs = zip(group.rows, verdicts, strict=True)
        rows = tuple(replace(row, verdict=verdict) for row, verdict in pairs)
        groups.append(replace(group, rows=rows))
    return replace(table, groups=tuple(groups), pairs=compared.pairs)


def _verdict(
    row: TableRow, best_row: TableRow | None, comparison: Comparison | None, sign: float
) -> Verdict:
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
    if not comparison.decided and whole:
        tied = row.cells[0].rounded(comparison.difference) == 0
        kind = "tied" if tied else "undecided"
    return Verdict(kind, best, replace(comparison, difference=sign * comparison.difference))


def _oriented(table: SweepTable) -> list[Array]:
    """Return the values [rows, seeds, columns] of each group to compare, larger is better.

    References have none, and neither has any row of a table that is not judged.
    """
    columns = len(table.columns) - table.layout.average
    seeds = list(dict.fromkeys(s for row in table.rows for cell in row.cells for s in cell.seeds))
    found = []
    for group in table.groups:
        values = np.full((len(group.rows), len(seeds), columns), np.nan)
        for r, row in enumerate(group.rows):
            compared = table.judged and not row.is_reference and not row.bias
            shown = row.cells[:columns] if compared else ()
            for c, cell in enumerate(shown):
                sign = 1.0 if cell.percent else -1.0
                for seed, value in cell.seeds.items():
                    if value is not None:
                        values[r, seeds.index(seed), c] = sign * value
        found.append(values)
    return found


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
        return _with_paper(_cell(runs), comparable, reference, layout.paper, labels)

    def average(row: tuple[str, ...], found: Sequence[TableCell]) -> TableCell:
        labels = dict(zip(layout.rows, row, strict=True)) | dict.fromkeys(layout.columns, AVERAGE)
        return _with_paper(_mean(found), comparable, reference, layout.paper, labels)

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
        marked = _mark_best(table_rows) if sweep.decides else tuple(table_rows)
        groups.append(RowGroup(label, marked))
    names = [
        tuple(_head(sweep, axis, label) for axis, label in zip(layout.columns, column, strict=True))
        or ("",)
        for column in columns
    ]
    if layout.average:
        names.append((AVERAGE, *[""] * (len(layout.columns) - 1)))
    metrics = tuple(dict.fromkeys(cell.metric for cell in cells))
    one_unit = len({cell.unit for cell in cells}) == 1
    one_measure = len({(c.id, c.metric) for c in cells}) == len({c.id for c in cells})
    judged = sweep.decides and one_unit and one_measure and all(map(has_order, metrics))
    table = SweepTable(sweep, layout, tuple(names), tuple(groups), metrics, tuple(cells), judged)
    if not layout.columns and names:  # the only column is headed by what it shows
        table = replace(table, columns=((table.unit,), *names[1:]))
    return table


def _head(sweep: SweepOutcome, axis: str, label: str) -> str:
    """Return the head of a column: a label that is a number has its axis beside it."""
    head = sweep.shown_label(axis, label)
    is_number = head == label and re.fullmatch(r"[-+.e\d]*\d[-+.e\d]*", label) is not None
    return f"{SYMBOLS.get(axis.rpartition('.')[2], axis)} = {label}" if is_number else head


def _cell(runs: Sequence[CellOutcome]) -> TableCell:
    """Average the runs of one place, seed by seed; a seed counts if all of its runs have values."""
    percent = all(run.unit == "%" for run in runs)
    by_seed: dict[str, list[float | None]] = {}
    for run in runs:
        by_seed.setdefault(run.labels.get(SEED, ""), []).append(run.value)
    seeds = {seed: _mean_of(values, 100.0 if percent else 1.0) for seed, values in by_seed.items()}
    return TableCell(tuple(runs), seeds, percent, decimals=_decimals(runs))


def _mean(cells: Sequence[TableCell]) -> TableCell:
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


def _decimals(runs: Iterable[CellOutcome]) -> int | None:
    found = [run.decimals for run in runs]
    known = [decimals for decimals in found if decimals is not None]
    return max(known, default=2) if len(known) == len(found) else None


def _mean_of(values: Sequence[float | None], factor: float = 1.0) -> float | None:
    known = [value for value in values if value is not None]
    return factor * float(np.mean(known)) if known and len(known) == len(values) else None


def _with_paper(
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


def _mark_best(rows: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """Mark the best of each column, as displayed; where all numbers are equal, none is.

    Means are compared that have the most columns and seeds, if these are the same ones.
    """
    columns = [
        _mark_column(column, [row.is_reference or bool(row.bias) for row in rows])
        for column in zip(*(row.cells for row in rows), strict=True)
    ]
    cells = zip(*columns, strict=True) if columns else [()] * len(rows)
    return tuple(replace(row, cells=own) for row, own in zip(rows, cells, strict=True))


def _mark_column(cells: Sequence[TableCell], skip: Sequence[bool]) -> list[TableCell]:
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
