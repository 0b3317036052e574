"""Figures of lines: metrics over rounds, over λ, and over α."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trishul_ray.report.figures import GREY
from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.selection import (
    Estimate,
    Group,
    Selection,
    number_of,
    records_of,
)
from trishul_ray.report.paper_figures.style import (
    Style,
    label_ends,
    new_panels,
    set_labels,
    styles_of,
)

#: What diagnostics are computed of (option ``of``): prefix of their metrics, and how it is called.
SUBJECTS = {
    "updates": ("delta_", "updates (uploads − broadcast)"),
    "uploads": ("", "uploaded cores s·H"),
}
SIMILARITY = "principal_angle_similarity"
#: Kinds of x axes, with their titles: rounds, a strength on a log axis, a skew on a reversed one.
Scale = Literal["rounds", "strength", "skew"]
_X_LABELS = {"method.lam": "λ", "partition.alpha": "Dirichlet α (to the right: more skewed)"}
_BAND = "line and band: mean, smallest and largest over seeds"
_BARS = "point and bar: mean, smallest and largest over seeds"
_ONE_SEED = "with one seed there is no interval, and the axis starts at 0"

Points = Iterable[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One series: an estimate at each x, ascending."""

    label: str
    x: tuple[float, ...]
    y: tuple[Estimate, ...]


@dataclass(frozen=True)
class Panel:
    """Lines of one metric. ``expected`` is a level without any effect, NaN if there is none."""

    title: str
    y_label: str
    lines: tuple[Line, ...]
    percent: bool = False
    expected: float = math.nan


@dataclass(frozen=True)
class LineData:
    """The content of a figure of lines; ``names`` also has the series that are missing."""

    panels: tuple[Panel, ...]
    x_label: str
    scale: Scale
    names: tuple[str, ...]
    remarks: tuple[str, ...] = field(default=())

    def describe(self) -> str:
        """Return the last value of each line in words."""
        panels = []
        for panel in self.panels:
            unit = ".1%" if panel.percent else ".4g"
            values = [
                f"{line.label or panel.y_label} {line.y[-1].centre:{unit}} at {line.x[-1]:g}"
                for line in panel.lines
            ]
            panels.append(f"{panel.title} ({panel.y_label}): {', '.join(values)}")
        return f"{self.x_label}. {'; '.join(panels)}."


class _Collector:
    """Collects the panels of one figure, and what there is to say about them."""

    def __init__(self, selection: Selection, scale: Scale, x_label: str) -> None:
        self.selection, self.scale, self.x_label = selection, scale, x_label
        self.series = selection.axes("series")
        self.panels: list[Panel] = []
        self.empty: dict[int, CellOutcome] = {}
        self.points: list[list[CellOutcome]] = []

    def add(
        self,
        title: str,
        y_label: str,
        points_of: Callable[[CellOutcome], Points],
        *,
        within: Group | None = None,
        percent: bool = False,
        expected: float = math.nan,
        optional: bool = False,
    ) -> None:
        """Add a panel with a line for each series, unless there is no value for any.

        Cells without a value are named below the figure, unless that is ``optional``.
        """
        lines = []
        for group in self.selection.groups(self.series, within):
            values: dict[float, list[float]] = {}
            cells: dict[float, list[CellOutcome]] = {}
            for cell in group.cells:
                points = [(x, y) for x, y in points_of(cell) if math.isfinite(y)]
                if not points and not optional:
                    self.empty[id(cell)] = cell
                for x, y in points:
                    values.setdefault(x, []).append(y)
                    cells.setdefault(x, []).append(cell)
            self.points += cells.values()
            if values:
                places = tuple(sorted(values))
                estimates = tuple(Estimate.of_runs(values[x]) for x in places)
                lines.append(Line(group.name, places, estimates))
        if lines:
            self.panels.append(Panel(title, y_label, tuple(lines), percent, expected))

    def data(self, *remarks: str) -> LineData | None:
        """Return what was collected; None if there is nothing to draw."""
        if not self.panels:
            return None
        names = tuple(group.name for group in self.selection.groups(self.series))
        seeds = [e.count for panel in self.panels for line in panel.lines for e in line.y]
        notes = [_BAND if self.scale == "rounds" else _BARS] if max(seeds) > 1 else []
        notes += [_ONE_SEED] if min(seeds) == 1 else []
        notes += [*remarks, *self.selection.pooled(self.points)]
        if self.empty:
            missing = self.selection.names(list(self.empty.values()))
            notes.append(f"without these metrics: {'; '.join(missing)}")
        return LineData(tuple(self.panels), self.x_label, self.scale, names, tuple(notes))


