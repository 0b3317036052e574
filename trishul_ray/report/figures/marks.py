"""The four marks that every chart is drawn with: lines, bars, scattered points, heat maps."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter
from matplotlib.transforms import Bbox

from trishul_ray.report.figures.chart import Axis, Chart, Mark, Panel, Row, grouped
from trishul_ray.report.figures.style import (
    EMPTY,
    GREY,
    INK,
    NORMAL,
    SMALL,
    Style,
    label_ends,
    legend_above,
    new_panels,
    set_labels,
    shorten,
    styles_of,
)

Looks = Mapping[str, Style]
#: So few levels that a colour bar is drawn as vectors; the middle one is zero.
_LEVELS = 47
#: On a log axis, values below this share of the largest are drawn as zero: rounding of float32.
_ROUNDING = 1e-6
#: Digits and sign of an exponent.
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
#: Where a text may be written, in points from its point: the first free place.
_OFFSETS = (
    *((6.0, 5.0), (-6.0, -5.0), (6.0, -5.0), (-6.0, 5.0), (0.0, 10.0), (0.0, -10.0)),
    *((10.0, 14.0), (-10.0, -14.0), (10.0, -14.0), (-10.0, 14.0), (0.0, 20.0), (0.0, -20.0)),
)
#: Letters of a name in a heat map, and beside a bar.
CLASS_LETTERS, NAME_LETTERS = 18, 24
_CARD = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}


def draw_chart(chart: Chart, note: Sequence[str]) -> Figure:
    """Draw a chart above the lines of a note."""
    figure, places = new_panels(len(chart.panels), note, columns=chart.across, height=chart.height)
    drawn = list(zip(places, chart.panels, strict=True))
    for axes, panel in drawn:
        # The last metric, such as after a step, looks like the first series.
        names = chart.names if panel.by == "series" else [*reversed(panel.series)]
        looks = styles_of(names)
        _DRAW[panel.mark](axes, panel, looks)
        set_labels(axes, panel.title, panel.x.label, panel.y.label)
    sideways = [axes for axes, panel in drawn if panel.sideways]
    for axes in sideways:  # on one scale
        axes.set_xlim(0, max(other.get_xlim()[1] for other in sideways))
    fields = [item for item in drawn if item[1].mark == "heatmap"]
    for _, members in groupby(fields, key=lambda item: item[1].colours.label):
        _colour(figure, list(members), places if chart.across == 1 else None)
    if chart.legend:
        legend_above(figure)
    ends = {axes: found for axes, panel in drawn if (found := _ends(axes, panel, chart))}
    if ends:
        label_ends(figure, ends)
    scattered = [(axes, panel) for axes, panel in drawn if panel.mark == "scatter"]
    if scattered:
        figure.draw_without_rendering()  # places the panels
    for axes, panel in scattered:
        _write_beside(axes, panel)
    return figure


def _ends(axes: Axes, panel: Panel, chart: Chart) -> list[tuple[str, float, float, str]]:
    """Return name, end and colour of each line and level, where they need a name."""
    named = {name: level for name, level in panel.levels.items() if name}
    several = len(chart.names) > 1 or panel.by == "metric"
    if panel.mark != "line" or not (several or named):
        return []
    last = 0 if panel.x.scale == "skew" else -1
    found = []
    for line in axes.lines:
        if str(line.get_label()) in panel.series:
            x, y = (np.asarray(values, float) for values in line.get_data())
            known = np.flatnonzero(np.isfinite(y))
            place = int(known[last]) if known.size else 0
            end = float(np.nan_to_num(y[place], nan=axes.get_ylim()[0]))
            found.append((str(line.get_label()), float(x[place]), end, str(line.get_color())))
    return found + [(name, axes.get_xlim()[1], y, GREY) for name, y in named.items()]


def _line(axes: Axes, panel: Panel, looks: Looks) -> None:
    """Draw a line for each series, with its intervals as a band, or as bars over a field."""
    place = _x_axis(axes, panel)
    highest = max(row.ends[1] for row in panel.rows)
    lowest_level = min((level for level in panel.levels.values() if level > 0), default=math.inf)
    floor = -math.inf
    if panel.y.scale == "log":
        floor = min(_ROUNDING * highest, lowest_level / 2)
    for name, rows in panel.series.items():
        look, x = looks[name], [place(row.x) for row in rows]
        value, low, high, paper = (
            np.array(values, float)
            for values in zip(*((row.value, *row.ends, row.paper) for row in rows), strict=True)
        )
        axes.plot(
            x, np.where(value > floor, value, np.nan), color=look.colour, linestyle=look.dash,
            linewidth=1.5, marker=look.marker, markersize=4, markevery=max(1, len(x) // 10),
            label=name,
        )  # fmt: skip
        axes.plot(
            x, paper, color=look.colour, linestyle="none", marker=look.marker, markersize=8,
            markerfacecolor="none", markeredgewidth=1.3,
        )  # fmt: skip
        if not (low < high).any():
            continue
        if panel.x.scale in ("whole", "amount", "log") and len(x) > 1:
            low, high = (np.where(ends > floor, ends, floor) for ends in (low, high))
            axes.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)
        else:
            axes.vlines(x, low, high, color=look.colour, linewidth=1.2, alpha=0.8)
    for level in panel.levels.values():
        axes.axhline(level, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    _y_axis(axes, panel)


def _y_axis(axes: Axes, panel: Panel) -> None:
    """Fix the limits: those of all intervals, or from 0 where a number has no interval."""
    if panel.y.scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
        axes.yaxis.set_minor_locator(NullLocator())
        return
    extra = [*panel.levels.values(), *(row.paper for row in panel.rows)]
    extra = [value for value in extra if math.isfinite(value)]
    low = min([*(row.ends[0] for row in panel.rows), *extra])
    high = max([*(row.ends[1] for row in panel.rows), *extra])
    positive = min([*(row.value for row in panel.rows), *extra]) >= 0
    if positive and panel.from_zero and any(row.n == 1 for row in panel.rows):
        axes.set_ylim(0, 1.08 * high or 1.0)
    else:
        # Shares and norms are not negative: nor is their axis, however wide their spread.
        margin = 0.08 * (high - low)
        if high - low <= 1e-6 * max(abs(low), abs(high)):  # what differs is rounded
            margin = 0.05 * abs(high) or 1.0
        axes.set_ylim(max(low - margin, 0.0) if positive else low - margin, high + margin)
    _in_percent(axes.yaxis, panel.y)


def _x_axis(axes: Axes, panel: Panel) -> Callable[[float], float]:
    """Prepare the x axis of a panel and return where a value is placed on it."""
    values = sorted({row.x for row in panel.rows})
    if panel.x.scale not in ("strength", "skew"):
        whole = panel.x.scale != "amount"
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole, min_n_ticks=1))
        return lambda value: value
    positions = log_positions(values)
    ticks = [panel.x.infinite if math.isinf(value) else f"{value:g}" for value in values]
    axes.set_xticks([positions[value] for value in values], ticks)
    margin = 0.06 * (max(positions.values()) - min(positions.values())) or 0.5
    limits = (min(positions.values()) - margin, max(positions.values()) + margin)
    axes.set_xlim(limits if panel.x.scale == "strength" else limits[::-1])
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


def _power_of_ten(value: float) -> str:
    """Return a tick of a log axis, such as ``10⁻³``: Matplotlib's own is math, which is off."""
    return f"10{str(round(math.log10(value))).translate(_RAISED)}" if value > 0 else ""


