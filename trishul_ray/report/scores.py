"""Scores by name as a PNG file: the recall of every class, the metric of every client."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.ticker import PercentFormatter

from trishul_ray.report.figures import COLOURS, GREY, new_axes, save_figure, shorten

#: With more names, a line of the sorted scores is drawn, without names.
MAX_NAMES = 40
#: Letters of a name that are shown.
NAME_LETTERS = 24


def scores_by_name(
    scores: Mapping[str, float | None],
    path: Path | str,
    *,
    what: str,
    metric: str,
    note: str | None = None,
) -> Path:
    """Draw a score in [0, 1] by name, the lowest first, and their mean; return ``path``.

    Args:
        scores: By name; None where there are no rows, which are left out.
        path: The file to write.
        what: What has a name: ``class``, ``client``.
        metric: What the score is called.
        note: A line above the figure.
    """
    known = sorted((value, name) for name, value in scores.items() if value is not None)
    values = np.array([value for value, _ in known])
    names = len(known) <= MAX_NAMES
    figure, axes = new_axes(6.0, max(2.4, 1.2 + 0.2 * len(known)) if names else 3.6)
    if names:
        rows = np.arange(len(known))
        axes.hlines(rows, 0, values, color=COLOURS[0], linewidth=1.0, alpha=0.5)
        axes.plot(values, rows, "o", color=COLOURS[0], markersize=5)
        axes.set_yticks(rows, [shorten(name, NAME_LETTERS) for _, name in known], fontsize=8)
        axes.invert_yaxis()
    else:
        axes.plot(values, np.arange(len(known)), color=COLOURS[0], linewidth=1.6)
        axes.set_ylabel(f"{what}, sorted")
    mean = float(values.mean())
    axes.axvline(mean, color=GREY, linestyle="--", linewidth=1.1)
    axes.set_title(f"by {what}: {len(known)}, mean {mean:.1%} (dashed)", fontsize=10)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.set_xlabel(metric)
    axes.grid(True, axis="x", alpha=0.25)
    return save_figure(figure, path, note)