def convergence(selection: Selection) -> LineData | None:
    """Collect the metric after each round: a panel for each of ``panels``, a line per series."""
    found = _Collector(selection, "rounds", "communication round")
    for panel in selection.groups(selection.axes("panels")):
        metric, percent = metric_of(panel.cells)
        found.add(panel.name, metric, _headline_by_round, within=panel, percent=percent)
    return found.data()


def _headline_by_round(cell: CellOutcome) -> Points:
    return [(r["round"], r[cell.metric]) for r in records_of(cell) if cell.metric in r]


def spectral_alignment(selection: Selection) -> LineData | None:
    """Collect the similarity of the clients' subspaces and dominant directions in each round."""
    found = _Collector(selection, "rounds", "communication round")
    subjects = [SUBJECTS[subject] for subject in selection.options["of"]]
    chance = _chance(selection)
    for prefix, title in subjects:
        similarity = _by_round(prefix + SIMILARITY)
        found.add(title, "principal-angle similarity", similarity, expected=chance)
    for prefix, title in subjects:
        found.add(title, "dominant-vector similarity", _by_round(f"{prefix}dominant_similarity"))
    return found.data(*_chance_remark(chance))


def spectral_diagnostics(selection: Selection) -> LineData | None:
    """Collect spectral entropy, effective rank and variance between clients in each round.

    The variance, which is the same of updates and uploads, is shown twice: divided by that of
    RAVAN in round 1, as in the paper, and divided by the squared norm of the mean update.
    """
    found = _Collector(selection, "rounds", "communication round")
    subjects = [SUBJECTS[subject] for subject in selection.options["of"]]
    for prefix, title in subjects:
        found.add(title, "spectral entropy", _by_round(f"{prefix}spectral_entropy"))
    for prefix, title in subjects:
        found.add(title, "effective rank", _by_round(f"{prefix}effective_rank"))
    level, unit = _variance_of_ravan(selection)
    variance = _by_round("aggregation_variance", level)
    found.add("variance between clients", unit, variance)
    relative = _by_round("delta_relative_variance")
    found.add("variance between clients", "relative to |mean update|²", relative)
    return found.data()


def _by_round(metric: str, divisor: float = 1.0) -> Callable[[CellOutcome], Points]:
    return lambda cell: [(r["round"], r[metric] / divisor) for r in records_of(cell) if metric in r]


def _variance_of_ravan(selection: Selection) -> tuple[float, str]:
    """Return RAVAN's aggregation variance in its first round, and the unit that makes."""
    name = "aggregation_variance"
    first = [
        next((r[name] for r in records_of(cell) if name in r), math.nan)
        for cell in selection.finished
        if cell.summary["config"]["method"]["name"] == "ravan"
    ]
    level = float(np.mean(first)) if first else math.nan
    if math.isfinite(level) and level > 0:
        return level, "relative to RAVAN in round 1"
    return 1.0, "absolute (no RAVAN)"


def _chance(selection: Selection) -> float:
    """Return the similarity k/r of unrelated subspaces; NaN if the cells differ in k or r."""
    found = set()
    for cell in selection.finished:
        sigma = cell.arrays.get("spectrum_uploaded")
        if sigma is not None:
            # Cores of smaller rank are padded.
            ranks = np.isfinite(sigma).sum(axis=1)
            top_k = cell.summary["config"]["evaluation"]["top_k"]
            found |= {min(1.0, top_k / rank) for rank in np.unique(ranks)}
    return float(found.pop()) if len(found) == 1 else math.nan


