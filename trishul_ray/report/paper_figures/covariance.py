"""The figure of the covariance of the clients' updates, by series, on one colour scale."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray

from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.selection import Selection
from trishul_ray.report.paper_figures.style import new_panels, set_labels
from trishul_ray.report.uploads import mean_over_rounds

#: So few levels that a colour bar is drawn as vectors; the middle one is zero.
_COLOURS = colormaps["cividis"].resampled(47)
#: Matrices of two clients each (option ``matrix``), with their titles.
MATRICES = {
    "covariance": "covariance of updates",
    "inner_products": "inner products of updates",
    "cosine": "cosine of updates",
    "principal_angle_similarity": "principal-angle similarity of updates",
}


@dataclass(frozen=True)
class CovarianceData:
    """The content of the figure: clients and matrix [C, C] by series, NaN for unknown pairs."""

    title: str
    matrices: tuple[tuple[str, NDArray[np.int64], NDArray[np.float64]], ...]
    remarks: tuple[str, ...]

    def describe(self) -> str:
        """Return the mean of each diagonal, and of what is off it, in words."""
        parts = [
            f"{name}: mean {np.nanmean(np.diag(matrix)):.3g} on the diagonal, "
            f"{_off_diagonal(matrix):.3g} off it"
            for name, _, matrix in self.matrices
        ]
        return f"{self.title}. {'; '.join(parts)}."


def covariance(selection: Selection) -> CovarianceData | None:
    """Collect the mean matrix over rounds of the one run that most series have finished.

    Clients of another seed hold other data, so matrices are not averaged over runs.
    """
    series, kind = selection.axes("series"), selection.options["matrix"]
    groups, run_axes = selection.groups(series), selection.run_axes(series)
    runs: dict[tuple[str, ...], dict[str, CellOutcome]] = {}
    for group in groups:
        for cell in group.cells:
            if kind in cell.arrays:
                others = tuple(cell.labels[axis] for axis in run_axes)
                runs.setdefault(others, {})[group.name] = cell
    if not runs:
        return None
    run = max(runs.values(), key=len)  # the first of the largest
    matrices = tuple(
        (group.name, *_mean_matrix(run[group.name], kind)) for group in groups if group.name in run
    )
    one = next(iter(run.values()))
    remarks = ["mean over the rounds that two clients were both in"]
    remarks += [f"{axis} {selection.shown(axis, one.labels[axis])} alone" for axis in run_axes]
    if kind == "covariance" and (size := one.arrays["clients"].shape[1]) > 1:
        expected = -1 / (size - 1)
        remarks.append(
            f"centred on each round's mean of {size} clients, so that updates without anything in "
            f"common have {expected:.2g} of the diagonal beside it"
        )
    without = [cell for cell in selection.finished if kind not in cell.arrays]
    if without:
        remarks.append(f"without these matrices: {'; '.join(selection.names(without))}")
    return CovarianceData(MATRICES[kind], matrices, tuple(remarks))


def _mean_matrix(cell: CellOutcome, kind: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    return mean_over_rounds(cell.arrays["clients"], cell.arrays[kind])


def _off_diagonal(matrix: NDArray[np.float64]) -> float:
    rest = matrix[~np.eye(len(matrix), dtype=bool)]
    return float(np.nanmean(rest)) if np.isfinite(rest).any() else math.nan


def draw_covariance(data: CovarianceData, note: Sequence[str]) -> Figure:
    """Draw each matrix; larger is lighter, and pairs that never met are hatched."""
    figure, panels = new_panels(len(data.matrices), note, width=3.6, height=3.4)
    values = np.concatenate([matrix[np.isfinite(matrix)] for _, _, matrix in data.matrices])
    limit = float(np.abs(values).max()) or 1.0
    low = -limit if (values < 0).any() else 0.0
    image = None
    for axes, (name, clients, matrix) in zip(panels, data.matrices, strict=True):
        axes.set_facecolor("white")
        axes.grid(False)
        count = len(clients)
        axes.fill_between([-0.5, count - 0.5], -0.5, count - 0.5, facecolor="white",
                          edgecolor="#999999", hatch="////", linewidth=0, zorder=0)  # fmt: skip
        image = axes.pcolormesh(
            np.arange(count + 1) - 0.5, np.arange(count + 1) - 0.5, np.ma.masked_invalid(matrix),
            cmap=_COLOURS, vmin=low, vmax=limit, zorder=1,
        )  # fmt: skip
        axes.set_aspect("equal")
        axes.invert_yaxis()
        step = max(1, -(-count // 12))
        ticks, labels = range(0, count, step), [str(client) for client in clients[::step]]
        axes.set_xticks(ticks, labels)
        axes.set_yticks(ticks, labels)
        ratio = _off_diagonal(matrix) / float(np.nanmean(np.diag(matrix)))
        hatched = " (hatched: never in one round)" if np.isnan(matrix).any() else ""
        title = f"{name}: off-diagonal / diagonal {ratio:.2f}"
        set_labels(axes, title, f"client{hatched}", "client")
    assert image is not None
    bar = figure.colorbar(image, ax=panels, fraction=0.05, pad=0.02)
    bar.set_label(data.title, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure
