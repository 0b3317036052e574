"""Draw a figure of a sweep as SVG and PDF, with its numbers as CSV."""

import io
import re
import textwrap
from typing import Any

import pandas as pd
from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trishul_ray.report.figures.kinds import KINDS, Panel
from trishul_ray.report.figures.plots import GREY, INK, SMALL, looks_of
from trishul_ray.report.figures.runs import FigureRuns, select_runs
from trishul_ray.report.layouts import FigureLayout
from trishul_ray.report.outcomes import DrawnFigure, SweepOutcome

#: Width of every figure in inches: that of the page.
WIDTH = 10.0
_SETTINGS: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may have dollar signs
    "axes.formatter.useoffset": False,
    # The page replaces this color in its dark mode.
    **dict.fromkeys(
        ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], INK
    ),
}
_COLUMNS = ["profile", "panel", "metric", "series", "x", "y", "value", "low", "high", "n", "paper"]


def draw(layout: FigureLayout, sweep: SweepOutcome) -> DrawnFigure | None:
    """Draw a figure from the finished runs; None if none of them has what it shows.

    The same results give the same bytes, except for figures of measured seconds.
    """
    kind = KINDS[layout.kind]
    default = [next(((axis,) for axis in axes if axis in sweep.axes), ())
               for axes in (kind.series, kind.by)]  # fmt: skip
    runs = select_runs(
        layout,
        sweep,
        default[0] if layout.series is None else layout.series,
        default[1] if layout.panels is None else layout.panels,
    )
    panels, remarks = kind.panels(runs) if runs.cells else ([], [])
    if not panels:
        return None
    if any("paper" in panel.points and panel.points["paper"].notna().any() for panel in panels):
        remarks.append("hollow: the paper's numbers")
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{sweep.profile}-{sweep.name}-{layout.name}")
    note = runs.note(remarks)
    with rc_context():
        rcdefaults()  # settings of a user's matplotlibrc do not count
        # With a salt, the ids of several figures on one page differ.
        rcParams.update(_SETTINGS | {"svg.hashsalt": name})
        figure = _figure(panels, runs, kind.columns, note)
        pdf, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(pdf, format="pdf", metadata=dict.fromkeys(("CreationDate", "Producer")))
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return DrawnFigure(svg.getvalue(), pdf.getvalue(), _csv(panels, sweep.profile), " ".join(note))


def _figure(panels: list[Panel], runs: FigureRuns, columns: int, note: list[str]) -> Figure:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    text = [part for line in note for part in textwrap.wrap(line, int(13 * WIDTH))]
    size = (WIDTH, 3.4 * rows + 0.18 * len(text) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.supxlabel("\n".join(text), x=0.01, ha="left", fontsize=SMALL, color=GREY)
    looks, handles = looks_of(runs.names), dict[str, Any]()
    for number, panel in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, number)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(visible=True, alpha=0.25)
        ax.set_axisbelow(True)
        # The last of the names of its own, such as after a step, looks like the first series.
        panel.draw(ax, panel.points, looks_of(panel.looks[::-1]) if panel.looks else looks)
        ax.set_title("\n".join(textwrap.wrap(panel.title, 52)), fontsize=10.5, loc="left")
        ax.set_xlabel(panel.x)
        ax.set_ylabel(panel.metric)
        other = None if panel.second is None else ax.twinx()
        if panel.second is not None and other is not None:
            other.plot(
                panel.second["x"], panel.second["value"], color=INK, marker="_", linestyle=":",
                markersize=12, label="squared norm",
            )  # fmt: skip
            other.set_ylabel("squared norm of the weights")
            other.set_ylim(bottom=0)
        if panel.looks:
            ax.legend(fontsize=SMALL, frameon=False)
        else:
            for axes in [ax, other] if other else [ax]:
                found = axes.get_legend_handles_labels()
                handles |= {label: handle for handle, label in zip(*found, strict=True)}
    if handles:
        longest = max(map(len, handles))
        figure.legend(
            [*handles.values()], [*handles], loc="outside upper center", frameon=False,
            fontsize=SMALL, ncols=max(1, min(5, int(WIDTH / (0.085 * longest + 0.6)))),
        )  # fmt: skip
    return figure


def _csv(panels: list[Panel], profile: str) -> str:
    """Return every number that is drawn, in long form."""
    parts = []
    for panel in panels:
        for points in (panel.points, panel.second):
            if points is not None:
                named = points if "metric" in points else points.assign(metric=panel.metric)
                parts.append(named.assign(profile=profile, panel=panel.title))
    frame = pd.concat(parts)
    return str(frame.to_csv(index=False, columns=[c for c in _COLUMNS if c in frame]))