def _in_percent(axis: Any, of: Axis) -> None:
    if of.percent:
        axis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    elif of.scale == "whole":
        axis.set_major_locator(MaxNLocator(integer=True))


def _bar(axes: Axes, panel: Panel, looks: Looks) -> None:
    """Draw bars or dots: series beside each other at each place, or one below the other."""
    if panel.sideways:
        _sideways(axes, panel, looks)
        return
    places = [*dict.fromkeys(row.x for row in panel.rows)]
    width = 0.84 / len(panel.series)
    for index, (name, rows) in enumerate(panel.series.items()):
        look, offset = looks[name], width * (index - (len(panel.series) - 1) / 2)
        x = [places.index(row.x) + offset for row in rows]
        values = [row.value for row in rows]
        if panel.dots:
            if panel.base is not None:
                axes.vlines(x, panel.base, values, color=look.colour, linewidth=2)
            axes.plot(
                x, values, color=look.colour, marker=look.marker, linestyle="none", markersize=7,
                label=name,
            )  # fmt: skip
        else:
            axes.bar(
                x, values, width=0.92 * width, color=look.colour, hatch=look.hatch,
                edgecolor="white", label=name, zorder=2,
            )  # fmt: skip
        low, high = zip(*(row.ends for row in rows), strict=True)
        axes.vlines(x, low, high, color=INK, linewidth=1.2)
        for place, row in zip(x, rows, strict=True):
            _annotate(axes, place, row, look, beside=panel.dots)
    for name, level in panel.levels.items():
        label = f"{name} {level:.3g}" if name else "_nolegend_"
        axes.axhline(level, color=GREY, linestyle=":", linewidth=1.2, zorder=1, label=label)
    for name, printed in panel.printed.items():
        for value in printed:
            axes.axhline(value, color=looks[name].colour, linestyle="--", linewidth=1.2, zorder=1)
    lines = [*panel.levels.values(), *(v for values in panel.printed.values() for v in values)]
    ends = [value for row in panel.rows for value in (row.ends[1], row.paper)]
    top = max(value for value in (*ends, *lines) if math.isfinite(value))
    if panel.from_zero:
        axes.set_ylim(0, 1.2 * top or 1.0)
    else:
        axes.margins(y=0.18)
    _in_percent(axes.yaxis, panel.y)
    _name_places(axes, places)
    axes.set_xlim(-0.6, len(places) - 0.4 + 0.2 * any(row.text for row in panel.rows))
    axes.grid(False, axis="x")
    if panel.second:
        _right_axis(axes, panel)


