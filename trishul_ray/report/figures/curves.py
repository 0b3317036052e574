"""Figures of lines: metrics over rounds, over λ, and over α."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trishul_ray.errors import InputError
from trishul_ray.report.figures import SUBJECTS
from trishul_ray.report.figures.selection import Band, Group, Selection, number_of
from trishul_ray.report.figures.style import (
    GREY,
    Style,
    label_ends,
    new_panels,
    set_labels,
    styles_of,
)
from trishul_ray.report.outcomes import CellOutcome, Row, is_loss

SIMILARITY = "principal_angle_similarity"
#: Diagnostics of a run, a panel each.
_DIAGNOSTICS = {
    SIMILARITY: "principal-angle similarity",
    "dominant_similarity": "dominant-vector similarity",
    "inconsistency_index": "inconsistency index",
    "spectral_entropy": "spectral entropy",
    "effective_rank": "effective rank",
    "aggregation_variance": "aggregation variance (equal for both)",
}
#: Kinds of x axes: rounds, an amount, a strength on a log axis, a skew on a reversed one.
Scale = Literal["rounds", "amount", "strength", "skew"]
_ROUNDS = "communication round"
_X_LABELS = {
    "method.lam": "λ",
    "partition.alpha": "Dirichlet α (to the right: more skewed)",
    "privacy.epsilon": "ε for each client (∞: no noise)",
}
_INFINITE = {"partition.alpha": "IID"}
_ONE_SEED = "with one seed there is no deviation, and the axis starts at 0"
_PAPER = "hollow: the paper's numbers"

Points = Iterable[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One series: a number at each x, ascending, and what the paper prints there, or NaN."""

    label: str
    x: tuple[float, ...]
    y: tuple[Band, ...]
    paper: tuple[float, ...]

    @classmethod
    def of_run(cls, label: str, points: Points, rows: int | None = None) -> "Line":
        """Return the line of one run, without what is NaN; ``rows`` are those of a share."""
        known = [(x, y) for x, y in points if math.isfinite(y)]
        bands = [Band.of_share(y, rows) if rows else Band(y, y, y, 1) for _, y in known]
        return cls(label, tuple(x for x, _ in known), tuple(bands), (math.nan,) * len(known))


@dataclass(frozen=True)
class Panel:
    """Lines of one metric, with levels to compare with by name; one without a name is dotted.

    The axis starts at 0 if ``from_zero`` and where a number has no interval.
    """

    title: str
    y_label: str
    lines: tuple[Line, ...]
    percent: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    from_zero: bool = True


@dataclass(frozen=True)
class CurveData:
    """The content of a figure of lines; ``names`` also has the series that are missing.

    ``infinite`` is how an infinite x is displayed.
    """

    panels: tuple[Panel, ...]
    x_label: str
    scale: Scale
    names: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    infinite: str = "∞"

    @property
    def over_rounds(self) -> bool:
        """Whether lines run over the rounds of a run, or what they cost."""
        return self.scale in ("rounds", "amount")

    def describe(self) -> str:
        """Return the means over seeds in words: of each x, or of the last round."""
        panels = []
        for panel in self.panels:
            unit = ".1%" if panel.percent else ".4g"
            lines = []
            for line in panel.lines:
                points = list(zip(line.x, line.y, line.paper, strict=True))
                values = [
                    f"{y.centre:{unit}} at {x:g}"
                    + f" (paper {paper:{unit}})" * math.isfinite(paper)
                    for x, y, paper in (points[-1:] if self.over_rounds else points)
                ]
                lines.append(f"{line.label or panel.y_label} {', '.join(values)}")
            panels.append(f"{panel.title} ({panel.y_label}): {'; '.join(lines)}")
        return f"{self.x_label}. {'; '.join(panels)}."

    def rows(self) -> list[Row]:
        """Return one row for each point."""
        return [
            {"panel": panel.title, "metric": panel.y_label, "series": line.label, "x": x}
            | band.row()
            | {"paper": paper}
            for panel in self.panels
            for line in panel.lines
            for x, band, paper in zip(line.x, line.y, line.paper, strict=True)
        ]


