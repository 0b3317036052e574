"""Figures of the similarity of each two clients' updates, matrices on one colour scale.

The paper calls it a covariance. The matrices are not centred: with updates centred on their own
mean, values off the diagonal are -1/(m-1) of it on average, for any m updates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from trishul_ray.report.figures import MATRICES
from trishul_ray.report.figures.selection import Selection
from trishul_ray.report.figures.style import NORMAL, SMALL, new_panels, set_labels
from trishul_ray.report.outcomes import CellOutcome, Row

#: So few levels that a colour bar is drawn as vectors; the middle one is zero.
_COLOURS = colormaps["cividis"].resampled(47)
#: Prefix of the arrays of ``evaluation.diagnostics_cohort=all``.
_EVERYONE = "everyone_"
_OF_ALL = "all clients, each trained once from the broadcast of the last round"
_OF_ROUNDS = "mean over the rounds that two clients were both in"
_DIAGONAL = "the diagonal is 1, and off the colour scale"


@dataclass(frozen=True)
class Matrix:
    """The values [C, C] of a series, one of :data:`MATRICES`, for clients [C]; NaN if unknown."""

    name: str
    kind: str
    clients: NDArray[np.int64]
    values: NDArray[np.float64]

    @property
    def title(self) -> str:
        """Title of the matrix: the quantity that it shows."""
        return MATRICES[self.kind]

    @property
    def hides_diagonal(self) -> bool:
        """Whether the diagonal is 1 in any case."""
        return self.kind != "inner_products"

    @property
    def off_diagonal(self) -> NDArray[np.float64]:
        """Finite values off the diagonal."""
        rest = self.values[~np.eye(len(self.values), dtype=bool)]
        return rest[np.isfinite(rest)]

    @property
    def mean_off_diagonal(self) -> float:
        """The mean of these; NaN without any."""
        return float(self.off_diagonal.mean()) if self.off_diagonal.size else math.nan


@dataclass(frozen=True)
class MatrixData:
    """The content of the figure; neighbours of one kind have one colour scale."""

    matrices: tuple[Matrix, ...]
    remarks: tuple[str, ...]

    def describe(self) -> str:
        """Return the mean of each diagonal, and of what is off it, in words."""
        texts = []
        for title, members in groupby(self.matrices, key=lambda matrix: matrix.title):
            parts = [
                f"{matrix.name}: mean {np.nanmean(np.diag(matrix.values)):.3g} on the diagonal, "
                f"{matrix.mean_off_diagonal:.3g} off it"
                for matrix in members
            ]
            texts.append(f"{title}. {'; '.join(parts)}.")
        return " ".join(texts)

    def rows(self) -> list[Row]:
        """Return one row for each pair of clients."""
        return [
            {"metric": matrix.title, "series": matrix.name, "client": int(matrix.clients[i])}
            | {"other": int(matrix.clients[j]), "value": float(matrix.values[i, j])}
            for matrix in self.matrices
            for i, j in np.ndindex(matrix.values.shape)
        ]


def matrices_by_series(selection: Selection) -> MatrixData | None:
    """Collect the matrix of the one run that most series have finished.

    It is that of all clients after the last round, or else the mean over rounds by pair of clients.
    Clients of another seed hold other data, so matrices are not averaged over runs.
    """
    series, kind = selection.axes("series"), selection.options["matrix"]
    run_axes = selection.run_axes(series)
    runs: dict[tuple[str, ...], dict[str, CellOutcome]] = {}
    for group in selection.groups(series):
        for cell in group.cells:
            if _has_matrix(cell, kind):
                runs.setdefault(cell.labels_of(run_axes), {})[group.name] = cell
    if not runs:
        return None
    run = max(runs.values(), key=len)  # the first of the largest
    matrices = tuple(_matrix(name, kind, cell.arrays) for name, cell in run.items())
    everyone = all(_EVERYONE + kind in cell.arrays for cell in run.values())
    one = next(iter(run.values()))
    alone = [f"{a} {selection.sweep.shown_label(a, one.labels[a])} alone" for a in run_axes]
    remarks = [_OF_ALL if everyone else _OF_ROUNDS, *alone]
    if kind != "inner_products":
        remarks.append(_DIAGONAL)
    without = [cell for cell in selection.finished if not _has_matrix(cell, kind)]
    if without:
        remarks.append(f"without these matrices: {'; '.join(selection.names(without))}")
    return MatrixData(matrices, tuple(remarks))


def matrices_of_run(name: str, arrays: Mapping[str, Any]) -> MatrixData:
    """Return cosine and similarity of one run, from arrays as a finished cell has them."""
    kinds = ("cosine", "principal_angle_similarity")
    matrices = tuple(_matrix(name, kind, arrays) for kind in kinds)
    everyone = all(_EVERYONE + kind in arrays for kind in kinds)
    return MatrixData(matrices, (_OF_ALL if everyone else _OF_ROUNDS, _DIAGONAL))


def _has_matrix(cell: CellOutcome, kind: str) -> bool:
    return _EVERYONE + kind in cell.arrays or kind in cell.arrays


def _matrix(name: str, kind: str, arrays: Mapping[str, Any]) -> Matrix:
    """Return the matrix of all clients; without it, the mean over rounds."""
    if _EVERYONE + kind in arrays:
        return Matrix(name, kind, arrays[f"{_EVERYONE}clients"], arrays[_EVERYONE + kind])
    return Matrix(name, kind, *mean_over_rounds(arrays["clients"], arrays[kind]))


def mean_over_rounds(
    clients: ArrayLike, matrices: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Average matrices [R, m, m] of changing cohorts [R, m] by pair of clients.

    A round with fewer clients has -1 for the others; NaN stands for no value. Return the C clients
    that took part, ascending, and the means [C, C], NaN for pairs that were never in one round.
    """
    cohorts, values = np.asarray(clients), np.asarray(matrices, dtype=np.float64)
    known = np.unique(cohorts[cohorts >= 0])
    sums = np.zeros((len(known), len(known)))
    times = np.zeros_like(sums)
    for row, matrix in zip(cohorts, values, strict=True):
        present = np.flatnonzero(row >= 0)
        indices = np.searchsorted(known, row[present])
        block = matrix[np.ix_(present, present)]
        sums[np.ix_(indices, indices)] += np.nan_to_num(block)
        times[np.ix_(indices, indices)] += np.isfinite(block)
    means = np.divide(sums, times, out=np.full_like(sums, np.nan), where=times > 0)
    return known, means


