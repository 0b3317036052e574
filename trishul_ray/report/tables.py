"""Build the tables of sweeps: means over repetitions, best numbers, and comparisons of rows.

:mod:`trishul_ray.report.formats` writes them.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from scipy import stats

from trishul_ray.methods.base import method_class, method_names
from trishul_ray.report.draws import draw_evidence
from trishul_ray.report.frame import OTHER_STACK, cells_frame, stack_differences, title_of
from trishul_ray.report.layouts import TableLayout
from trishul_ray.report.outcomes import (
    DRAW,
    REPETITIONS,
    SEED,
    CellOutcome,
    SweepOutcome,
    has_order,
)
from trishul_ray.report.references import reference_of
from trishul_ray.report.statistics import ALPHA, Comparison, compare_rows
from trishul_ray.runtime.lazy import pd

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: Label of the column with the mean over all columns, both here and in the paper.
AVERAGE = "average"
#: Full fine-tuning is a reference: as in the paper, it is neither compared nor in bold.
REFERENCE_METHOD = "fullft"
#: Reasons for values that are missing non-randomly, so that the row cannot be compared.
_BIAS = {"failed": "failed runs", "not reached": "target not reached"}
#: Verdicts of compared rows.
_JUDGED = ("best", "tied", "worse", "undecided")
#: Reasons for missing values, most important first.
_GAPS = (
    *_BIAS,
    "corrupt",
    "stale",
    OTHER_STACK,
    "evaluated differently",
    "missing",
    "not measured",
)


@dataclass(frozen=True)
class Number:
    """A number in a table: the mean over repetitions (seeds or draws).

    Attributes:
        values: Value of each repetition, NaN if missing. The name of the index is the axis.
        gap: Why values are missing, or an empty string.
        unit: ``%``, or a unit for which lower is better.
        paper: The paper's number, or None.
        compared: Whether the number may be compared with the paper's.
    """

    values: "Series"
    gap: str
    unit: str
    paper: float | None = None
    compared: bool = False

    @cached_property
    def count(self) -> int:
        return int(self.values.count())

    @cached_property
    def mean(self) -> float:
        """Mean over repetitions, or NaN without values."""
        return float(self.values.mean())

    @cached_property
    def deviation(self) -> float | None:
        """Standard deviation over repetitions, or None with fewer than two."""
        if self.count < 2:
            return None
        # Rounding in the mean would yield a deviation above 0 for equal values.
        return float(self.values.std()) if self.values.nunique() > 1 else 0.0

    @property
    def difference(self) -> float | None:
        """Mean minus the paper's number, or None if they may not be compared."""
        if self.paper is None or not self.compared or not self.count:
            return None
        return self.mean - self.paper

    @property
    def within(self) -> str:
        """``within`` or ``outside``: whether the paper's number is in Student's 95% interval.

        An empty string without an interval, or if the numbers may not be compared.
        """
        if self.difference is None or self.deviation is None:
            return ""
        half = stats.t.ppf(1 - ALPHA / 2, self.count - 1) * self.deviation / self.count**0.5
        return "within" if abs(self.difference) <= half else "outside"

    @property
    def axis(self) -> str:
        return str(self.values.index.name or SEED)

    @property
    def missing(self) -> str:
        """Text such as ``2 of 3 seeds`` if values are missing, or an empty string."""
        partial = 0 < self.count < len(self.values)
        return f"{self.count} of {len(self.values)} {self.axis}s" if partial else ""

    def format(self, value: float, sign: str = "") -> str:
        """Format a value without its unit; ``sign="+"`` also marks positive differences."""
        decimals = {"%": 2, "loss": 4, "fraction": 4}.get(self.unit)
        if decimals is None:  # four significant digits
            decimals = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
        text = f"{value:{sign}.{decimals}f}".replace("-", "−")
        return text.lstrip("+−") if not text.strip("+−0.") else text


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a row with the best row of its group.

    Attributes:
        kind: One of

            - ``best``: the row has the best mean.
            - ``tied``: the displayed mean equals the best mean.
            - ``worse``: the row is significantly worse.
            - ``undecided``: the difference is not significant.
            - ``reference``: the row is a reference and not compared.
            - ``biased``: not compared, because values are missing non-randomly.
            - ``none``: the row has no values in common with the best row.
        label: The verdict in one or two words.
        p_value: The adjusted p-value, or the reason for its absence, as text.
        difference: The difference from the best row, as text.
    """

    kind: str = "none"
    label: str = ""
    p_value: str = ""
    difference: str = ""

    @property
    def text(self) -> str:
        return f"{self.label}: {self.p_value}" if self.p_value else self.label


@dataclass
class Row:
    """A row of a table.

    Attributes:
        label: Label of the row within its group.
        numbers: Number in each column, or None if the sweep does not include it.
        verdict: The comparison with the best row.
        best: Columns in which the row has the best number of the group.
    """

    label: str
    numbers: list[Number | None]
    verdict: Verdict
    best: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class RowGroup:
    """Rows that are compared with each other: their labels differ only on the last row axis."""

    label: str
    rows: list[Row]


@dataclass(frozen=True)
class SweepTable:
    """A table of a sweep.

    Attributes:
        columns: Displayed labels of each column, one per column axis of the layout.
        cells: Cells of the table; ``runs`` has one row per cell.
        unit: Displayed quantity, such as ``accuracy, %``.
        pairs: Number of pairs of rows that p-values are corrected for, or None if rows are not
            compared.
        draws: Variance between draws for each group, in sentences.
    """

    sweep: SweepOutcome
    layout: TableLayout
    columns: tuple[tuple[str, ...], ...]
    groups: tuple[RowGroup, ...]
    cells: tuple[CellOutcome, ...]
    runs: "DataFrame"
    unit: str
    pairs: int | None
    draws: tuple[str, ...] = ()

    @property
    def judged(self) -> bool:
        return self.pairs is not None

    @property
    def note(self) -> str:
        """Why the numbers cannot be compared with the paper's, or an empty string."""
        comparable = self.sweep.is_comparable(self.cells)
        if comparable or self.layout.paper is None or self.sweep.profile == "custom":
            return ""
        deviations = self.sweep.deviations(self.cells)
        return "; ".join(("not comparable with the paper's numbers", *deviations))

    @property
    def caption(self) -> str:
        """One line with the title, unit, statistics, profile and note."""
        text = f"{self.layout.title}: {self.unit}, {self.spread}. Profile {self.sweep.profile}"
        return f"{text}; {self.note}." if self.note else f"{text}."

    @property
    def spread(self) -> str:
        """Displayed statistics, such as ``mean ± standard deviation over seeds``."""
        axis = self.sweep.repetitions((*self.layout.rows, *self.layout.columns))
        counts = [len(number.values) for row in self.rows for number in row.numbers if number]
        several = max(counts, default=0) > 1
        return f"mean ± standard deviation over {axis}s" if several else f"one {axis}"

    @property
    def paper_table(self) -> str:
        """Number and label of the reproduced table of the paper, or an empty string."""
        number = reference_of(self.layout.paper).tables().get(self.layout.paper or "")
        return f"Table {number} of the paper ({self.layout.paper})" if number else ""

    @property
    def errata(self) -> tuple[str, ...]:
        """Contradictions in the reproduced table of the paper."""
        return tuple(reference_of(self.layout.paper).errata(self.layout.paper or ""))

    @property
    def caveats(self) -> list[str]:
        """Caveats of the methods and of runs with other stacks, in sentences."""
        methods = dict.fromkeys(cell.method for cell in self.cells if cell.status == "finished")
        known = [method_class(name).caveat for name in methods if name in set(method_names())]
        found = [f"{text[:1].upper()}{text[1:]}." for text in known if text]
        if others := stack_differences(self.sweep, self.cells):
            differences = ", ".join(dict.fromkeys(others.values()))
            found.append(
                f"{len(others)} of {len(self.cells)} runs are left out: their stack differs from "
                f"most ({differences})."
            )
        return found

    @property
    def slug(self) -> str:
        """Profile, sweep and table in characters that are valid in file names and HTML ids."""
        return make_slug(*dict.fromkeys((self.sweep.profile, self.sweep.name, self.layout.name)))

    @property
    def row_axis(self) -> str:
        """The axis whose labels name the rows of a group."""
        return self.layout.rows[-1] if self.layout.rows else ""

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    def header(self) -> list[list[tuple[str, int]]]:
        """Build the levels of the column header, as (label, number of spanned columns)."""
        levels = []
        for level in range(max(1, len(self.layout.columns))):
            spans = itertools.groupby(column[: level + 1] for column in self.columns)
            levels.append([(labels[-1], len([*same])) for labels, same in spans])
        return levels


