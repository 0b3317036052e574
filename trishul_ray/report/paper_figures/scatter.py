"""The figure of accuracy against the spectral inconsistency index."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

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
    legend_above,
    new_panels,
    set_labels,
    styles_of,
)

#: Where the values of the field are written, in points from their marker: every other series.
_OFFSETS = ((5.0, 4.0), (-5.0, -9.0))


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
    symbol = {"partition.alpha": "α", "method.lam": "λ"}.get(field, field)
    remarks = [
        f"beside each point: {symbol}",
        "inconsistency index: 1 − principal-angle similarity",
        late_remark(selection),
        "point and bars: mean, smallest and largest over seeds",
        *selection.pooled(pooled),
    ]
    return ScatterData(tuple(panels), metric, percent, symbol, names, tuple(remarks))


def draw_scatter(data: ScatterData, note: Sequence[str]) -> Figure:
    """Draw the points of each series, joined in the order of the field."""
    figure, panels = new_panels(len(data.panels), note, height=3.3)
    styles = styles_of(data.names)
    for axes, (title, points) in zip(panels, data.panels, strict=True):
        for index, name in enumerate(data.names):
            own = [point for point in points if point.series == name]
            if not own:
                continue
            style, x = styles[name], [point.index.centre for point in own]
            y = [point.metric.centre for point in own]
            axes.plot(
                x, y, color=style.colour, linestyle=style.dash, marker=style.marker, linewidth=1.2,
                label=name,
            )  # fmt: skip
            lows, highs = [p.metric.low for p in own], [p.metric.high for p in own]
            axes.vlines(x, lows, highs, color=style.colour, linewidth=1)
            lows, highs = [p.index.low for p in own], [p.index.high for p in own]
            axes.hlines(y, lows, highs, color=style.colour, linewidth=1)
            for point in own:
                value = "IID" if math.isinf(point.value) else f"{point.value:g}"
                axes.annotate(
                    value, (point.index.centre, point.metric.centre), _OFFSETS[index % 2],
                    textcoords="offset points", fontsize=7.5, color=INK,
                    ha="left" if index % 2 == 0 else "right",
                )  # fmt: skip
        axes.margins(0.12)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        if any(point.metric.count == 1 for point in points):
            axes.set_ylim(bottom=0)
            axes.set_xlim(0, 1)
        if data.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        set_labels(axes, title, "spectral inconsistency index", data.y_label)
    legend_above(figure)
    return figure
