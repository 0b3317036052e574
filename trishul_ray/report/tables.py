"""Tables of sweeps: means over seeds, the best in bold, and rows that are worse than the best.

:mod:`trishul_ray.report.formats` writes them.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from scipy import stats

from trishul_ray.methods.base import method_class, method_names
from trishul_ray.report.frame import shown_frame, shown_label
from trishul_ray.report.layouts import TableLayout
from trishul_ray.report.outcomes import SEED, CellOutcome, SweepOutcome, has_order
from trishul_ray.report.references import reference_of
from trishul_ray.report.statistics import ALPHA, Comparison, compare_rows
from trishul_ray.runtime.lazy import pd

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: The column of the mean over all others; also the paper's label of it.
AVERAGE = "average"
#: Full fine-tuning is a reference: neither compared nor in bold, as in the paper.
REFERENCE_METHOD = "fullft"
#: Why values are missing that are not missing at random, so that a row cannot be compared.
_BIAS = {"failed": "failed runs", "not reached": "target not reached"}
#: Reasons why runs have no number, the gravest first.
_GAPS = (*_BIAS, "corrupt", "stale", "asked otherwise", "missing", "not measured")


@dataclass(frozen=True)
class Number:
    """One number of a table: the mean of its values by seed, in percent unless an amount.

    Attributes:
        values: Value of each seed, NaN if it is missing.
        gap: Why values are missing; empty if none is.
        unit: ``%``, or an amount, which is better if lower.
        paper: The paper's number.
        compared: Whether the paper's number may be compared with it.
        best: Whether it is the best of its column within the group of rows.
    """

    values: "Series"
    gap: str
    unit: str
    paper: float | None = None
    compared: bool = False
    best: bool = False

    @property
    def count(self) -> int:
        """Number of seeds that have a value."""
        return int(self.values.count())

    @property
    def mean(self) -> float:
        """Mean over seeds; NaN without a value."""
        return float(self.values.mean())

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None for fewer than two."""
        if self.count < 2:
            return None
        # Else the rounding of the mean gives equal values a spread.
        return float(self.values.std()) if self.values.nunique() > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95% interval of the mean; None for fewer than two seeds."""
        if self.deviation is None:
            return None
        half = stats.t.ppf(1 - ALPHA / 2, self.count - 1) * self.deviation / self.count**0.5
        return self.mean - float(half), self.mean + float(half)

    @property
    def difference(self) -> float | None:
        """Mean minus the paper's number; None unless the two may be compared."""
        if self.paper is None or not self.compared or not self.count:
            return None
        return self.mean - self.paper

    @property
    def within(self) -> str:
        """``within`` or ``outside``: where the paper's number lies to our 95% interval."""
        if self.difference is None or self.paper is None or self.interval is None:
            return ""
        return "within" if self.interval[0] <= self.paper <= self.interval[1] else "outside"

    @property
    def lacks(self) -> str:
        """Number of seeds that the mean lacks, as text; empty if it lacks none or all."""
        lacks = 0 < self.count < len(self.values)
        return f"{self.count} of {len(self.values)} seeds" if lacks else ""

    def format(self, value: float) -> str:
        """Return a value as text, without unit."""
        return f"{value:.{self._decimals(value)}f}".replace("-", "−")

    def format_difference(self, value: float) -> str:
        """Return a difference as text, with its sign."""
        text = f"{value:+.{self._decimals(value)}f}".replace("-", "−")
        return text.lstrip("+−") if float(text[1:]) == 0 else text

    def _decimals(self, value: float) -> int:
        if self.unit in ("%", "loss", "fraction"):
            return 2 if self.unit == "%" else 4
        return max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0


