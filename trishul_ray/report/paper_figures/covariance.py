"""The figure of what the updates of two clients have in common, by series, on one colour scale.

The paper calls it a covariance. What is drawn is not centred: over clients centred on their own
mean, what is off the diagonal is -1/(m-1) of it on average, for any m updates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.selection import Selection
from trishul_ray.report.paper_figures.style import NORMAL, SMALL, new_panels, set_labels
from trishul_ray.report.uploads import mean_over_rounds

#: So few levels that a colour bar is drawn as vectors; the middle one is zero.
_COLOURS = colormaps["cividis"].resampled(47)
#: Matrices of two clients each (option ``matrix``), with their titles.
MATRICES = {
    "cosine": "cosine of updates",
    "inner_products": "inner products of updates",
    "principal_angle_similarity": "principal-angle similarity of updates",
}
#: Prefix of the arrays of ``evaluation.diagnostics_cohort=all``.
_EVERYONE = "everyone_"


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
            f"{_mean_off_diagonal(matrix):.3g} off it"
            for name, _, matrix in self.matrices
        ]
        return f"{self.title}. {'; '.join(parts)}."

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each pair of clients."""
        return [
            {"metric": self.title, "series": name, "client": int(clients[i])}
            | {"other": int(clients[j]), "value": float(matrix[i, j])}
            for name, clients, matrix in self.matrices
            for i, j in np.ndindex(matrix.shape)
        ]


def covariance(selection: Selection) -> CovarianceData | None:
    """Collect the matrix of the one run that most series have finished.

    It is that of all clients after the last round, or else the mean over rounds by pair of clients.
    Clients of another seed hold other data, so matrices are not averaged over runs.
    """
    series, kind = selection.axes("series"), selection.options["matrix"]
    groups, run_axes = selection.groups(series), selection.run_axes(series)
    runs: dict[tuple[str, ...], dict[str, CellOutcome]] = {}
    for group in groups:
        for cell in group.cells:
            if _matrix(cell, kind) is not None:
                others = tuple(cell.labels[axis] for axis in run_axes)
                runs.setdefault(others, {})[group.name] = cell
    if not runs:
        return None
    run = max(runs.values(), key=len)  # the first of the largest
    found = {name: matrix for name, cell in run.items() if (matrix := _matrix(cell, kind))}
    matrices = tuple((group.name, *found[group.name]) for group in groups if group.name in found)
    one = next(iter(run.values()))
    everyone = all(_EVERYONE + kind in cell.arrays for cell in run.values())
    remarks = [
        "all clients, each trained once from the broadcast of the last round"
        if everyone
        else "mean over the rounds that two clients were both in"
    ]
    remarks += [f"{axis} {selection.shown(axis, one.labels[axis])} alone" for axis in run_axes]
    if kind != "inner_products":
        remarks.append("the diagonal is 1, and off the colour scale")
    without = [cell for cell in selection.finished if _matrix(cell, kind) is None]
    if without:
        remarks.append(f"without these matrices: {'; '.join(selection.names(without))}")
    return CovarianceData(MATRICES[kind], matrices, tuple(remarks))


def _matrix(cell: CellOutcome, kind: str) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Return clients [C] and their matrix [C, C]; None without diagnostics."""
    arrays = cell.arrays
    if _EVERYONE + kind in arrays:
        return arrays[f"{_EVERYONE}clients"], arrays[_EVERYONE + kind]
    return mean_over_rounds(arrays["clients"], arrays[kind]) if kind in arrays else None


def _off_diagonal(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    rest = matrix[~np.eye(len(matrix), dtype=bool)]
    return rest[np.isfinite(rest)]


def _mean_off_diagonal(matrix: NDArray[np.float64]) -> float:
    rest = _off_diagonal(matrix)
    return float(rest.mean()) if rest.size else math.nan


def draw_covariance(data: CovarianceData, note: Sequence[str]) -> Figure:
    """Draw each matrix; larger is lighter, and pairs that never met are hatched."""
    figure, panels = new_panels(len(data.matrices), note, height=4.4)
    trivial = data.title != MATRICES["inner_products"]
    values = np.concatenate(
        [
            _off_diagonal(matrix) if trivial else matrix[np.isfinite(matrix)]
            for _, _, matrix in data.matrices
        ]
    )
    limit = float(np.abs(values).max(initial=0.0)) or 1.0
    low = -limit if (values < 0).any() else 0.0
    image = None
    for axes, (name, clients, matrix) in zip(panels, data.matrices, strict=True):
        axes.set_facecolor("white")
        axes.grid(False)
        count = len(clients)
        axes.fill_between([-0.5, count - 0.5], -0.5, count - 0.5, facecolor="white",
                          edgecolor="#999999", hatch="////", linewidth=0, zorder=0)  # fmt: skip
        edges, diagonal = np.arange(count + 1) - 0.5, np.eye(count, dtype=bool)
        hidden = ~np.isfinite(matrix) | (diagonal & trivial)
        image = axes.pcolormesh(
            edges, edges, np.ma.masked_array(matrix, hidden),
            cmap=_COLOURS, vmin=low, vmax=limit, zorder=1,
        )  # fmt: skip
        if trivial:
            grey = np.ma.masked_array(np.ones_like(matrix), ~diagonal)
            axes.pcolormesh(edges, edges, grey, cmap=ListedColormap(["#cccccc"]), zorder=1)
        axes.set_aspect("equal")
        axes.invert_yaxis()
        step = max(1, -(-count // 12))
        ticks, labels = range(0, count, step), [str(client) for client in clients[::step]]
        axes.set_xticks(ticks, labels)
        axes.set_yticks(ticks, labels)
        rest = _off_diagonal(matrix)
        hatched = " (hatched: never in one round)" if np.isnan(matrix).any() else ""
        title = f"{name}: mean {_mean_off_diagonal(matrix):.2g} off the diagonal"
        if rest.size:
            title += f", {rest.min():.2g} to {rest.max():.2g}"
        set_labels(axes, title, f"client{hatched}", "client")
    assert image is not None
    bar = figure.colorbar(image, ax=panels, fraction=0.05, pad=0.02)
    bar.set_label(data.title, fontsize=NORMAL)
    bar.ax.tick_params(labelsize=SMALL)
    return figure
