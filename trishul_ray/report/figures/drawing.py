"""Draw figures: of a sweep as SVG, PDF and CSV, of a run as PNG."""

import io
from pathlib import Path

from trishul_ray.report.figures.chart import Chart
from trishul_ray.report.figures.kind import FIGURES, select
from trishul_ray.report.figures.marks import draw_chart
from trishul_ray.report.figures.style import figure_style, to_svg
from trishul_ray.report.outcomes import DrawnFigure, FigureLayout, SweepOutcome

#: Dots per inch of PNG files.
DPI = 150


def draw(figure: FigureLayout, sweep: SweepOutcome) -> DrawnFigure | None:
    """Draw a figure from the finished cells; None if none of them has what it shows.

    The same outcomes give the same bytes, but for figures of measured seconds, whose SVG is marked
    with ``data-timed="true"``.

    Raises:
        InputError: As :func:`~trishul_ray.report.figures.kind.check_figure`.
    """
    selection = select(figure, sweep)
    kind = FIGURES[figure.kind]()
    chart = kind.chart(selection)
    if chart is None:
        return None
    note = selection.footnote(chart.remarks)
    description = " ".join([chart.describe(), *note])
    with figure_style():
        drawing = draw_chart(chart, note)
        name = f"{sweep.profile}-{sweep.name}-{figure.name}"
        svg = to_svg(drawing, name, figure.title, description, timed=kind.timed)
        pdf = io.BytesIO()
        drawing.savefig(pdf, format="pdf", metadata=dict.fromkeys(("CreationDate", "Producer")))
    return DrawnFigure(svg, pdf.getvalue(), chart.csv(sweep.profile), kind.timed)


def save_png(chart: Chart, path: Path | str, note: str = "") -> Path:
    """Draw the chart of a single run into a PNG file above ``note`` and its remarks.

    The folder is created; the same numbers give the same bytes.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with figure_style():
        drawing = draw_chart(chart, [*filter(None, [note]), *chart.remarks])
        # Software and its version are not part of the picture.
        drawing.savefig(target, dpi=DPI, format="png", metadata={"Software": None})
    return target
