"""Figures of what the updates of two clients have in common, matrices on one colour scale.

The paper calls it a covariance. What is drawn is not centred: over clients centred on their own
mean, what is off the diagonal is -1/(m-1) of it on average, for any m updates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trishul_ray.report.figures.chart import Axis, Chart, Panel, Row
from trishul_ray.report.figures.kind import BY_METHOD, FIGURES, FigureKind
from trishul_ray.report.figures.selection import Selection
from trishul_ray.report.outcomes import CellOutcome

#: Matrices of two clients each (option ``matrix``), with their titles.
MATRICES = {
    "cosine": "cosine of updates",
    "inner_products": "inner products of updates",
    "principal_angle_similarity": "principal-angle similarity of updates",
}
#: Prefix of the arrays of ``evaluation.diagnostics_cohort=all``.
_EVERYONE = "everyone_"
_OF_ALL = "all clients, each trained once from the broadcast of the last round"
_OF_ROUNDS = "mean over the rounds that two clients were both in"
_DIAGONAL = "the diagonal is 1, and off the colour scale"
_COLUMNS = {"metric": "metric", "series": "series", "client": "y", "other": "x", "value": "value"}


@FIGURES.register("covariance")
class Covariance(FigureKind):
    """The matrix of the one run that most series have finished.

    It is that of all clients after the last round, or else the mean over rounds by pair of clients.
    Clients of another seed hold other data, so matrices are not averaged over runs.
    """

    options = BY_METHOD | {"matrix": "cosine"}

    def problem(self, option: str, value: Any) -> str | None:
        """Check the name of a matrix."""
        return None if value in MATRICES else f"must be one of {', '.join(MATRICES)}"

    def chart(self, selection: Selection) -> Chart | None:
        """Return a heat map for each series."""
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
        everyone = all(_EVERYONE + kind in cell.arrays for cell in run.values())
        one = next(iter(run.values()))
        remarks = [_OF_ALL if everyone else _OF_ROUNDS]
        remarks += [f"{a} {selection.sweep.shown_label(a, one.labels[a])} alone" for a in run_axes]
        remarks += [_DIAGONAL] * (kind != "inner_products")
        if without := [cell for cell in selection.finished if not _has_matrix(cell, kind)]:
            remarks.append(f"without these matrices: {'; '.join(selection.names(without))}")
        return _chart([_panel(name, kind, cell.arrays) for name, cell in run.items()], remarks)


def matrices_of_run(name: str, arrays: Mapping[str, Any]) -> Chart:
    """Return cosine and similarity of one run, from arrays as a finished cell has them."""
    kinds = ("cosine", "principal_angle_similarity")
    everyone = all(_EVERYONE + kind in arrays for kind in kinds)
    panels = [_panel(name, kind, arrays) for kind in kinds]
    return _chart(panels, [_OF_ALL if everyone else _OF_ROUNDS, _DIAGONAL])


def _chart(panels: Sequence[Panel], remarks: Sequence[str]) -> Chart:
    return Chart(tuple(panels), (), _COLUMNS, tuple(remarks), height=4.4)


def _has_matrix(cell: CellOutcome, kind: str) -> bool:
    return _EVERYONE + kind in cell.arrays or kind in cell.arrays


def _panel(name: str, kind: str, arrays: Mapping[str, Any]) -> Panel:
    """Return the matrix of all clients; without it, the mean over rounds."""
    if _EVERYONE + kind in arrays:
        clients, values = arrays[f"{_EVERYONE}clients"], arrays[_EVERYONE + kind]
    else:
        clients, values = mean_over_rounds(arrays["clients"], arrays[kind])
    rows = [
        Row(value=float(values[i, j]), metric=MATRICES[kind], series=name, y=int(one), x=int(other))
        for i, one in enumerate(clients)
        for j, other in enumerate(clients)
    ]
    rest = values[~np.eye(len(values), dtype=bool)]
    rest = rest[np.isfinite(rest)]
    mean = float(rest.mean()) if rest.size else float("nan")
    title = f"{name}: mean {mean:.2g} off the diagonal"
    if rest.size:
        title += f", {rest.min():.2g} to {rest.max():.2g}"
    hatched = " (hatched: never in one round)" * bool(np.isnan(values).any())
    x, y, colours = Axis(f"client{hatched}", "names"), Axis("client", "names"), Axis(MATRICES[kind])
    return Panel(
        tuple(rows), "heatmap", title, x, y, colours=colours, square=True,
        unit=kind != "inner_products",
    )  # fmt: skip


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