@dataclass(frozen=True)
class Verdict:
    """How a row stands against the best of its group.

    Attributes:
        kind: ``best`` has the best mean; ``tied`` shares it with others, as displayed; ``worse`` is
            decided to be worse than the best; ``undecided`` is not; ``reference`` is not compared;
            ``biased`` lacks values that are not missing at random; ``none`` has no seed and column
            in common with the best.
        best: Label of the best row; or why a row is biased.
        comparison: The numbers of ``worse`` and ``undecided``; larger is better in them.
    """

    kind: Literal["best", "tied", "worse", "undecided", "reference", "biased", "none"]
    best: str = ""
    comparison: Comparison | None = None

    @property
    def label(self) -> str:
        """The verdict in a word or two."""
        return {
            "best": "best mean",
            "tied": "tied for the best mean",
            "worse": "worse, decided",
            "biased": f"not compared: {self.best}",
            "none": "",
        }.get(self.kind, self.kind)

    @property
    def p_value(self) -> str:
        """The adjusted p-value, or why there is none; empty for a row that is not judged."""
        if self.comparison is None:
            return ""
        if self.comparison.p_value is None:
            return "one seed" if self.comparison.seeds == 1 else "no spread between seeds"
        small = self.comparison.p_value < 1e-4
        return "p < 0.0001" if small else f"p = {self.comparison.p_value:.2g}"

    @property
    def text(self) -> str:
        """Label and p-value."""
        return f"{self.label}: {self.p_value}" if self.p_value else self.label


@dataclass(frozen=True)
class Row:
    """A row: its label within the group, a number for each column (None: not planned)."""

    label: str
    numbers: tuple[Number | None, ...]
    verdict: Verdict = Verdict("none")


@dataclass(frozen=True)
class RowGroup:
    """Rows that are compared with each other: equal in all row axes but the last."""

    label: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class SweepTable:
    """A table of a sweep.

    Attributes:
        columns: Displayed labels of each column, one for each of the layout's column axes.
        cells: The cells that it shows, and ``runs`` the frame of them.
        unit: The quantity that is shown, such as ``accuracy, %``.
        judged: Whether rows are compared. They are not if columns have different units, or are
            several measures of the same runs, whose average would be a measure of nothing; nor in
            the profile smoke, whose numbers say nothing about methods.
        pairs: Number of pairs of rows that p-values are corrected for.
    """

    sweep: SweepOutcome
    layout: TableLayout
    columns: tuple[tuple[str, ...], ...]
    groups: tuple[RowGroup, ...]
    cells: tuple[CellOutcome, ...]
    runs: "DataFrame"
    unit: str
    judged: bool
    pairs: int

    @property
    def comparable(self) -> bool:
        """Whether its numbers may be compared with the paper's."""
        return self.sweep.is_comparable(self.cells)

    @property
    def note(self) -> str:
        """Why its numbers cannot be compared with the paper's; empty if they can.

        A user's sweep and a table that the paper does not have need no note.
        """
        if self.comparable or self.layout.paper is None or self.sweep.profile == "custom":
            return ""
        return "; ".join(
            ("not comparable with the paper's numbers", *self.sweep.departures(self.cells))
        )

    @property
    def caption(self) -> str:
        """Title, unit, profile and note in one line."""
        text = f"{self.layout.title}: {self.unit}, {self.spread}. Profile {self.sweep.profile}"
        return f"{text}; {self.note}." if self.note else f"{text}."

    @property
    def spread(self) -> str:
        """The quantity behind ``±``."""
        seeds = [len(each.values) for row in self.rows for each in row.numbers if each is not None]
        return "mean ± standard deviation over seeds" if max(seeds, default=0) > 1 else "one seed"

    @property
    def paper_table(self) -> str:
        """Number and label of the table of the paper that it reproduces; empty if none."""
        number = reference_of(self.layout.paper).tables().get(self.layout.paper or "")
        return f"Table {number} of the paper ({self.layout.paper})" if number else ""

    @property
    def slips(self) -> tuple[str, ...]:
        """Contradictions of the paper in the table that it reproduces."""
        return tuple(reference_of(self.layout.paper).slips(self.layout.paper or ""))

    @property
    def caveats(self) -> list[str]:
        """Caveats of its methods, in sentences."""
        methods = dict.fromkeys(cell.method for cell in self.cells if cell.status == "finished")
        known = [method_class(name).caveat for name in methods if name in set(method_names())]
        return [f"{text[:1].upper()}{text[1:]}." for text in known if text]

    @property
    def slug(self) -> str:
        """Profile, sweep and table in characters that file names and ids may have."""
        return make_slug(*dict.fromkeys((self.sweep.profile, self.sweep.name, self.layout.name)))

    @property
    def row_axis(self) -> str:
        """The axis whose labels name a row within its group."""
        return self.layout.rows[-1] if self.layout.rows else ""

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return tuple(row for group in self.groups for row in group.rows)

    def header(self) -> list[list[tuple[str, int]]]:
        """Return the levels of the column header: labels, and how many columns each spans."""
        levels = []
        for level in range(max(1, len(self.layout.columns))):
            spans = itertools.groupby(column[: level + 1] for column in self.columns)
            levels.append([(labels[-1], len([*same])) for labels, same in spans])
        return levels