def make_slug(*names: str) -> str:
    """Join names into one name of lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-") or "x"


def build_tables(sweeps: Sequence[SweepOutcome]) -> tuple[SweepTable, ...]:
    return tuple(build_table(sweep, layout) for sweep in sweeps for layout in sweep.tables)


def build_table(sweep: SweepOutcome, layout: TableLayout) -> SweepTable:
    """Build a table, and compare its rows.

    Rows are not compared in the profile ``smoke``, whose numbers are meaningless, nor across
    columns with different units or several metrics of the same runs, which cannot be averaged.
    """
    cells = sweep.within(layout.where)
    runs, unit = cells_frame(sweep, cells, layout)
    axes = (*layout.rows, *layout.columns)
    printed = _printed(sweep, layout)
    runs["paper_percent"] = [printed(cell.labels_of(axes)) for cell in cells]
    compared = sweep.is_comparable(cells)

    def with_paper(number: Number, labels: tuple[str, ...]) -> Number:
        paper = printed(labels) if number.unit == "%" else None  # the paper has no losses
        return replace(number, paper=paper, compared=compared)

    means = _numbers(runs, axes, sweep.repetitions(axes))
    numbers = {place: with_paper(each, place) for place, each in means.items()}
    split = len(layout.rows)
    columns = sweep.in_order(layout.columns, [place[split:] for place in numbers])
    methods: dict[tuple[str, ...], set[str]] = {}
    for cell in cells:
        if cell.status == "finished":
            methods.setdefault(cell.labels_of(layout.rows), set()).add(cell.method)

    def row_of(labels: tuple[str, ...]) -> Row:
        found = [numbers.get(labels + column) for column in columns]
        verdict = _excluded(methods.get(labels, set()), found)
        if layout.average:
            mean = _average(found)
            place = (*labels, *[AVERAGE] * len(layout.columns))
            found.append(with_paper(mean, place) if mean else None)
        name = sweep.title_of(layout.rows[-1], labels[-1]) if labels else layout.title
        return Row(name, found, verdict)

    rows = sweep.in_order(layout.rows, [place[:split] for place in numbers])
    groups = tuple(
        RowGroup(
            ", ".join(f"{a}: {sweep.title_of(a, n)}" for a, n in zip(axes, head, strict=False)),
            [row_of(row) for row in members],
        )
        for head, members in itertools.groupby(rows, key=lambda row: row[:-1])
    )
    pairs, draws = None, list[str]()
    if sweep.profile != "smoke" and all(map(has_order, runs["metric"])):
        for group in groups:
            _mark_best(group.rows)
        measures = runs[["id", "metric"]].drop_duplicates()
        if len(measures) == runs["id"].nunique() and runs["unit"].nunique() == 1:
            found, pairs = compare_rows([_oriented(group, len(columns)) for group in groups])
            for group, (best, others) in zip(groups, found, strict=True):
                if best is not None:
                    _add_verdicts(group.rows, best, others)
            if DRAW in sweep.axes and DRAW not in axes and layout.rows:
                draws = _draw_sentences(
                    runs,
                    layout,
                    dict(zip(rows, [row for group in groups for row in group.rows], strict=True)),
                )
    heads = [
        tuple(title_of(sweep, *each) for each in zip(layout.columns, column, strict=True))
        or (unit,)
        for column in columns
    ]
    heads += [(AVERAGE, *[""] * (len(layout.columns) - 1))] * layout.average
    return SweepTable(sweep, layout, tuple(heads), groups, cells, runs, unit, pairs, tuple(draws))


def _printed(sweep: SweepOutcome, layout: TableLayout) -> Callable[[tuple[str, ...]], float | None]:
    """Return a function that looks up the paper's number for the labels of a row and a column."""
    key, axes = layout.paper, (*layout.rows, *layout.columns)
    if key is None or sweep.profile == "custom":
        return lambda labels: None
    fixed = {axis: only[0] for axis, only in layout.where.items() if len(only) == 1}
    table_value = reference_of(key).table_value
    return lambda labels: table_value(key, fixed | dict(zip(axes, labels, strict=True)))


