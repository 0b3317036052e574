"""The figure of accuracy against the spectral inconsistency index."""

import math
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.lines import (
    SIMILARITY,
    SUBJECTS,
    late,
    late_remark,
    metric_of,
)
from trishul_ray.report.paper_figures.selection import Estimate, Selection, number_of
from trishul_ray.report.paper_figures.style import (
    INK,
    label_ends,
    new_panels,
    set_title,
    styles_of,
)


@dataclass(frozen=True)
class Point:
    """Runs of one series at one value of the field: index of inconsistency, and metric."""

    series: str
    value: float
    index: Estimate
    metric: Estimate


@dataclass(frozen=True)
class ScatterData:
    """The content of the figure: points by panel, in the order of series and field."""

    panels: tuple[tuple[str, tuple[Point, ...]], ...]
    y_label: str
    percent: bool
    symbol: str
    names: tuple[str, ...]
    remarks: tuple[str, ...]

    def describe(self) -> str:
        """Return all points in words."""
        panels = [
            f"{title}: "
            + ", ".join(
                f"{p.series} at {self.symbol}={p.value:g}: inconsistency {p.index.centre:.3f}, "
                f"{self.y_label} {p.metric.centre:{'.1%' if self.percent else '.4g'}}"
                for p in points
            )
            for title, points in self.panels
        ]
        return f"{'; '.join(panels)}."


def accuracy_inconsistency(selection: Selection) -> ScatterData | None:
    """Collect the final metric and 1 minus the principal-angle similarity of late rounds."""
    field, series = selection.options["x"], selection.axes("series")
    metric, percent = metric_of(selection.finished)
    panels: list[tuple[str, tuple[Point, ...]]] = []
    pooled: list[tuple[CellOutcome, ...]] = []
    for subject in selection.options["of"]:
        prefix, title = SUBJECTS[subject]
        similarity = late(prefix + SIMILARITY, selection.options["last"])
        points = []
        for group in selection.groups(series):
            found: dict[float, list[tuple[float, float, CellOutcome]]] = {}
            for cell in group.cells:
                value, aligned, score = number_of(cell, field), similarity(cell), cell.value
                if value is not None and aligned is not None and score is not None:
                    found.setdefault(value, []).append((1.0 - aligned, score, cell))
            for value, runs in sorted(found.items()):
                indices, scores, cells = zip(*runs, strict=True)
                index, score_of = Estimate.of_runs(indices), Estimate.of_runs(scores)
                points.append(Point(group.name, value, index, score_of))
                pooled.append(cells)
        if points:
            panels.append((title, tuple(points)))
    if not panels:
        return None
    names = tuple(group.name for group in selection.groups(series))
    remarks = [
        "inconsistency index: 1 − principal-angle similarity",
        late_remark(selection),
        "point and bars: mean, smallest and largest over seeds",
        *selection.pooled(pooled),
    ]
    symbol = {"partition.alpha": "α", "method.lam": "λ"}.get(field, field)
    return ScatterData(tuple(panels), metric, percent, symbol, names, tuple(remarks))


def draw_scatter(data: ScatterData) -> Figure:
    """Draw the points of each series, joined in the order of the field."""
    figure, panels = new_panels(len(data.panels), 2, width=5.0, height=3.6)
    styles = styles_of(data.names)
    ends: dict[Axes, list[tuple[str, float, float, str]]] = {}
    for axes, (title, points) in zip(panels, data.panels, strict=True):
        ends[axes] = []
        for name in data.names:
            own = [point for point in points if point.series == name]
            if not own:
                continue
            style, x = styles[name], [point.index.centre for point in own]
            y = [point.metric.centre for point in own]
            axes.plot(
                x, y, color=style.colour, linestyle=style.dash, marker=style.marker, linewidth=1.2
            )
            lows, highs = [p.metric.low for p in own], [p.metric.high for p in own]
            axes.vlines(x, lows, highs, color=style.colour, linewidth=1)
            lows, highs = [p.index.low for p in own], [p.index.high for p in own]
            axes.hlines(y, lows, highs, color=style.colour, linewidth=1)
            for point in own:
                value = "IID" if math.isinf(point.value) else f"{data.symbol}={point.value:g}"
                axes.annotate(
                    value, (point.index.centre, point.metric.centre), (5, 5),
                    textcoords="offset points", fontsize=7.5, color=INK,
                )  # fmt: skip
            rightmost = max(own, key=lambda point: point.index.centre)
            ends[axes].append((name, rightmost.index.centre, rightmost.metric.centre, style.colour))
        axes.margins(0.12)
        if any(point.metric.count == 1 for point in points):
            axes.set_ylim(bottom=0)
            axes.set_xlim(0, 1)
        if data.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        set_title(axes, title)
        axes.set_xlabel("spectral inconsistency index", fontsize=9)
        axes.set_ylabel(data.y_label, fontsize=9)
    label_ends(figure, ends)
    return figure