def draw_matrices(data: MatrixData, note: Sequence[str]) -> Figure:
    """Draw each matrix; larger is lighter, and pairs that never met are hatched."""
    figure, panels = new_panels(len(data.matrices), note, height=4.4)
    drawn = zip(panels, data.matrices, strict=True)
    for title, members in groupby(drawn, key=lambda item: item[1].title):
        group = list(members)
        values = np.concatenate(
            [
                m.off_diagonal if m.hides_diagonal else m.values[np.isfinite(m.values)]
                for _, m in group
            ]
        )
        limit = float(np.abs(values).max(initial=0.0)) or 1.0
        low = -limit if (values < 0).any() else 0.0
        images = [_draw(axes, matrix, low, limit) for axes, matrix in group]
        bar = figure.colorbar(images[-1], ax=[axes for axes, _ in group], fraction=0.05, pad=0.02)
        bar.set_label(title, fontsize=NORMAL)
        bar.ax.tick_params(labelsize=SMALL)
    return figure


def _draw(axes: Axes, matrix: Matrix, low: float, high: float) -> Any:
    axes.set_facecolor("white")
    axes.grid(False)
    count = len(matrix.clients)
    axes.fill_between([-0.5, count - 0.5], -0.5, count - 0.5, facecolor="white",
                      edgecolor="#999999", hatch="////", linewidth=0, zorder=0)  # fmt: skip
    edges, diagonal = np.arange(count + 1) - 0.5, np.eye(count, dtype=bool)
    hidden = ~np.isfinite(matrix.values) | (diagonal & matrix.hides_diagonal)
    image = axes.pcolormesh(
        edges, edges, np.ma.masked_array(matrix.values, hidden),
        cmap=_COLOURS, vmin=low, vmax=high, zorder=1,
    )  # fmt: skip
    if matrix.hides_diagonal:
        grey = np.ma.masked_array(np.ones_like(matrix.values), ~diagonal)
        axes.pcolormesh(edges, edges, grey, cmap=ListedColormap(["#cccccc"]), zorder=1)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    step = max(1, -(-count // 12))
    ticks, labels = range(0, count, step), [str(client) for client in matrix.clients[::step]]
    axes.set_xticks(ticks, labels)
    axes.set_yticks(ticks, labels)
    rest = matrix.off_diagonal
    hatched = " (hatched: never in one round)" if np.isnan(matrix.values).any() else ""
    title = f"{matrix.name}: mean {matrix.mean_off_diagonal:.2g} off the diagonal"
    if rest.size:
        title += f", {rest.min():.2g} to {rest.max():.2g}"
    set_labels(axes, title, f"client{hatched}", "client")
    return image