def metric_of_run(
    rounds: Sequence[int],
    series: Mapping[str, Sequence[float]],
    *,
    references: Mapping[str, float] | None = None,
    metric: str = "accuracy",
    rows: int | None = None,
) -> CurveData:
    """Return a metric over rounds, one line for each series, with levels to compare with.

    A loss is shown as it is; any other metric is in [0, 1], NaN if a round was not evaluated, and
    shown in percent. Given the number of test ``rows`` of an accuracy, a band shows its 95 %
    interval, so that noise is not taken for progress.

    Raises:
        InputError: ``series`` is empty, or the length of one differs from ``rounds``.
    """
    if not series:
        raise InputError("metric_of_run: series is empty; at least one line is needed")
    for label, values in series.items():
        if len(values) != len(rounds):
            raise InputError(
                f"metric_of_run: {label!r} has {len(values)} values for {len(rounds)} rounds"
            )
    lines = [Line.of_run(label, zip(rounds, series[label], strict=True), rows) for label in series]
    percent, levels = not is_loss(metric), dict(references or {})
    name = f"test {metric.replace('_', ' ')}" if percent else metric
    shown = tuple(line for line in lines if line.x)
    panel = Panel("", name, shown, percent, levels, from_zero=False)
    remarks = () if rows is None else (f"band: 95 % interval for {rows:,} test rows",)
    return CurveData((panel,), _ROUNDS, "rounds", tuple(series), remarks)


def diagnostics_of_run(records: Sequence[Mapping[str, Any]]) -> CurveData:
    """Return the diagnostics of updates and uploads over the rounds that have them."""
    panels = []
    for metric, title in _DIAGNOSTICS.items():
        lines = [
            Line.of_run(name, [(r["round"], r.get(prefix + metric, math.nan)) for r in records])
            for prefix, name in SUBJECTS.values()
        ]
        panels.append(Panel(title, "", tuple(line for line in lines if line.x)))
    names = tuple(name for _, name in SUBJECTS.values())
    return CurveData(tuple(p for p in panels if p.lines), _ROUNDS, "rounds", names)


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
        paper: str | None = None,
    ) -> None:
        """Add a panel with a line for each series, unless there is no value for any.

        Cells without a value are named below the figure, unless that is ``optional``. ``expected``
        is a level without any effect. ``paper`` is the metric of the paper's numbers, which are of
        the last round.
        """
        lines = []
        for group in self.selection.groups(self.series, within):
            found: dict[float, list[tuple[float, CellOutcome]]] = {}
            for cell in group.cells:
                points = [(x, y) for x, y in points_of(cell) if math.isfinite(y)]
                if not points and not optional:
                    self.empty[id(cell)] = cell
                for x, y in points:
                    found.setdefault(x, []).append((y, cell))
            if not found:
                continue
            cells = {x: [cell for _, cell in runs] for x, runs in found.items()}
            self.points += cells.values()
            places = tuple(sorted(found))
            bands = tuple(Band.of_runs([y for y, _ in found[x]]) for x in places)
            printed = [
                self.selection.paper(paper, cells[x]) / (100.0 if percent else 1.0)
                if paper and (self.scale != "rounds" or x == places[-1])
                else math.nan
                for x in places
            ]
            lines.append(Line(group.name, places, bands, tuple(printed)))
        if lines:
            levels = {"": expected} if math.isfinite(expected) else {}
            self.panels.append(Panel(title, y_label, tuple(lines), percent, levels))

    def add_headline(self, points_of: Callable[[CellOutcome], Points]) -> None:
        """Add the metric that cells are read by, a panel for each of the option ``panels``."""
        for panel in self.selection.groups(self.selection.axes("panels")):
            metric, percent = metric_of(panel.cells)
            headline = _metric_name(panel.cells)
            self.add(panel.name, metric, points_of, within=panel, percent=percent, paper=headline)

    def data(self, *remarks: str) -> CurveData | None:
        """Return what was collected; None if there is nothing to draw."""
        if not self.panels:
            return None
        lines = [line for panel in self.panels for line in panel.lines]
        seeds = [band.count for line in lines for band in line.y]
        printed = any(math.isfinite(value) for line in lines for value in line.paper)
        lined = self.scale in ("rounds", "amount")
        pooled = self.selection.pooled(self.points)
        spread = spread_remark("line and band" if lined else "point and bar", pooled)
        notes = [spread] * (max(seeds) > 1)
        notes += [_ONE_SEED] * (min(seeds) == 1) + [_PAPER] * printed
        notes += [*remarks, *pooled]
        if self.empty:
            missing = self.selection.names(list(self.empty.values()))
            notes.append(f"without these metrics: {'; '.join(missing)}")
        names = tuple(group.name for group in self.selection.groups(self.series))
        infinite = _INFINITE.get(self.selection.options.get("x", ""), "∞")
        return CurveData(
            tuple(self.panels), self.x_label, self.scale, names, tuple(notes), infinite
        )