def _numbers(
    runs: "DataFrame", axes: tuple[str, ...], repetitions: str
) -> dict[tuple[str, ...], Number]:
    """Compute the number for each combination of labels, averaging other axes per repetition.

    A repetition counts only if all of its runs have values.
    """
    levels = [*axes, *{repetitions}.intersection(runs.index.names).difference(axes)]
    repeated = runs["shown"].groupby(level=levels, observed=True)
    means = repeated.mean().where(repeated.count() == repeated.size())
    found = {}
    places = runs.groupby(level=list(axes), observed=True)
    for place, values in means.groupby(level=list(axes), observed=True):
        part = places.get_group(place)
        several = len(levels) > len(axes)
        by_label = values.droplevel(list(axes)) if several else values.set_axis([""])
        unit = part["unit"].iloc[0] if part["unit"].nunique() == 1 else ""
        found[tuple(map(str, place))] = Number(by_label, _first_gap(part["gap"]), unit)
    return found


def _first_gap(gaps: "Sequence[str] | Series") -> str:
    return next((gap for gap in _GAPS if gap in {*gaps}), "")


def _average(numbers: Sequence[Number | None]) -> Number | None:
    """Average all columns per repetition, or return None if one is missing or units differ."""
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or len({number.unit for number in known}) != 1:
        return None
    wide = pd.concat([number.values for number in known], axis=1)
    gap = _first_gap([number.gap for number in known])
    return Number(wide.mean(axis=1, skipna=False), gap, known[0].unit)


