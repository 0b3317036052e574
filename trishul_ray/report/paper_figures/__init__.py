"""The figures of the paper from the cells of a sweep, as SVG, PDF and CSV.

A figure's ``kind`` names one of :data:`KINDS`: a function that collects what is drawn from the
cells, and one that draws it. Both work with whatever cells are finished; the note below a figure
says what is missing. A new kind is an entry of :data:`KINDS`.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from matplotlib.figure import Figure

from trishul_ray.errors import InputError
from trishul_ray.report.outcomes import DrawnFigure, FigureLayout, SweepOutcome
from trishul_ray.report.paper_figures.allocation import allocation, draw_bars, draw_layerwise
from trishul_ray.report.paper_figures.covariance import MATRICES, covariance, draw_covariance
from trishul_ray.report.paper_figures.lines import (
    SUBJECTS,
    accuracy_and_entropy,
    accuracy_over_field,
    alignment_and_entropy,
    convergence,
    draw_lines,
    spectral_alignment,
    spectral_diagnostics,
)
from trishul_ray.report.paper_figures.overhead import draw_overhead, overhead
from trishul_ray.report.paper_figures.scatter import accuracy_inconsistency, draw_scatter
from trishul_ray.report.paper_figures.selection import Selection
from trishul_ray.report.paper_figures.spectra import draw_spectra, svt_spectra
from trishul_ray.report.paper_figures.style import figure_style, to_svg


class FigureData(Protocol):
    """What a figure shows: numbers, and remarks for the note below it."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines for the note."""

    def describe(self) -> str:
        """Return the main numbers in words."""

    def rows(self) -> list[dict[str, Any]]:
        """Return everything that is drawn, in long format: columns of a CSV file by name."""


@dataclass(frozen=True)
class Kind:
    """A kind of figure.

    Attributes:
        collect: Returns the data, None if there is nothing to draw.
        draw: Draws the data above a note.
        options: Options with their defaults. Those of :data:`AXES` name an axis of the sweep or a
            list of axes; their default is the first of these that the sweep has, or none.
        timed: Whether it shows measured seconds, so that a repetition differs.
    """

    collect: Callable[[Selection], Any]
    draw: Callable[[Any, Sequence[str]], Figure]
    options: Mapping[str, Any]
    timed: bool = False


#: Options whose values are axes.
AXES = frozenset({"series", "panels", "groups"})
_BOTH = tuple(SUBJECTS)
_LAMBDA, _ALPHA = {"x": "method.lam"}, {"x": "partition.alpha"}
_LATE = {"of": _BOTH, "last": 10}
_BY_METHOD, _BY_DATASET = {"series": ("method",)}, {"panels": ("dataset",)}
_ONE_SERIES: dict[str, Any] = {"series": ()}
_BY_ALLOCATION = {"series": ("allocation", "method")}

#: Drawing functions and options by kind.
KINDS: dict[str, Kind] = {
    "convergence": Kind(convergence, draw_lines, _BY_METHOD | _BY_DATASET),
    "overhead": Kind(
        overhead, draw_overhead, _BY_METHOD | {"groups": ("model", "dataset")}, timed=True
    ),
    "svt_spectra": Kind(svt_spectra, draw_spectra, _BY_METHOD | {"prox": None}),
    "spectral_alignment": Kind(spectral_alignment, draw_lines, _BY_METHOD | {"of": _BOTH}),
    "spectral_diagnostics": Kind(spectral_diagnostics, draw_lines, _BY_METHOD | {"of": _BOTH}),
    "lambda_accuracy": Kind(accuracy_over_field, draw_lines, _ONE_SERIES | _BY_DATASET | _LAMBDA),
    "lambda_diagnostics": Kind(accuracy_and_entropy, draw_lines, _ONE_SERIES | _LAMBDA | _LATE),
    "heterogeneity": Kind(accuracy_over_field, draw_lines, _BY_METHOD | _BY_DATASET | _ALPHA),
    "accuracy_inconsistency": Kind(
        accuracy_inconsistency, draw_scatter, _BY_METHOD | _ALPHA | _LATE
    ),
    "alpha_diagnostics": Kind(alignment_and_entropy, draw_lines, _BY_METHOD | _ALPHA | _LATE),
    "waterfilling": Kind(allocation, draw_bars, _BY_ALLOCATION),
    "waterfilling_layerwise": Kind(allocation, draw_layerwise, _BY_ALLOCATION),
    "covariance": Kind(covariance, draw_covariance, _BY_METHOD | {"matrix": "cosine"}),
}