def spread_remark(shown: str, pooled: Sequence[str]) -> str:
    """Say what is drawn as a mean and its spread; ``pooled`` names other axes than the seed."""
    return f"{shown}: mean ± standard deviation over {'runs' if pooled else 'seeds'}"


def convergence(selection: Selection) -> CurveData | None:
    """Collect the metric after each round: a panel for each of ``panels``, a line per series."""
    found = _Collector(selection, "rounds", _ROUNDS)
    found.add_headline(
        lambda cell: [(r["round"], r[cell.metric]) for r in cell.records if cell.metric in r]
    )
    return found.data()


def spectral_alignment(selection: Selection) -> CurveData | None:
    """Collect the similarity of the clients' subspaces and dominant directions in each round."""
    found = _Collector(selection, "rounds", _ROUNDS)
    chance = _chance(selection)
    for prefix, title in _subjects(selection):
        similarity = _by_round(prefix + SIMILARITY)
        found.add(title, "principal-angle similarity", similarity, expected=chance)
    for prefix, title in _subjects(selection):
        found.add(title, "dominant-vector similarity", _by_round(f"{prefix}dominant_similarity"))
    return found.data(*_chance_remark(chance))


def spectral_diagnostics(selection: Selection) -> CurveData | None:
    """Collect spectral entropy, effective rank and variance between clients in each round.

    The variance, which is the same of updates and uploads, is shown twice: divided by that of
    RAVAN in round 1 of the same seed, as in the paper, and by the squared norm of the mean update.
    Thresholds are shown where they are recorded (``svt_threshold``).
    """
    found = _Collector(selection, "rounds", _ROUNDS)
    for metric in ("spectral_entropy", "effective_rank"):
        for prefix, title in _subjects(selection):
            found.add(title, metric.replace("_", " "), _by_round(prefix + metric))
    variance, unit = _variance_by_round(selection, found.series)
    found.add("variance between clients", unit, variance)
    relative = _by_round("delta_relative_variance")
    found.add("variance between clients", "relative to |mean update|²", relative)
    if any("svt_threshold" in r for cell in selection.finished for r in cell.records):
        found.add("threshold of singular values", "mean τ", _by_round("svt_threshold"))
        zeroed = _by_round("svt_zeroed")
        found.add("set to zero by it", "singular values", zeroed, percent=True)
    return found.data()


def _subjects(selection: Selection) -> list[tuple[str, str]]:
    return [SUBJECTS[subject] for subject in selection.options["of"]]


def _by_round(metric: str) -> Callable[[CellOutcome], Points]:
    return lambda cell: [(r["round"], r[metric]) for r in cell.records if metric in r]


def _variance_by_round(
    selection: Selection, series: Sequence[str]
) -> tuple[Callable[[CellOutcome], Points], str]:
    """Return the variance over that of RAVAN's round 1 with the same seed, and its unit.

    A run without such a run of RAVAN has no points; without any, the variance is absolute.
    """
    absolute, axes = _by_round("aggregation_variance"), selection.run_axes(series)
    levels: dict[tuple[str, ...], float] = {}
    for cell in selection.finished:
        if cell.method == "ravan":
            first = dict(absolute(cell)).get(1, 0.0)
            if first > 0:
                levels.setdefault(tuple(cell.labels[axis] for axis in axes), first)
    if not levels:
        return absolute, "absolute (no RAVAN)"

    def relative(cell: CellOutcome) -> Points:
        level = levels.get(tuple(cell.labels[axis] for axis in axes))
        return [] if level is None else [(x, y / level) for x, y in absolute(cell)]

    return relative, "relative to RAVAN in round 1"


