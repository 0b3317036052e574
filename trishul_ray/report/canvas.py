"""Empty figures and how they are saved.

Figures are objects of their own, drawn by Agg: no pyplot, no display, no state between calls, so
they may be drawn from any thread.
"""

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


def save(figure: Figure, path: Path | str) -> Path:
    """Write the figure as PNG, making its folder; returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # No software or date in the file: the same numbers give the same bytes.
    figure.savefig(target, dpi=DPI, format="png", metadata={"Software": None})
    return target