def _excluded(methods: set[str], numbers: Sequence[Number | None]) -> Verdict:
    """Return the verdict of a row that must not be compared; otherwise, the verdict ``none``."""
    if methods == {REFERENCE_METHOD}:
        return Verdict("reference", "reference")
    gaps = [_BIAS[number.gap] for number in numbers if number and number.gap in _BIAS]
    return Verdict("biased", f"not compared: {gaps[0]}") if gaps else Verdict()


def _oriented(group: RowGroup, columns: int) -> "DataFrame":
    """Return the values of comparable rows [rows, (column, repetition)]; larger is better."""
    values = {
        place: {
            (column, label): value if number.unit == "%" else -value
            for column, number in enumerate(row.numbers[:columns])
            if number is not None
            for label, value in number.values.items()
        }
        for place, row in enumerate(group.rows)
        if row.verdict.kind == "none"
    }
    return pd.DataFrame.from_dict(values, orient="index").sort_index(axis=1)


def _draw_sentences(
    runs: "DataFrame", layout: TableLayout, rows: dict[tuple[str, ...], Row]
) -> list[str]:
    """Describe the variance between draws for each group of rows, averaging columns."""
    repetitions = [axis for axis in REPETITIONS[::-1] if axis in runs.index.names]
    repeated = runs["shown"].groupby(level=[*layout.rows, *repetitions], observed=True)
    means = repeated.mean().where(repeated.count() == repeated.size())
    if runs["unit"].iloc[0] != "%":
        means = -means
    means.index = pd.MultiIndex.from_tuples(
        [(place[: len(layout.rows)], place[len(layout.rows)], place[-1]) for place in means.index],
        names=["row", DRAW, SEED],
    )
    wide = means.unstack([DRAW, SEED])
    sentences = []
    for _, members in itertools.groupby(rows, key=lambda row: row[:-1]):
        judged = [labels for labels in members if rows[labels].verdict.kind in _JUDGED]
        values = wide.loc[judged].dropna(how="all")
        values.index = [rows[labels].label for labels in values.index]
        evidence = draw_evidence(values)
        sentences += (
            ["Estimating the variance between draws requires two rows and two complete draws."]
            if evidence is None
            else evidence.sentences
        )
    return sentences


def _mark_best(rows: Sequence[Row]) -> None:
    """Mark the best displayed number of each column, unless all are equal.

    Skips numbers with missing repetitions and rows that are not compared.
    """
    for column in range(len(rows[0].numbers)):
        shown = {}
        for place, row in enumerate(rows):
            number = row.numbers[column]
            if number is not None and not number.gap and row.verdict.kind == "none":
                value = float(number.format(number.mean).replace("−", "-"))
                shown[place] = value if number.unit == "%" else -value
        for place, value in shown.items():
            if value == max(shown.values()) > min(shown.values()):
                rows[place].best.add(column)


def _add_verdicts(rows: Sequence[Row], best: int, compared: dict[int, Comparison]) -> None:
    unit = next(number for number in rows[best].numbers if number is not None)
    rows[best].verdict = Verdict("best", "best mean")
    for place, each in compared.items():
        difference = unit.format(each.difference, "+")
        if not each.decided and not difference.strip("0."):
            rows[place].verdict = rows[best].verdict = Verdict("tied", "tied for the best mean")
            continue
        kind, label = ("worse", "worse, decided") if each.decided else ("undecided", "undecided")
        against = f"{difference} against {rows[best].label}"
        rows[place].verdict = Verdict(kind, label, _p_text(each, unit.axis), against)


def _p_text(comparison: Comparison, axis: str) -> str:
    if comparison.p_value is None:
        return f"one {axis}" if comparison.repetitions == 1 else f"no spread between {axis}s"
    small = comparison.p_value < 1e-4
    return "p < 0.0001" if small else f"p = {comparison.p_value:.2g}"
