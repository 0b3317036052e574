"""Draw a figure of a sweep as SVG and PDF, with its numbers as CSV."""

import io
import textwrap
import warnings
from typing import Any

import pandas as pd
from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from trishul_ray.report.figures.kinds import KINDS, Panel
from trishul_ray.report.figures.plots import GRAY, INK, SMALL, looks_of
from trishul_ray.report.figures.runs import select_runs
from trishul_ray.report.layouts import FigureLayout
from trishul_ray.report.outcomes import DrawnFigure, SweepOutcome

#: Width of every figure in inches, equal to the width of the page.
WIDTH = 10.0
_SETTINGS: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "svg.fonttype": "none",
    "svg.hashsalt": "trishul-ray",
    "text.parse_math": False,  # names may contain dollar signs
    "axes.formatter.useoffset": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    **dict.fromkeys(
        ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], INK
    ),
}
_COLUMNS = ["profile", "panel", "metric", "series", "x", "y", "value", "low", "high", "n", "paper"]


def draw(layout: FigureLayout, sweep: SweepOutcome) -> DrawnFigure | None:
    """Draw a figure from the finished runs, or return None if no run has its numbers.

    Output is deterministic: equal results produce equal bytes.
    """
    kind = KINDS[layout.kind]
    series, by = (
        next(((axis,) for axis in axes if axis in sweep.axes), ()) if chosen is None else chosen
        for axes, chosen in ((kind.series, layout.series), (kind.by, layout.panels))
    )
    runs = select_runs(layout, sweep, series, by)
    panels = [*kind.panels(runs)] if runs.cells else []
    if not panels:
        return None
    points = pd.concat(
        panel.points.assign(
            **{"metric": panel.metric} if "metric" not in panel.points else {},
            profile=sweep.profile,
            panel=panel.title,
        )
        for panel in panels
    )
    has_paper = "paper" in points and bool(points["paper"].notna().any())
    note = runs.note([*kind.note, *["hollow: the paper's numbers"] * has_paper])
    if missing := _missing_letters([*runs.names, *(panel.title for panel in panels)]):
        note.append(f"The PDF font lacks the characters {missing}; the SVG shows them.")
    with rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        rcdefaults()  # ignore the user's matplotlibrc
        rcParams.update(_SETTINGS)
        figure = _figure(panels, runs.names, kind.columns, note)
        pdf, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(pdf, format="pdf", metadata=dict.fromkeys(("CreationDate", "Producer")))
        figure.savefig(svg, format="svg", metadata={"Date": None})
    csv = str(points.to_csv(index=False, columns=[c for c in _COLUMNS if c in points]))
    return DrawnFigure(svg.getvalue(), pdf.getvalue(), csv, " ".join(note))


def _missing_letters(texts: list[str]) -> str:
    font = get_font(findfont("DejaVu Sans"))
    return "".join(c for c in sorted({*"".join(texts)}) if not font.get_char_index(ord(c)))


def _figure(panels: list[Panel], names: tuple[str, ...], columns: int, note: list[str]) -> Figure:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    text = [part for line in note for part in textwrap.wrap(line, int(13 * WIDTH))]
    size = (WIDTH, 3.4 * rows + 0.18 * len(text) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.supxlabel("\n".join(text), x=0.01, ha="left", fontsize=SMALL, color=GRAY)
    handles: dict[str, Any] = {}
    for number, panel in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, number)
        # Reversed: the last name, such as "after the prox", gets the look of the first series.
        panel.draw(ax, panel.points, looks_of(panel.looks[::-1] or names))
        ax.set_title("\n".join(textwrap.wrap(panel.title, 52)))
        ax.set_xlabel(panel.x)
        ax.set_ylabel(panel.metric)
        found, labels = ax.get_legend_handles_labels()
        if panel.looks:
            ax.legend()
        else:
            handles |= dict(zip(labels, found, strict=True))
    if handles:
        fits = int(WIDTH / (0.085 * max(map(len, handles)) + 0.6))
        figure.legend(
            [*handles.values()], [*handles], loc="outside upper center", ncols=max(1, min(5, fits))
        )
    return figure
