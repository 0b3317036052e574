"""The look of all figures, and the SVG text that they become.

Series differ in marker, dash or hatching as well as in colour, for colour-blind readers, and lines
carry their names. The background is a white card, so that a figure is readable on any page.
"""

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GREY = "#222222", "#555555"
#: Where a heat map has no value.
EMPTY = "#cccccc"
#: Okabe & Ito (2008), safe for colour-blind readers; without yellow, too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Sizes of type, in points, at :data:`WIDTH` inches.
NORMAL, SMALL = 10.5, 9.5
#: Width of every figure, in inches: that of the page.
WIDTH = 10.0
#: Methods that look the same in every figure, also with more in parentheses behind their names.
_FIXED = (
    "TRISHUL", "RAVAN", "TRISHUL without penalty", "SCAFFOLD+LoRA", "FedIT", "FedEx-LoRA",
    "FFA-LoRA", "Fed-SB",
)  # fmt: skip
_COLOURS = (*COLOURS, "#7F7F7F")
_DASHES = ("solid", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (1.5, 1.5)), (0, (3, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "h")
_HATCHES = ("", "///", "...", "\\\\\\", "xx", "++", "--", "oo", "**")
_LINE_HEIGHT = 12.5  # of a direct label, in points
#: Labels that Matplotlib gives to artists without one.
_UNNAMED = re.compile(r"|_nolegend_|_(child|container)\d+")
#: Verdana has the widths of DejaVu Sans, with which the figure is laid out.
_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "trishul-ray",
    "text.parse_math": False,  # a name may have dollar signs
}


@dataclass(frozen=True)
class Style:
    """Style of one series."""

    colour: str
    dash: str | tuple[float, tuple[float, ...]]
    marker: str
    hatch: str


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """Return a style for each name; those of different names differ without colour, too."""
    slots = {name: _FIXED.index(name) for name in names if name in _FIXED}
    for name in names:
        method = name.partition(" (")[0]
        if method in _FIXED and _FIXED.index(method) not in slots.values():
            slots.setdefault(name, _FIXED.index(method))
    free = iter(i for i in range(len(_FIXED) + len(names)) if i not in {*slots.values()})
    slots |= {name: next(free) for name in names if name not in slots}
    return {
        name: Style(
            _COLOURS[slot % len(_COLOURS)],
            _DASHES[slot % len(_DASHES)],
            _MARKERS[slot % len(_MARKERS)],
            _HATCHES[slot % len(_HATCHES)],
        )
        for name, slot in slots.items()
    }


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw and write figures within this context; global settings are untouched.

    Settings of a ``matplotlibrc``, such as ``text.usetex``, do not count.
    """
    with rc_context():
        rcdefaults()
        rcParams.update(_SETTINGS)
        yield


def new_panels(
    count: int, note: Sequence[str], *, columns: int = 2, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels, ``height`` inches each, with a note below."""
    columns = min(columns, count)
    rows = -(-count // columns)
    lines = [part for line in note for part in textwrap.wrap(line, int(13 * WIDTH))]
    size = (WIDTH, rows * height + 0.18 * len(lines) + 0.1)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=SMALL, color=GREY)
    panels = []
    for index in range(count):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, alpha=0.25)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=SMALL)
        panels.append(axes)
    return figure, panels


def shorten(name: str, letters: int) -> str:
    """Return a name of at most so many letters; the end of a longer one becomes an ellipsis."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def set_labels(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Write the title of a panel and of its axes."""
    # From the left edge: beside it there may be no room, on the right are the names of lines.
    axes.set_title("\n".join(textwrap.wrap(title, 52)), fontsize=NORMAL, x=0.0, ha="left")
    axes.set_xlabel(x_label, fontsize=NORMAL)
    axes.set_ylabel(y_label, fontsize=NORMAL)


def label_ends(figure: Figure, ends: dict[Axes, list[tuple[str, float, float, str]]]) -> None:
    """Write the names of lines to the right of their ends, moved apart where they overlap.

    ``ends`` are name, x, y and colour of each line, by panel. Limits must be fixed before.
    """
    texts = {
        axes: [
            axes.annotate(
                name, (x, y), (1.03, 0.5), textcoords="axes fraction", va="center", fontsize=SMALL,
                color=INK, annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-", "color": colour, "linewidth": 0.9, "shrinkA": 1,
                    "shrinkB": 3, "relpos": (0, 0.5),
                },
            )
            for name, x, y, colour in lines
        ]
        for axes, lines in ends.items()
    }  # fmt: skip
    figure.draw_without_rendering()  # places the panels, for good
    figure.set_layout_engine("none")
    for axes, labels in texts.items():
        height = axes.bbox.height
        wanted = [axes.transData.transform(label.xy)[1] - axes.bbox.y0 for label in labels]
        step = min(_LINE_HEIGHT * figure.dpi / 72, height / max(len(labels), 1))
        for label, y in zip(labels, spread_out(wanted, step, height), strict=True):
            label.set_position((1.03, y / height))


def spread_out(wanted: Sequence[float], step: float, height: float) -> list[float]:
    """Move positions up and down until neighbours are ``step`` apart, within [0, height]."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Each cluster of touching labels is centred on the mean of its wanted positions.
    clusters: list[list[int]] = []
    starts: list[float] = []
    for index in order:
        clusters.append([index])
        starts.append(wanted[index])
        while True:
            size = len(clusters[-1])
            mean = sum(wanted[i] for i in clusters[-1]) / size
            start = mean - step * (size - 1) / 2
            starts[-1] = max(0.0, min(start, height - step * (size - 1)))
            above = len(clusters) < 2 or starts[-2] + step * len(clusters[-2]) <= starts[-1]
            if above:
                break
            last = clusters.pop()
            starts.pop()
            clusters[-1] += last
    placed = [0.0] * len(wanted)
    for start, cluster in zip(starts, clusters, strict=True):
        for position, index in enumerate(cluster):
            placed[index] = start + step * position
    return placed


def legend_above(figure: Figure) -> None:
    """Name each series once, above the panels."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        drawn: list[Any] = [*axes.lines, *axes.containers, *axes.collections]
        for artist in drawn:
            # Not by get_legend_handles_labels, which leaves out a series named "_x".
            if not _UNNAMED.fullmatch(label := str(artist.get_label())):
                found.setdefault(label, artist)
    # At this size a letter is about 0.085 inches wide, and a sample 0.6.
    widest = max(0.085 * len(name) + 0.6 for name in found) if found else 1.0
    columns = max(1, min(4, int(figure.get_figwidth() / widest)))
    figure.legend(
        list(found.values()), list(found), loc="outside upper center", ncols=columns,
        frameon=False, fontsize=SMALL,
    )  # fmt: skip


def to_svg(figure: Figure, name: str, title: str, description: str, *, timed: bool) -> str:
    """Return a figure as an ``<svg>`` element, which may stand alone or inside a page.

    The same numbers give the same text. Ids begin with ``name``, so that several figures fit into
    one page. ``timed`` marks a figure that shows measured seconds by ``data-timed="true"``.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    prefix = re.sub(r"[^A-Za-z0-9_-]+", "-", name)
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    head, body = text.split(">", 1)
    body = body.replace('<style type="text/css">*{', f'<style type="text/css">#{prefix} *{{')
    attributes = f' id="{prefix}" role="img" aria-labelledby="{prefix}-title {prefix}-desc"'
    attributes += ' data-timed="true"' * timed
    return (
        f'{head}{attributes}>\n <title id="{prefix}-title">{escape(title)}</title>\n'
        f' <desc id="{prefix}-desc">{escape(description)}</desc>{body}'
    )