def _chance(selection: Selection) -> float:
    """Return the similarity k/r of unrelated subspaces; NaN if the cells differ in k or r."""
    found = set()
    for cell in selection.finished:
        sigma = cell.arrays.get("spectrum_uploaded")
        if sigma is not None:
            # Cores of smaller rank are padded.
            ranks = np.isfinite(sigma).sum(axis=1)
            top_k = cell.result.config["evaluation"]["top_k"]
            found |= {min(1.0, top_k / rank) for rank in np.unique(ranks)}
    return float(found.pop()) if len(found) == 1 else math.nan


def _chance_remark(chance: float) -> list[str]:
    if not math.isfinite(chance):
        return []
    return [f"dotted: similarity {chance:.2g} of unrelated subspaces of this size"]


def accuracy_over_field(selection: Selection) -> CurveData | None:
    """Collect the final metric over the field ``x``, a panel for each of ``panels``."""
    found = _over(selection)
    found.add_headline(_by_field(selection.options["x"], lambda cell: cell.value))
    return found.data()


def accuracy_and_entropy(selection: Selection) -> CurveData | None:
    """Collect the final metric and the late spectral entropy over the field ``x``."""
    found, last, x = _over(selection), selection.options["last"], selection.options["x"]
    metric, percent = metric_of(selection.finished)
    accuracy, headline = _by_field(x, lambda c: c.value), _metric_name(selection.finished)
    found.add("after the last round", metric, accuracy, percent=percent, paper=headline)
    for prefix, title in _subjects(selection):
        entropy = _by_field(x, late(f"{prefix}spectral_entropy", last))
        found.add(title, "spectral entropy", entropy)
    zeroed = _by_field(x, late("svt_zeroed", last))
    title = "set to zero by the last prox of a round"
    found.add(title, "singular values", zeroed, percent=True, optional=True)
    return found.data(late_remark(selection))


def alignment_and_entropy(selection: Selection) -> CurveData | None:
    """Collect the late similarity of subspaces and spectral entropy over the field ``x``."""
    found, last, x = _over(selection), selection.options["last"], selection.options["x"]
    chance = _chance(selection)
    for prefix, title in _subjects(selection):
        similarity = _by_field(x, late(prefix + SIMILARITY, last))
        # The paper's are of "client update subspaces".
        printed = SIMILARITY if prefix else None
        found.add(title, "principal-angle similarity", similarity, expected=chance, paper=printed)
    for prefix, title in _subjects(selection):
        found.add(title, "spectral entropy", _by_field(x, late(f"{prefix}spectral_entropy", last)))
    return found.data(late_remark(selection), *_chance_remark(chance))


def personal_gain(selection: Selection) -> CurveData | None:
    """Collect what each client's own model scores more than the global one, the least first.

    A panel for each of ``panels``; methods whose clients have no model of their own have no line.
    """
    found = _Collector(selection, "amount", "share of clients, sorted by gain")

    def gains(cell: CellOutcome) -> Points:
        own, of_global = cell.result.personal, cell.result.per_client
        ordered = sorted(100 * (score - of_global[client]) for client, score in own.items())
        return [((place + 0.5) / len(ordered), gain) for place, gain in enumerate(ordered)]

    for panel in selection.groups(selection.axes("panels")):
        headline = " or ".join(dict.fromkeys(cell.result.headline for cell in panel.cells))
        title = f"{headline}: own − global, points"
        found.add(panel.name, title, gains, within=panel, expected=0.0, optional=True)
    return found.data("a client that has never taken part has the global model: 0")


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
        values = [record[metric] for record in cell.records if metric in record][-last:]
        return float(np.mean(values)) if values else None

    return mean


