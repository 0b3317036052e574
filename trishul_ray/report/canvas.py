"""Empty figures and how they are saved.

Figures are objects of their own, drawn by Agg: no pyplot, no display, no state between calls, so
they may be drawn from any thread.
"""

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 150
GREY = "#555555"


def new_figure(width: float, height: float) -> Figure:
    """A figure of that size in inches, without axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of that size in inches with one pair of axes."""
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    bare(axes)
    return figure, axes


def bare(axes: Axes) -> None:
    """Take off the frame's top and right."""
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, axes: Axes) -> None:
    """A legend under the axes, if there are several lines: in as many columns as there is room for.

    Widths are those of the letters as drawn.
    """
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=10 if len(labels) <= 9 else 8,
        )
        renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]  # of matplotlib
        width = legend.get_window_extent(renderer).width
        if width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def save(figure: Figure, path: Path | str, note: str | None = None) -> Path:
    """Write the figure as PNG, making its folder, with a note above it; returns the path."""
    if note:
        # About 14 letters of this size to an inch.
        lines = textwrap.wrap(note, int(14 * figure.get_figwidth()), break_long_words=True)
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=8, color=GREY)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # No software or date in the file: the same numbers give the same bytes.
    figure.savefig(target, dpi=DPI, format="png", metadata={"Software": None})
    return target