def make_slug(*names: str) -> str:
    """Join names to one of lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-") or "x"


def build_tables(sweeps: Sequence[SweepOutcome]) -> tuple[SweepTable, ...]:
    """Make the tables of sweeps, and decide which of their rows are worse than the best."""
    return tuple(build_table(sweep, layout) for sweep in sweeps for layout in sweep.tables)


def build_table(sweep: SweepOutcome, layout: TableLayout) -> SweepTable:
    """Make a table; see :class:`SweepTable`."""
    cells = sweep.within(layout.where)
    runs, label = shown_frame(sweep, cells, layout)
    axes = (*layout.rows, *layout.columns)
    fixed = {axis: only[0] for axis, only in layout.where.items() if len(only) == 1}
    key = layout.paper if sweep.profile != "custom" else None
    reference, comparable = reference_of(key), sweep.is_comparable(cells)

    def printed(labels: tuple[str, ...]) -> float | None:
        known = fixed | dict(zip(axes, labels, strict=True))
        return None if key is None else reference.table_value(key, known)

    def with_paper(number: Number | None, labels: tuple[str, ...]) -> Number | None:
        if number is None or number.unit != "%":  # the paper prints no loss
            return number
        return replace(number, paper=printed(labels), compared=comparable)

    runs["paper_percent"] = [printed(cell.labels_of(axes)) for cell in cells]
    numbers = {place: with_paper(each, place) for place, each in _numbers(runs, axes).items()}
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
            found.append(with_paper(_average(found), (*labels, *[AVERAGE for _ in layout.columns])))
        name = sweep.shown_label(layout.rows[-1], labels[-1]) if labels else layout.title
        return Row(name, tuple(found), verdict)

    rows = sweep.in_order(layout.rows, [place[:split] for place in numbers])
    groups = [
        RowGroup(
            ", ".join(f"{a}: {sweep.shown_label(a, n)}" for a, n in zip(axes, head, strict=False)),
            tuple(map(row_of, members)),
        )
        for head, members in itertools.groupby(rows, key=lambda row: row[:-1])
    ]
    judged, pairs = sweep.profile != "smoke" and all(map(has_order, runs["metric"])), 0
    if judged:
        groups = [replace(group, rows=_with_best(group.rows)) for group in groups]
    # Rows are not compared over different units, or over several measures of the same runs.
    judged &= len(runs[["id", "metric"]].drop_duplicates()) == runs["id"].nunique()
    judged &= runs["unit"].nunique() == 1
    if judged:
        compared, pairs = compare_rows([_oriented(group, len(columns)) for group in groups])
        groups = [
            replace(group, rows=_with_verdicts(group.rows, each.best, each.rows))
            for group, each in zip(groups, compared, strict=True)
        ]
    names = [zip(layout.columns, column, strict=True) for column in columns]
    heads = [tuple(shown_label(sweep, *each) for each in name) or (label,) for name in names]
    heads += [(AVERAGE, *[""] * (len(layout.columns) - 1))] * layout.average
    return SweepTable(sweep, layout, tuple(heads), tuple(groups), cells, runs, label, judged, pairs)


def _numbers(runs: "DataFrame", axes: tuple[str, ...]) -> dict[tuple[str, ...], Number]:
    """Return the number of each combination of labels; other axes are averaged within a seed.

    A seed counts if all of its runs have values.
    """
    levels = [*axes, *[SEED] * (SEED in runs.index.names and SEED not in axes)]
    by_seed = runs["shown"].groupby(level=levels, observed=True)
    means = by_seed.mean().where(by_seed.count() == by_seed.size())
    found = {}
    places = runs.groupby(level=list(axes), observed=True)
    for place, values in means.groupby(level=list(axes), observed=True):
        part = places.get_group(place)
        gaps = set(part.loc[part["shown"].isna(), "gap"])
        gap = next((each for each in _GAPS if each in gaps), "")
        units = set(part["unit"])
        with_seeds = len(levels) > len(axes)
        seeds = values.droplevel(list(axes)) if with_seeds else pd.Series(values.to_numpy(), [""])
        found[tuple(map(str, place))] = Number(seeds, gap, units.pop() if len(units) == 1 else "")
    return found


def _average(numbers: Sequence[Number | None]) -> Number | None:
    """Average all columns, seed by seed; None if a column is left out or has another unit."""
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or len({number.unit for number in known}) != 1:
        return None
    wide = pd.concat([number.values for number in known], axis=1)
    gap = next((each for each in _GAPS if each in {number.gap for number in known}), "")
    return Number(wide.mean(axis=1, skipna=False), gap, known[0].unit)


def _excluded(methods: set[str], numbers: Sequence[Number | None]) -> Verdict:
    """Return the verdict of a row that is not compared; ``none`` if it can be."""
    if methods == {REFERENCE_METHOD}:
        return Verdict("reference")
    gaps = [number.gap for number in numbers if number is not None and number.gap in _BIAS]
    return Verdict("biased", _BIAS[gaps[0]]) if gaps else Verdict("none")


def _oriented(group: RowGroup, columns: int) -> "DataFrame":
    """Return the values of rows that are compared, by column and seed; larger is better."""
    values = {
        place: {
            (column, seed): value if number.unit == "%" else -value
            for column, number in enumerate(row.numbers[:columns])
            if number is not None
            for seed, value in number.values.items()
        }
        for place, row in enumerate(group.rows)
        if row.verdict.kind == "none"
    }
    return pd.DataFrame.from_dict(values, orient="index").sort_index(axis=1)


def _with_best(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Mark the best number of each column, as displayed; if all are equal, none is.

    Numbers that lack seeds and rows that are not compared do not count.
    """
    marked = [list(row.numbers) for row in rows]
    for column in range(len(marked[0])):
        known = {
            place: number
            for place, row in enumerate(rows)
            if (number := row.numbers[column]) is not None
            if not number.gap and row.verdict.kind == "none"
        }
        shown = {p: float(n.format(n.mean).replace("−", "-")) for p, n in known.items()}
        values = {p: shown[p] if n.unit == "%" else -shown[p] for p, n in known.items()}
        for place, number in known.items():
            is_best = values[place] == max(values.values()) > min(values.values())
            marked[place][column] = replace(number, best=is_best)
    return tuple(replace(row, numbers=tuple(own)) for row, own in zip(rows, marked, strict=True))


def _with_verdicts(
    rows: Sequence[Row], best: int | None, compared: dict[int, Comparison]
) -> tuple[Row, ...]:
    """Add how each row stands against the best."""
    if best is None:
        return tuple(rows)
    name, found = rows[best].label, []
    unit = next(number for number in rows[best].numbers if number is not None)
    for place, row in enumerate(rows):
        each, verdict = compared.get(place), row.verdict
        if place == best:
            verdict = Verdict("best", name)
        elif each is None:
            pass
        elif each.decided:
            verdict = Verdict("worse", name, each)
        elif unit.format_difference(each.difference).strip("0.") == "":
            verdict = Verdict("tied", name)
        else:
            verdict = Verdict("undecided", name, each)
        found.append(replace(row, verdict=verdict))
    if any(row.verdict.kind == "tied" for row in found):
        found[best] = replace(found[best], verdict=Verdict("tied", name))
    return tuple(found)
