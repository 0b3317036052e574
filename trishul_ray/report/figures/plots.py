"""Draw lines, bars, points and heat maps from a DataFrame into matplotlib axes.

Each row of the DataFrame is a number: its ``series``, position ``x`` (and ``y`` in a heat map),
``value``, interval from ``low`` to ``high``, and the ``paper``'s number. Only ``series``, ``x`` and
``value`` are required.
"""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

if TYPE_CHECKING:
    from pandas import DataFrame

INK, GRAY = "#222222", "#555555"
SMALL = 9
#: Color-blind safe palette of Okabe & Ito (2008), without yellow, which is too faint on white.
_COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F",
)  # fmt: skip
_DASHES = ("solid", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (1.5, 1.5)), (0, (3, 1)))
_MARKERS, _HATCHES = "os^DvPX<h", ("", "///", "...", "\\\\\\", "xx", "++", "--", "oo", "**")
#: Methods that have the same look in every figure.
_METHODS = (
    "TRISHUL", "RAVAN", "TRISHUL without penalty", "SCAFFOLD+LoRA", "FedIT", "FedEx-LoRA",
    "FFA-LoRA", "Fed-SB",
)  # fmt: skip
_HOLLOW: dict[str, Any] = {"linestyle": "none", "markersize": 8, "markerfacecolor": "none"}

#: Color, dash, marker and hatching of each series.
Looks = Mapping[str, dict[str, Any]]


def looks_of(names: Sequence[str]) -> Looks:
    """Assign a look to each name; looks also differ in grayscale."""
    slots: dict[int, str] = {}
    for name in names:
        if (method := name.partition(" (")[0]) in _METHODS:
            slots.setdefault(_METHODS.index(method), name)
    free = (slot for slot in itertools.count() if slot not in slots)
    for name in [name for name in names if name not in slots.values()]:
        slots[next(free)] = name
    return {
        name: {
            "color": _COLORS[slot % len(_COLORS)],
            "linestyle": _DASHES[slot % len(_DASHES)],
            "marker": _MARKERS[slot % len(_MARKERS)],
            "hatch": _HATCHES[slot % len(_HATCHES)],
        }
        for slot, name in slots.items()
    }


def _line_look(looks: Looks, name: object) -> dict[str, Any]:
    return {key: value for key, value in looks[str(name)].items() if key != "hatch"}


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
    """Draw a line with an interval per series, and hollow markers for the paper's numbers.

    Args:
        ax: Axes to draw into.
        points: Numbers, in the format of this module.
        looks: Looks, keyed by the names in the column ``by``.
        ranked: Whether to space x positions equally, as for 0, 0.1 and ∞.
        percent: Whether values are fractions.
        level: Value of a dotted horizontal line, or NaN for none.
        by: Column with the name of each line.
    """
    places = sorted(points["x"].unique())
    for name, line in points.groupby(by, observed=True, sort=False):
        look = _line_look(looks, name)
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
            ax.plot(x, line["paper"], **look | _HOLLOW)
    if math.isfinite(level):
        ax.axhline(level, color=GRAY, linestyle=":", linewidth=1.2, zorder=1)
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
    """Draw singular values over their index, on logarithmic axes."""
    lines(ax, points, looks, level=level, by=by)
    ax.set_xscale("log")
    ax.set_yscale("log" if log_y else "linear")
    # Smaller values are zero up to rounding in float32.
    ax.set_ylim(bottom=1e-6 * points["high"].max() if log_y else 0)
    for axis in (ax.xaxis, ax.yaxis) if log_y else (ax.xaxis,):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def bars(
    ax: Axes, points: "DataFrame", looks: Looks, *, dots: bool = False, percent: bool = False
) -> None:
    """Draw the series side by side at each position, as bars from 0 or as points."""
    places = [*dict.fromkeys(points["x"])]
    names = [*dict.fromkeys(points["series"])]
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        look, part = looks[str(name)], points[points["series"] == name]
        offset = width * (index - (len(names) - 1) / 2)
        x = [places.index(place) + offset for place in part["x"]]
        if dots:
            ax.plot(x, part["value"], label=name, **_line_look(looks, name) | {"linestyle": "none"})
        else:
            fill = {"color": look["color"], "hatch": look["hatch"], "edgecolor": "white"}
            ax.bar(x, part["value"], 0.92 * width, label=name, zorder=2, **fill)
        ax.vlines(x, part["low"], part["high"], color=INK, linewidth=1.2, zorder=3)
        if "paper" in part:
            ax.plot(x, part["paper"], color=INK, marker=look["marker"], zorder=3, **_HOLLOW)
        for place, text, top in zip(x, part.get("text", []), part["high"], strict=False):
            above: Any = {"textcoords": "offset points", "ha": "center", "fontsize": SMALL}
            ax.annotate(text, (place, top), (0, 4), **above)
    ax.margins(y=0.2)
    if not dots:
        ax.set_ylim(bottom=0)
    ax.set_xticks(range(len(places)), [textwrap.fill(str(place), 14) for place in places])
    if percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def scatter(ax: Axes, points: "DataFrame", looks: Looks, *, across: str, percent: bool) -> None:
    """Plot the other metric over the metric ``across``."""
    for number, (name, rows) in enumerate(points.groupby("series", observed=True, sort=False)):
        look = _line_look(looks, name)
        offset, side = ((5, 5), "left") if number % 2 == 0 else ((-5, -11), "right")
        x, y = rows[rows["metric"] == across], rows[rows["metric"] != across]
        ax.plot(x["value"], y["value"], label=name, linewidth=1.2, **look)
        ax.vlines(x["value"], y["low"], y["high"], color=look["color"], linewidth=1)
        ax.hlines(y["value"], x["low"], x["high"], color=look["color"], linewidth=1)
        for place, one, other in zip(x["x"], x["value"], y["value"], strict=True):
            text = f"{place:g}".replace("inf", "IID")
            style = {"fontsize": SMALL, "color": look["color"], "ha": side}
            ax.annotate(text, (one, other), offset, textcoords="offset points", **style)
    ax.margins(0.15)
    if percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def heatmap(ax: Axes, points: "DataFrame", looks: Looks, *, limit: float, label: str) -> None:
    """Draw a square matrix without its diagonal.

    Colors range from ``-limit`` to ``limit``, or from 0 if no value is negative.
    """
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