def _annotate(axes: Axes, x: float, row: Row, look: Style, *, beside: bool) -> None:
    """Draw what a publication prints as a hollow marker, and write the text of a row."""
    printed = math.isfinite(row.paper)
    if printed:
        axes.plot(x, row.paper, color=INK, marker=look.marker, markersize=8, markerfacecolor="none")
    if row.text:
        top = max([row.value, row.ends[1], *[row.paper] * printed])
        axes.annotate(
            row.text, (x, row.value if beside else top), (7.0, 0.0) if beside else (0.0, 6.0),
            textcoords="offset points", fontsize=SMALL, color=INK, bbox=_CARD,
            ha="left" if beside else "center", va="center" if beside else "bottom",
        )  # fmt: skip


def _name_places(axes: Axes, places: Sequence[Any]) -> None:
    """Write the names of places below an axis: wrapped if they are few, else upright if long."""
    count, names = len(places), [str(place) for place in places]
    if count <= 6:
        # Panels beside each other have half of the width.
        spec = axes.get_subplotspec()
        letters = max(8, 88 // count // (spec.get_gridspec().ncols if spec else 1))
        axes.set_xticks(range(count), ["\n".join(textwrap.wrap(name, letters)) for name in names])
        return
    step, size = (1, SMALL if count < 40 else 7) if count <= 100 else (-(-count // 50), 7)
    upright = max(map(len, names)) * count > 80
    axes.set_xticks(
        range(0, count, step), names[::step], rotation=90 if upright else 0, fontsize=size
    )


def _right_axis(axes: Axes, panel: Panel) -> None:
    second, values = axes.twinx(), [row.value for row in panel.second]
    name = f"{panel.second_label} (right)"
    second.plot(
        range(len(values)), values, "kD:", markersize=3.5, linewidth=1, markerfacecolor="white",
        label=name,
    )  # fmt: skip
    second.set_ylim(0, 1.15 * max(values) or 1.0)
    second.set_ylabel(panel.second[0].metric, fontsize=NORMAL)
    second.tick_params(labelsize=SMALL)
    second.spines["top"].set_visible(False)


def _sideways(axes: Axes, panel: Panel, looks: Looks) -> None:
    """Draw bars or dots from the left, each with the name of its series."""
    count = len(panel.rows)
    for y, row in zip(reversed(range(count)), panel.rows, strict=True):
        look = looks.get(row.series) or next(iter(looks.values()))
        value, (low, high) = float(np.nan_to_num(row.value)), np.nan_to_num(row.ends)
        if panel.dots:
            axes.hlines(y, panel.base or 0.0, value, color=look.colour, linewidth=1.0, alpha=0.5)
            axes.plot(value, y, "o", color=look.colour, markersize=5)
        else:
            axes.barh(
                y, value, height=0.7, color=look.colour, alpha=0.75, hatch=look.hatch,
                edgecolor="white",
            )  # fmt: skip
        axes.hlines(y, low, high, color=INK, linewidth=1.2)
        axes.annotate(
            row.text, (max(value, high), y), (4.0, 0.0), textcoords="offset points", fontsize=SMALL,
            color=INK, ha="left", va="center",
        )  # fmt: skip
    for level in panel.levels.values():
        axes.axvline(level, color=GREY, linestyle="--", linewidth=1.1)
    names = [row.series for row in reversed(panel.rows)]
    if panel.dots:
        names = [shorten(name, NAME_LETTERS) for name in names]
    else:
        names = ["\n".join(textwrap.wrap(name, NAME_LETTERS)) for name in names]
    axes.set_yticks(range(count), names, fontsize=SMALL)
    axes.set_ylim(-0.6, count - 0.4)
    most = max((row.ends[1] for row in panel.rows if math.isfinite(row.value)), default=1.0) or 1.0
    axes.set_xlim(0, 1.02 if panel.x.percent else 1.45 * most)
    _in_percent(axes.xaxis, panel.x)
    axes.grid(False, axis="y")


def _scatter(axes: Axes, panel: Panel, looks: Looks) -> None:
    """Draw rows over those of :attr:`Panel.second`, joined in their order."""
    x_of = {(row.series, row.x): row for row in panel.second}
    for name, rows in panel.series.items():
        look, across = looks[name], [x_of[row.series, row.x] for row in rows]
        x, y = [row.value for row in across], [row.value for row in rows]
        axes.plot(
            x, y, color=look.colour, linestyle=look.dash, marker=look.marker, linewidth=1.2,
            label=name,
        )  # fmt: skip
        axes.vlines(
            x, *zip(*(row.ends for row in rows), strict=True), color=look.colour, linewidth=1
        )
        axes.hlines(
            y, *zip(*(row.ends for row in across), strict=True), color=look.colour, linewidth=1
        )
    axes.margins(0.15)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    _in_percent(axes.yaxis, panel.y)


def _write_beside(axes: Axes, panel: Panel) -> None:
    """Write the text of each row beside its point, where no other text or point is."""
    x_of = {(row.series, row.x): row.value for row in panel.second}
    places = [(x_of[row.series, row.x], row.value) for row in panel.rows]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in axes.transData.transform(places)]
    for row, place in zip(panel.rows, places, strict=True):
        for dx, dy in _OFFSETS:
            text = axes.annotate(
                row.text, place, (dx, dy), textcoords="offset points", fontsize=SMALL, color=INK,
                ha="center" if dx == 0 else "left" if dx > 0 else "right", va="center",
            )  # fmt: skip
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()  # the line through the points tells their order


def _heatmap(axes: Axes, panel: Panel, _: Looks) -> None:
    """Draw a field of rows by ``x`` and ``y``; what is unknown is hatched. See :func:`_colour`."""
    across = [*dict.fromkeys(row.x for row in panel.rows)]
    up = [*dict.fromkeys(row.y for row in panel.rows)]
    axes.grid(False)
    axes.fill_between(
        [-0.5, len(across) - 0.5], -0.5, len(up) - 0.5, facecolor=EMPTY, edgecolor=GREY,
        hatch="////", linewidth=0, zorder=0,
    )  # fmt: skip
    for names, set_ticks, most in ((across, axes.set_xticks, 12), (up, axes.set_yticks, 24)):
        step = max(1, -(-len(names) // most))
        set_ticks(
            range(0, len(names), step),
            [shorten(str(name), CLASS_LETTERS) for name in names[::step]],
            fontsize=8.5,
        )
    if panel.square:
        axes.set_aspect("equal")
        axes.invert_yaxis()


def _field(panel: Panel) -> Any:
    """Return the values [y, x] of a heat map, NaN where there is none or it is 1 in any case."""
    by_y = grouped(panel.rows, lambda row: str(row.y))
    values = np.array([[row.value for row in rows] for rows in by_y.values()], dtype=np.float64)
    if panel.square and panel.unit:
        np.fill_diagonal(values, np.nan)
    return values


def _colour(
    figure: Figure, group: Sequence[tuple[Axes, Panel]], beside: Sequence[Axes] | None
) -> None:
    """Fill heat maps that have one colour scale, and draw its bar."""
    fields = [_field(panel) for _, panel in group]
    known = np.concatenate([values[np.isfinite(values)] for values in fields])
    limit = float(np.abs(known).max(initial=0.0)) or 1.0
    low, panel = -limit if (known < 0).any() else 0.0, group[0][1]
    colours = colormaps[panel.palette].resampled(_LEVELS)
    for (axes, each), values in zip(group, fields, strict=True):
        edges = [np.arange(count + 1) - 0.5 for count in values.shape]
        image = axes.pcolormesh(
            edges[1], edges[0], np.ma.masked_invalid(values), cmap=colours, vmin=low, vmax=limit,
            zorder=1,
        )  # fmt: skip
        if each.square and each.unit:
            diagonal = np.ma.masked_array(np.ones_like(values), ~np.eye(len(values), dtype=bool))
            axes.pcolormesh(edges[1], edges[0], diagonal, cmap=ListedColormap([EMPTY]), zorder=1)
    bar = figure.colorbar(image, ax=beside or [axes for axes, _ in group], fraction=0.05, pad=0.02)
    bar.set_label(panel.colours.label, fontsize=NORMAL)
    bar.ax.tick_params(labelsize=SMALL)
    _in_percent(bar.ax.yaxis, panel.colours)


_DRAW: dict[Mark, Callable[[Axes, Panel, Looks], None]] = {
    "line": _line,
    "bar": _bar,
    "scatter": _scatter,
    "heatmap": _heatmap,
}
