"""Lines, bars, points and heat maps of a DataFrame, drawn into given axes.

A row is a number: its ``series``, its place ``x`` (``y``, too, in a heat map), its ``value``, the
interval from ``low`` to ``high``, and a number of the ``paper``. All but the first three may be
missing.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

if TYPE_CHECKING:
    from pandas import DataFrame

INK, GREY = "#222222", "#555555"
SMALL = 9
#: Okabe & Ito (2008), safe for color-blind readers; without yellow, too faint on white.
_COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F",
)  # fmt: skip
_DASHES = ("solid", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (1.5, 1.5)), (0, (3, 1)))
_MARKERS, _HATCHES = "os^DvPX<h", ("", "///", "...", "\\\\\\", "xx", "++", "--", "oo", "**")
#: Methods that look the same in every figure.
_METHODS = (
    "TRISHUL", "RAVAN", "TRISHUL without penalty", "SCAFFOLD+LoRA", "FedIT", "FedEx-LoRA",
    "FFA-LoRA", "Fed-SB",
)  # fmt: skip

#: Color, dash, marker and hatching of each series.
Looks = Mapping[str, dict[str, Any]]


def looks_of(names: Sequence[str]) -> Looks:
    """Return a look for each name; two of them also differ without color."""
    slots: dict[str, int] = {}
    for name in names:
        method = name.partition(" (")[0]
        if method in _METHODS and _METHODS.index(method) not in slots.values():
            slots[name] = _METHODS.index(method)
    free = iter(i for i in range(len(_METHODS) + len(names)) if i not in {*slots.values()})
    slots |= {name: next(free) for name in names if name not in slots}
    return {
        name: {
            "color": _COLORS[slot % len(_COLORS)],
            "linestyle": _DASHES[slot % len(_DASHES)],
            "marker": _MARKERS[slot % len(_MARKERS)],
            "hatch": _HATCHES[slot % len(_HATCHES)],
        }
        for name, slot in slots.items()
    }


def lines(
    ax: Axes,
    points: "DataFrame",
    looks: Looks,
    *,
    ranked: bool = False,
    percent: bool = False,
    level: float = math.nan,
    by: str = "series",
) -> None:
    """Draw a line with its interval for each series, hollow points for the paper's numbers.

    Args:
        ax: Where to draw.
        points: See the module.
        looks: By the names in the column ``by``.
        ranked: Whether the few places on the x axis are equally far apart, such as 0, 0.1 and ∞.
        percent: Whether values are fractions.
        level: A dotted line.
        by: The column of the names.
    """
    places = sorted(points["x"].unique())
    for name, line in points.groupby(by, observed=True, sort=False):
        look = {key: value for key, value in looks[str(name)].items() if key != "hatch"}
        x = [places.index(place) for place in line["x"]] if ranked else line["x"]
        every = max(1, len(line) // 10)
        ax.plot(x, line["value"], label=name, markersize=4, markevery=every, **look)
        if ranked:
            ax.vlines(x, line["low"], line["high"], color=look["color"], linewidth=1.2)
        else:
            ax.fill_between(
                x, line["low"], line["high"], color=look["color"], alpha=0.15, linewidth=0
            )
        if "paper" in line and line["paper"].notna().any():
            hollow = {"linestyle": "none", "markersize": 8, "markerfacecolor": "none"}
            ax.plot(x, line["paper"], **look | hollow)
    if math.isfinite(level):
        ax.axhline(level, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    if ranked:
        ax.set_xticks(range(len(places)), [f"{p:g}".replace("inf", "∞") for p in places])
    elif all(float(place).is_integer() for place in places):
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    if percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def spectra(
    ax: Axes, points: "DataFrame", looks: Looks, *, level: float = math.nan, by: str = "series",
    log_y: bool = True,
) -> None:  # fmt: skip
    """Draw singular values by their index, on logarithmic axes."""
    lines(ax, points, looks, level=level, by=by)
    ax.set_xscale("log")
    axes: list[Axis] = [ax.xaxis]
    if log_y:
        ax.set_yscale("log")
        axes.append(ax.yaxis)
    # Smaller values are zero, but for rounding in float32.
    ax.set_ylim(bottom=1e-6 * points["high"].max() if log_y else 0)
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def bars(
    ax: Axes, points: "DataFrame", looks: Looks, *, dots: bool = False, percent: bool = False
) -> None:
    """Draw the series next to each other at each place, as bars from 0 or as points."""
    places = [*dict.fromkeys(points["x"])]
    names = [*dict.fromkeys(points["series"])]
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        look, part = looks[str(name)], points[points["series"] == name]
        offset = width * (index - (len(names) - 1) / 2)
        x = [places.index(place) + offset for place in part["x"]]
        if dots:
            style = {"linestyle": "none", "marker": look["marker"], "markersize": 7}
            ax.plot(x, part["value"], color=look["color"], label=name, **style)
        else:
            fill = {"color": look["color"], "hatch": look["hatch"], "edgecolor": "white"}
            ax.bar(x, part["value"], 0.92 * width, label=name, zorder=2, **fill)
        ax.vlines(x, part["low"], part["high"], color=INK, linewidth=1.2, zorder=3)
        if "paper" in part:
            ax.plot(
                x, part["paper"], color=INK, linestyle="none", marker=look["marker"],
                markersize=8, markerfacecolor="none", zorder=3,
            )  # fmt: skip
        if "text" in part:
            for place, text, top in zip(x, part["text"], part["high"], strict=True):
                ax.annotate(
                    text, (place, top), (0, 4), textcoords="offset points", ha="center",
                    fontsize=SMALL, color=INK,
                )  # fmt: skip
    ax.margins(y=0.2)
    if not dots:
        ax.set_ylim(bottom=0)
    ax.set_xticks(range(len(places)), [textwrap.fill(str(place), 14) for place in places])
    if percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def scatter(ax: Axes, points: "DataFrame", looks: Looks, *, across: str, percent: bool) -> None:
    """Draw the rows whose ``metric`` is not ``across`` over the rows whose metric is."""
    for number, (name, rows) in enumerate(points.groupby("series", observed=True, sort=False)):
        look = {key: value for key, value in looks[str(name)].items() if key != "hatch"}
        offset, side = ((5, 5), "left") if number % 2 == 0 else ((-5, -11), "right")
        x, y = rows[rows["metric"] == across], rows[rows["metric"] != across]
        ax.plot(x["value"], y["value"], label=name, linewidth=1.2, **look)
        ax.vlines(x["value"], y["low"], y["high"], color=look["color"], linewidth=1)
        ax.hlines(y["value"], x["low"], x["high"], color=look["color"], linewidth=1)
        for place, one, other in zip(x["x"], x["value"], y["value"], strict=True):
            text = f"{place:g}".replace("inf", "IID")
            ax.annotate(
                text, (one, other), offset, textcoords="offset points", ha=side, fontsize=SMALL,
                color=look["color"],
            )  # fmt: skip
    ax.margins(0.15)
    if percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def heatmap(ax: Axes, points: "DataFrame", looks: Looks, *, limit: float, label: str) -> None:
    """Draw a square matrix without its diagonal, on colors from ``-limit`` to ``limit``."""
    values = points.pivot(index="y", columns="x", values="value")
    field = values.to_numpy(dtype=float, copy=True)
    np.fill_diagonal(field, math.nan)
    low = -limit if np.nanmin(field, initial=0.0) < 0 else 0.0
    image = ax.pcolormesh(np.ma.masked_invalid(field), cmap="cividis", vmin=low, vmax=limit)
    ax.set_facecolor("#cccccc")
    ax.grid(False)
    step = -(-len(values) // 10)
    places, names = np.arange(len(values))[::step] + 0.5, values.columns[::step]
    ax.set_xticks(places, names)
    ax.set_yticks(places, names)
    ax.set_aspect("equal")
    ax.invert_yaxis()
    figure = ax.get_figure()
    assert figure is not None
    figure.colorbar(image, ax=ax, label=label, fraction=0.05, pad=0.02)
