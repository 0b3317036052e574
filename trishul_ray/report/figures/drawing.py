"""Draw figures: of a sweep as SVG, PDF and CSV, of a run as PNG."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from matplotlib.figure import Figure

from trishul_ray.report.figures import AXES, KINDS, check_figure
from trishul_ray.report.figures.costs import cost_to_target, draw_targets, metric_over_cost
from trishul_ray.report.figures.curves import (
    accuracy_and_entropy,
    accuracy_over_field,
    alignment_and_entropy,
    convergence,
    draw_curves,
    personal_gain,
    spectral_alignment,
    spectral_diagnostics,
)
from trishul_ray.report.figures.heads import (
    draw_bars,
    draw_layerwise,
    draw_rounds,
    heads_by_round,
    heads_by_series,
)
from trishul_ray.report.figures.matrices import draw_matrices, matrices_by_series
from trishul_ray.report.figures.overhead import draw_overhead, overhead
from trishul_ray.report.figures.scatter import accuracy_inconsistency, draw_scatter
from trishul_ray.report.figures.selection import Selection
from trishul_ray.report.figures.spectra import draw_spectra, svt_spectra
from trishul_ray.report.figures.style import figure_style, to_svg
from trishul_ray.report.formats import csv_text
from trishul_ray.report.outcomes import DrawnFigure, FigureLayout, Row, SweepOutcome

#: Dots per inch of PNG files.
DPI = 150


class FigureData(Protocol):
    """Content of a figure: numbers, and remarks for the note below it."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines for the note."""

    def describe(self) -> str:
        """Return the main numbers in words."""

    def rows(self) -> list[Row]:
        """Return everything that is drawn, in long format: columns of a CSV file by name."""


class Artist(NamedTuple):
    """Maker of a kind of figure: its data from cells, and its drawing above a note.

    There is no data where no finished cell has what the kind shows.
    """

    collect: Callable[[Selection], FigureData | None]
    draw: Callable[[Any, Sequence[str]], Figure]


#: Makers of :data:`~trishul_ray.report.figures.KINDS`.
ARTISTS = {
    "convergence": Artist(convergence, draw_curves),
    "overhead": Artist(overhead, draw_overhead),
    "svt_spectra": Artist(svt_spectra, draw_spectra),
    "spectral_alignment": Artist(spectral_alignment, draw_curves),
    "spectral_diagnostics": Artist(spectral_diagnostics, draw_curves),
    "lambda_accuracy": Artist(accuracy_over_field, draw_curves),
    "lambda_diagnostics": Artist(accuracy_and_entropy, draw_curves),
    "heterogeneity": Artist(accuracy_over_field, draw_curves),
    "accuracy_inconsistency": Artist(accuracy_inconsistency, draw_scatter),
    "alpha_diagnostics": Artist(alignment_and_entropy, draw_curves),
    "waterfilling": Artist(heads_by_series, draw_bars),
    "waterfilling_layerwise": Artist(heads_by_series, draw_layerwise),
    "heads": Artist(heads_by_round, draw_rounds),
    "cost": Artist(metric_over_cost, draw_curves),
    "cost_to_target": Artist(cost_to_target, draw_targets),
    "privacy": Artist(accuracy_over_field, draw_curves),
    "personal": Artist(personal_gain, draw_curves),
    "covariance": Artist(matrices_by_series, draw_matrices),
}
#: Kinds that show measured seconds, so that a repetition differs.
TIMED = frozenset({"overhead"})


def draw(figure: FigureLayout, sweep: SweepOutcome) -> DrawnFigure | None:
    """Draw a figure from the finished cells; None if none of them has what it shows.

    The same outcomes give the same bytes, but for figures of measured seconds, whose SVG is marked
    with ``data-timed="true"``.

    Raises:
        InputError: As :func:`~trishul_ray.report.figures.check_figure`.
    """
    selection, artist = select(figure, sweep), ARTISTS[figure.kind]
    data = artist.collect(selection)
    if data is None:
        return None
    note = selection.footnote(data.remarks)
    description = " ".join([data.describe(), *note])
    with figure_style():
        drawing = artist.draw(data, note)
        name = f"{sweep.profile}-{sweep.name}-{figure.name}"
        timed = figure.kind in TIMED
        svg = to_svg(drawing, name, figure.title, description, timed=timed)
        pdf = io.BytesIO()
        drawing.savefig(pdf, format="pdf", metadata=dict.fromkeys(("CreationDate", "Producer")))
    return DrawnFigure(svg, pdf.getvalue(), _to_csv(data, sweep.profile), timed)


def select(figure: FigureLayout, sweep: SweepOutcome) -> Selection:
    """Return the cells and options of a figure. Raises as :func:`draw`."""
    check_figure(figure, tuple(sweep.axes))
    options = dict(KINDS[figure.kind])
    for name in options.keys() & AXES:
        options[name] = next((axis for axis in options[name] if axis in sweep.axes), None)
    return Selection(figure, sweep, options | dict(figure.options))


def _to_csv(data: FigureData, profile: str) -> str:
    """Return the rows of a figure, each with the profile; an unknown number is empty."""
    rows = [{"profile": profile, **row} for row in data.rows()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = [[row.get(name, "") for name in names] for row in rows]
    return csv_text([names, *(["" if v != v else v for v in line] for line in values)])


Data = TypeVar("Data", bound=FigureData)


def save_png(
    draw: Callable[[Data, Sequence[str]], Figure], data: Data, path: Path | str, note: str = ""
) -> Path:
    """Draw the data of a single run into a PNG file above ``note`` and its remarks.

    The folder is created; the same numbers give the same bytes.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with figure_style():
        drawing = draw(data, [*filter(None, [note]), *data.remarks])
        # Software and its version are not part of the picture.
        drawing.savefig(target, dpi=DPI, format="png", metadata={"Software": None})
    return target