def late_remark(selection: Selection) -> str:
    """Say which rounds :func:`late` averages over."""
    last = selection.options["last"]
    span = (
        "the last round"
        if last == 1
        else f"mean of the last {last} that were taken, or all if fewer"
    )
    return f"diagnostics: {span}"


def metric_of(cells: Sequence[CellOutcome]) -> tuple[str, bool]:
    """Return the name of the cells' metric for an axis, and whether it is a share."""
    names = dict.fromkeys(cell.metric for cell in cells)
    shown = " or ".join(name.replace("_", " ") for name in names)
    rows = "" if shown.startswith("validation ") else "test "
    return f"{rows}{shown}", not any("loss" in name for name in names)


def _metric_name(cells: Sequence[CellOutcome]) -> str | None:
    """Return the one metric of the cells; None if there are several."""
    names = {cell.metric for cell in cells}
    return names.pop() if len(names) == 1 else None


def draw_curves(data: CurveData, note: Sequence[str]) -> Figure:
    """Draw a figure of lines."""
    figure, panels = new_panels(len(data.panels), note)
    styles = styles_of(data.names)
    ends: dict[Axes, list[tuple[str, float, float, str]]] = {}
    for axes, panel in zip(panels, data.panels, strict=True):
        place, last = _x_axis(axes, data, panel), 0 if data.scale == "skew" else -1
        for line in panel.lines:
            x = [place(each) for each in line.x]
            _draw_line(axes, x, line, styles[line.label], banded=data.over_rounds)
        for level in panel.levels.values():
            axes.axhline(level, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
        _y_axis(axes, panel)
        set_labels(axes, panel.title, data.x_label, panel.y_label)
        named = {name: level for name, level in panel.levels.items() if name}
        if len(data.names) > 1 or named:
            ends[axes] = [
                (line.label, place(line.x[last]), line.y[last].centre, styles[line.label].colour)
                for line in panel.lines
            ]
            ends[axes] += [(name, axes.get_xlim()[1], y, GREY) for name, y in named.items()]
    label_ends(figure, ends)
    return figure


def _draw_line(axes: Axes, x: list[float], line: Line, style: Style, *, banded: bool) -> None:
    low, centre, high = zip(*((y.low, y.centre, y.high) for y in line.y), strict=True)
    every = max(1, len(x) // 10)
    axes.plot(
        x, centre, color=style.colour, linestyle=style.dash, linewidth=1.5, marker=style.marker,
        markersize=4, markevery=every, label=line.label,
    )  # fmt: skip
    axes.plot(
        x, line.paper, color=style.colour, linestyle="none", marker=style.marker, markersize=8,
        markerfacecolor="none", markeredgewidth=1.3,
    )  # fmt: skip
    if all(band.count == 1 for band in line.y):
        return
    if banded and len(x) > 1:
        axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0)
    else:
        axes.vlines(x, low, high, color=style.colour, linewidth=1.2, alpha=0.8)


def _y_axis(axes: Axes, panel: Panel) -> None:
    """Fix the limits: those of all intervals, or from 0 where a point has no interval."""
    bands = [band for line in panel.lines for band in line.y]
    extra = [*panel.levels.values(), *(value for line in panel.lines for value in line.paper)]
    extra = [value for value in extra if math.isfinite(value)]
    low = min([*(band.low for band in bands), *extra])
    high = max([*(band.high for band in bands), *extra])
    positive = min([*(band.centre for band in bands), *extra]) >= 0
    if positive and panel.from_zero and any(band.count == 1 for band in bands):
        axes.set_ylim(0, 1.08 * high or 1.0)
    else:
        # Shares and norms are not negative: nor is their axis, however wide their spread.
        margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(max(low - margin, 0.0) if positive else low - margin, high + margin)
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))


def _x_axis(axes: Axes, data: CurveData, panel: Panel) -> Callable[[float], float]:
    """Prepare the x axis of a panel and return where a value is placed on it."""
    values = sorted({x for line in panel.lines for x in line.x})
    if data.over_rounds:
        whole = data.scale == "rounds"
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole, min_n_ticks=1))
        return lambda value: value
    positions = log_positions(values)
    ticks = [data.infinite if math.isinf(value) else f"{value:g}" for value in values]
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