def _chance_remark(chance: float) -> list[str]:
    if not math.isfinite(chance):
        return []
    return [f"dotted: similarity {chance:.2g} of unrelated subspaces of this size"]


def accuracy_over_field(selection: Selection) -> LineData | None:
    """Collect the final metric over the field ``x``, a panel for each of ``panels``."""
    found = _over(selection)
    for panel in selection.groups(selection.axes("panels")):
        metric, percent = metric_of(panel.cells)
        points = _by_field(selection.options["x"], lambda cell: cell.value)
        found.add(panel.name, metric, points, within=panel, percent=percent)
    return found.data()


def accuracy_and_entropy(selection: Selection) -> LineData | None:
    """Collect the final metric and the late spectral entropy over the field ``x``."""
    found, last = _over(selection), selection.options["last"]
    x = selection.options["x"]
    metric, percent = metric_of(selection.finished)
    found.add("after the last round", metric, _by_field(x, lambda c: c.value), percent=percent)
    for subject in selection.options["of"]:
        prefix, title = SUBJECTS[subject]
        entropy = _by_field(x, late(f"{prefix}spectral_entropy", last))
        found.add(title, "spectral entropy", entropy)
    zeroed = _by_field(x, late("svt_zeroed", last))
    found.add(
        "set to zero by the last prox of a round",
        "singular values",
        zeroed,
        percent=True,
        optional=True,
    )
    return found.data(late_remark(selection))


def alignment_and_entropy(selection: Selection) -> LineData | None:
    """Collect the late similarity of subspaces and spectral entropy over the field ``x``."""
    found, last = _over(selection), selection.options["last"]
    x, chance = selection.options["x"], _chance(selection)
    subjects = [SUBJECTS[subject] for subject in selection.options["of"]]
    for prefix, title in subjects:
        similarity = _by_field(x, late(prefix + SIMILARITY, last))
        found.add(title, "principal-angle similarity", similarity, expected=chance)
    for prefix, title in subjects:
        found.add(title, "spectral entropy", _by_field(x, late(f"{prefix}spectral_entropy", last)))
    return found.data(late_remark(selection), *_chance_remark(chance))


def _over(selection: Selection) -> _Collector:
    x = selection.options["x"]
    scale: Scale = "skew" if x == "partition.alpha" else "strength"
    return _Collector(selection, scale, _X_LABELS.get(x, x))


def _by_field(
    x: str, value: Callable[[CellOutcome], float | None]
) -> Callable[[CellOutcome], Points]:
    def points(cell: CellOutcome) -> Points:
        position, found = number_of(cell, x), value(cell)
        return [] if position is None or found is None else [(position, found)]

    return points


def late(metric: str, last: int) -> Callable[[CellOutcome], float | None]:
    """Return a function that averages a cell's metric over its last measured rounds."""

    def mean(cell: CellOutcome) -> float | None:
        values = [record[metric] for record in records_of(cell) if metric in record][-last:]
        return float(np.mean(values)) if values else None

    return mean


def late_remark(selection: Selection) -> str:
    """Say which rounds :func:`late` averages over."""
    last = selection.options["last"]
    span = "the last round" if last == 1 else f"mean of the last {last} rounds, or all if fewer"
    return f"diagnostics: {span}"


def metric_of(cells: Sequence[CellOutcome]) -> tuple[str, bool]:
    """Return the name of the cells' metric for an axis, and whether it is a share."""
    names = dict.fromkeys(cell.metric for cell in cells)
    shown = " or ".join(name.replace("_", " ") for name in names)
    return f"test {shown}", not any("loss" in name for name in names)


