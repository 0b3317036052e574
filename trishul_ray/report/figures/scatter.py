"""The figure of accuracy against the spectral inconsistency index."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import Bbox

from trishul_ray.report.figures import SUBJECTS
from trishul_ray.report.figures.curves import (
    SIMILARITY,
    late,
    late_remark,
    metric_of,
    spread_remark,
)
from trishul_ray.report.figures.selection import Band, Selection, number_of
from trishul_ray.report.figures.style import (
    INK,
    SMALL,
    legend_above,
    new_panels,
    set_labels,
    styles_of,
)
from trishul_ray.report.outcomes import CellOutcome, Row

#: Places for the field's value, in points from its marker; the first free one is taken.
_OFFSETS = (
    *((6.0, 5.0), (-6.0, -5.0), (6.0, -5.0), (-6.0, 5.0), (0.0, 10.0), (0.0, -10.0)),
    *((10.0, 14.0), (-10.0, -14.0), (10.0, -14.0), (-10.0, 14.0), (0.0, 20.0), (0.0, -20.0)),
)


@dataclass(frozen=True)
class Point:
    """Runs of one series at one value of the field: index, metric, and the paper's metric."""

    series: str
    value: float
    index: Band
    metric: Band
    paper: float


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

    def rows(self) -> list[Row]:
        """Return two rows for each point: its index, and its metric with the paper's number."""
        return [
            {"panel": title, "series": point.series, "x": point.value, "metric": metric}
            | band.row()
            | {"paper": paper}
            for title, points in self.panels
            for point in points
            for metric, band, paper in (
                ("inconsistency index", point.index, math.nan),
                (self.y_label, point.metric, point.paper),
            )
        ]


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
                index, score_of = Band.of_runs(indices), Band.of_runs(scores)
                printed = selection.paper(cells[0].metric, cells) / (100.0 if percent else 1.0)
                points.append(Point(group.name, value, index, score_of, printed))
                pooled.append(cells)
        if points:
            panels.append((title, tuple(points)))
    if not panels:
        return None
    names = tuple(group.name for group in selection.groups(series))
    symbol = {"partition.alpha": "α", "method.lam": "λ"}.get(field, field)
    averaged = selection.pooled(pooled)
    remarks = [
        f"beside each point: {symbol}",
        "inconsistency index: 1 − principal-angle similarity",
        late_remark(selection),
        spread_remark("point and bars", averaged),
        *averaged,
    ]
    return ScatterData(tuple(panels), metric, percent, symbol, names, tuple(remarks))


def draw_scatter(data: ScatterData, note: Sequence[str]) -> Figure:
    """Draw the points of each series, joined in the order of the field."""
    figure, panels = new_panels(len(data.panels), note, height=3.8)
    styles = styles_of(data.names)
    for axes, (title, points) in zip(panels, data.panels, strict=True):
        for name in data.names:
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
        axes.margins(0.15)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        if data.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        set_labels(axes, title, "spectral inconsistency index", data.y_label)
    legend_above(figure)
    figure.draw_without_rendering()  # places the panels
    for axes, (_, points) in zip(panels, data.panels, strict=True):
        _write_values(axes, points)
    return figure


def _write_values(axes: Axes, points: Sequence[Point]) -> None:
    """Write the value of the field beside each point, where no other value or point is."""
    places = [(point.index.centre, point.metric.centre) for point in points]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in axes.transData.transform(places)]
    for point, place in zip(points, places, strict=True):
        value = "IID" if math.isinf(point.value) else f"{point.value:g}"
        for dx, dy in _OFFSETS:
            text = axes.annotate(
                value, place, (dx, dy), textcoords="offset points", fontsize=SMALL, color=INK,
                ha="center" if dx == 0 else "left" if dx > 0 else "right", va="center",
            )  # fmt: skip
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            continue  # the line through the points tells their order
        taken.append(box)