def draw(figure: FigureLayout, sweep: SweepOutcome) -> DrawnFigure | None:
    """Draw a figure from the finished cells.

    Returns:
        The figure; None if no finished cell has what it shows. The same outcomes give the same
        bytes, but for figures of measured seconds, whose SVG is marked with ``data-timed="true"``.

    Raises:
        InputError: The kind or an option is not valid, as in :func:`check_figure`.
    """
    selection, kind = select(figure, sweep), KINDS[figure.kind]
    data = kind.collect(selection)
    if data is None:
        return None
    note = selection.footnote(data.remarks)
    description = " ".join([data.describe(), *note])
    with figure_style():
        drawing = kind.draw(data, note)
        name = f"{sweep.profile}-{sweep.name}-{figure.name}"
        svg = to_svg(drawing, name, figure.title, description, timed=kind.timed)
        pdf = io.BytesIO()
        drawing.savefig(pdf, format="pdf", metadata=dict.fromkeys(("CreationDate", "Producer")))
    return DrawnFigure(svg, pdf.getvalue(), _to_csv(data, sweep.profile))


def _to_csv(data: FigureData, profile: str) -> str:
    """Return the rows of a figure, each with the profile; an unknown number is empty."""
    rows = [{"profile": profile, **row} for row in data.rows()]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(n for row in rows for n in row)))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value != value else value for name, value in row.items()})
    return file.getvalue().replace("\r\n", "\n")


def data_of(figure: FigureLayout, sweep: SweepOutcome) -> FigureData | None:
    """Return the numbers that a figure shows; None if there are none. Raises as :func:`draw`."""
    data: FigureData | None = KINDS[figure.kind].collect(select(figure, sweep))
    return data


def select(figure: FigureLayout, sweep: SweepOutcome) -> Selection:
    """Return the cells and options of a figure. Raises as :func:`draw`."""
    check_figure(figure, tuple(sweep.axes))
    options = dict(KINDS[figure.kind].options)
    for name in options.keys() & AXES:
        options[name] = next((axis for axis in options[name] if axis in sweep.axes), None)
    return Selection(figure, sweep, options | dict(figure.options))


def check_figure(figure: FigureLayout, axes: tuple[str, ...]) -> None:
    """Check kind and options of a figure, for a sweep with these axes.

    Raises:
        InputError: The kind is unknown, or an option is unknown or has a value that is not allowed.
    """
    where = f"figure {figure.name!r}"
    if figure.kind not in KINDS:
        raise InputError(f"{where}: kind {figure.kind!r} is none of {', '.join(KINDS)}")
    known = KINDS[figure.kind].options
    for name, value in figure.options.items():
        if name not in known:
            raise InputError(
                f"{where}: option {name!r} is none of those of {figure.kind}: {', '.join(known)}"
            )
        if problem := _problem(name, value, axes):
            raise InputError(f"{where}: option {name}={value!r} {problem}")


def _problem(name: str, value: Any, axes: tuple[str, ...]) -> str | None:
    """Return what is wrong with the value of an option; None if nothing is."""
    if name in AXES:
        several = [value] if isinstance(value, str) else value
        fits = several is None or (isinstance(several, list | tuple) and {*several} <= {*axes})
        return None if fits else f"must be null, an axis or a list of axes: {', '.join(axes)}"
    if name == "of":
        fits = isinstance(value, list | tuple) and len(value) > 0 and {*value} <= {*SUBJECTS}
        return None if fits else f"must be a list of {' and '.join(SUBJECTS)}"
    if name == "last":
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if fits else "must be a number of rounds, at least 1"
    if name == "matrix":
        return None if value in MATRICES else f"must be one of {', '.join(MATRICES)}"
    return None if isinstance(value, str) else "must be text"