def draw_lines(data: LineData, note: Sequence[str]) -> Figure:
    """Draw a figure of lines."""
    figure, panels = new_panels(len(data.panels), note)
    styles = styles_of(data.names)
    ends: dict[Axes, list[tuple[str, float, float, str]]] = {}
    for axes, panel in zip(panels, data.panels, strict=True):
        place = _x_axis(axes, data, panel)
        for line in panel.lines:
            x = [place(each) for each in line.x]
            _draw_line(axes, x, line, styles[line.label], banded=data.scale == "rounds")
        if math.isfinite(panel.expected):
            axes.axhline(panel.expected, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
        _y_axis(axes, panel)
        set_labels(axes, panel.title, data.x_label, panel.y_label)
        if len(data.names) > 1:
            ends[axes] = [
                (line.label, place(line.x[-1]), line.y[-1].centre, styles[line.label].colour)
                if data.scale != "skew"
                else (line.label, place(line.x[0]), line.y[0].centre, styles[line.label].colour)
                for line in panel.lines
            ]
    label_ends(figure, ends)
    return figure


def _draw_line(axes: Axes, x: list[float], line: Line, style: Style, *, banded: bool) -> None:
    centre = [estimate.centre for estimate in line.y]
    low = [estimate.low for estimate in line.y]
    high = [estimate.high for estimate in line.y]
    every = max(1, len(x) // 10)
    axes.plot(
        x, centre, color=style.colour, linestyle=style.dash, linewidth=1.5, marker=style.marker,
        markersize=4, markevery=every, label=line.label,
    )  # fmt: skip
    if all(estimate.count == 1 for estimate in line.y):
        return
    if banded:
        axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0)
    else:
        axes.vlines(x, low, high, color=style.colour, linewidth=1.2, alpha=0.8)


def _y_axis(axes: Axes, panel: Panel) -> None:
    """Fix the limits: those of all intervals, or from 0 where a point has no interval."""
    estimates = [estimate for line in panel.lines for estimate in line.y]
    low, high = min(e.low for e in estimates), max(e.high for e in estimates)
    if math.isfinite(panel.expected):
        low, high = min(low, panel.expected), max(high, panel.expected)
    if low >= 0 and any(e.count == 1 for e in estimates):
        axes.set_ylim(0, 1.08 * high or 1.0)
    else:
        margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))


def _x_axis(axes: Axes, data: LineData, panel: Panel) -> Callable[[float], float]:
    """Prepare the x axis of a panel and return where a value is placed on it."""
    values = sorted({x for line in panel.lines for x in line.x})
    if data.scale == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        return lambda value: value
    positions = log_positions(values)
    ticks = ["IID" if math.isinf(value) else f"{value:g}" for value in values]
    axes.set_xticks([positions[value] for value in values], ticks)
    margin = 0.06 * (max(positions.values()) - min(positions.values())) or 0.5
    limits = (min(positions.values()) - margin, max(positions.values()) + margin)
    axes.set_xlim(limits if data.scale == "strength" else limits[::-1])
    for outside in (0.0, math.inf):
        if outside in positions and len(values) > 1:
            neighbour = positions[values[1] if outside == 0 else values[-2]]
            # A break in the axis: the distance to this tick means nothing.
            axes.annotate(
                "//", ((positions[outside] + neighbour) / 2, 0), xycoords=("data", "axes fraction"),
                ha="center", va="center", fontsize=9, color=GREY, annotation_clip=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    return lambda value: positions[value]


def log_positions(values: Sequence[float]) -> dict[float, float]:
    """Return positions on a log axis, with 0 and infinity one step beyond its ends."""
    logs = sorted({math.log10(value) for value in values if 0 < value < math.inf}) or [0.0]
    step = (logs[-1] - logs[0]) / (len(logs) - 1) if len(logs) > 1 else 1.0
    ends = {0.0: logs[0] - step, math.inf: logs[-1] + step}
    return {value: ends[value] if value in ends else math.log10(value) for value in values}
