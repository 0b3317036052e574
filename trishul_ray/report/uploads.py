"""Figures of what clients send: spectra, diagnostics over rounds, and clients beside each other.

Shapes: R rounds, m clients of a round, C clients in all, n cores, r rank.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from trishul_ray.errors import InputError
from trishul_ray.report.figures import bare, legend_below, new_axes, new_figure, save

#: Metrics of the panels of :func:`diagnostics_curves`, with their titles.
PANELS = {
    "principal_angle_similarity": "principal-angle similarity",
    "dominant_similarity": "dominant-vector similarity",
    "inconsistency_index": "inconsistency index",
    "spectral_entropy": "spectral entropy",
    "effective_rank": "effective rank",
    "aggregation_variance": "aggregation variance (the same of both)",
}
# Okabe & Ito (2008).
_BLUE, _ORANGE = "#0072B2", "#D55E00"


def uploaded_spectrum(values: ArrayLike, path: Path | str, note: str | None = None) -> Path:
    """Draw the singular values of the cores that one client sends: median and 10-90 % band.

    Args:
        values: [n, r], descending; NaN behind those of a core of smaller rank.
        path: the PNG file to write.
        note: what the numbers are numbers of, in small letters above the figure.

    Returns:
        ``path``.

    Raises:
        InputError: ``values`` is not [n, r] or holds no core.
    """
    sigma = np.asarray(values, dtype=np.float64)
    if sigma.ndim != 2 or sigma.size == 0:
        raise InputError(f"uploaded_spectrum: values {sigma.shape} must be [n, r]")
    figure, axes = new_axes(7.0, 4.2)
    index = np.arange(1, sigma.shape[1] + 1)
    low, median, high = np.nanquantile(sigma, [0.1, 0.5, 0.9], axis=0)  # each [r]
    axes.fill_between(index, low, high, color=_BLUE, alpha=0.18, linewidth=0)
    axes.plot(index, median, color=_BLUE, linewidth=1.8)
    cores = "1 core" if len(sigma) == 1 else f"{len(sigma)} cores"
    axes.set_title(f"{cores} s·H of rank {sigma.shape[1]} as one client sent them", fontsize=10)
    axes.set_xlabel("index of the singular value")
    axes.set_ylabel("singular value (median, 10–90 % band)")
    axes.set_xlim(1, max(2, sigma.shape[1]))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    axes.grid(True, alpha=0.25)
    return save(figure, path, note)


def diagnostics_curves(
    rounds: Sequence[int],
    uploads: Mapping[str, Sequence[float]],
    updates: Mapping[str, Sequence[float]],
    path: Path | str,
    note: str | None = None,
) -> Path:
    """Draw alignment, entropy, effective rank and variance over rounds, a panel each.

    Args:
        rounds: R round numbers.
        uploads: [R] of each metric in :data:`PANELS`, of the uploaded cores; NaN where it was not
            measured.
        updates: the same of the updates, which are the uploads less the broadcast.
        path: the PNG file to write.
        note: what the numbers are numbers of, in small letters above the figure.

    Returns:
        ``path``.

    Raises:
        InputError: a series as long as ``rounds`` is not.
    """
    figure = new_figure(10.0, 6.0)
    panels = figure.subplots(2, 3, sharex=True)
    x = np.asarray(rounds, dtype=np.int64)
    for axes, (name, title) in zip(panels.flat, PANELS.items(), strict=True):
        bare(axes)
        for label, series, colour, dash, marker in (
            ("updates (uploads less the broadcast)", updates, _BLUE, "-", "o"),
            ("uploaded cores s·H", uploads, _ORANGE, "--", "s"),
        ):
            y = np.asarray(series[name], dtype=np.float64)
            if y.shape != x.shape:
                raise InputError(f"diagnostics_curves: {name} has {y.size} values, {x.size} rounds")
            seen = np.isfinite(y)
            every = max(1, int(seen.sum()) // 10)
            axes.plot(
                x[seen],
                y[seen],
                color=colour,
                linestyle=dash,
                marker=marker,
                markevery=every,
                markersize=3.5,
                linewidth=1.5,
                label=label,
            )
        axes.set_title(title, fontsize=10)
        share = name.endswith(("similarity", "index"))
        axes.set_ylim(0, 1.02 if share else 1.05 * axes.get_ylim()[1])
        axes.grid(True, alpha=0.25)
    for axes in panels[1]:
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    legend_below(figure, panels.flat[0])
    return save(figure, path, note)


def mean_over_rounds(
    clients: ArrayLike, matrices: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Average matrices of changing cohorts by pair of clients.

    Args:
        clients: who the rows are, [R, m]; -1 where a round had fewer.
        matrices: [R, m, m], NaN where there is no value.

    Returns:
        The C clients that took part, ascending, and [C, C]: the mean over the rounds that had
        both; NaN for a pair that was never in one round.
    """
    who, values = np.asarray(clients), np.asarray(matrices, dtype=np.float64)
    known = np.unique(who[who >= 0])
    sums = np.zeros((len(known), len(known)))
    times = np.zeros_like(sums)
    for row, matrix in zip(who, values, strict=True):
        present = np.flatnonzero(row >= 0)
        places = np.searchsorted(known, row[present])
        found = matrix[np.ix_(present, present)]
        sums[np.ix_(places, places)] += np.nan_to_num(found)
        times[np.ix_(places, places)] += np.isfinite(found)
    means = np.divide(sums, times, out=np.full_like(sums, np.nan), where=times > 0)
    return known, means


def client_matrices(
    clients: ArrayLike,
    covariance: ArrayLike,
    similarity: ArrayLike,
    path: Path | str,
    note: str | None = None,
) -> Path:
    """Draw clients beside each other: covariance and alignment of their updates, mean over rounds.

    Args:
        clients: who trained in each round, [R, m]; -1 where a round had fewer.
        covariance: of the updates, [R, m, m].
        similarity: principal-angle similarity of the updates, [R, m, m].
        path: the PNG file to write.
        note: what the numbers are numbers of, in small letters above the figure.

    Returns:
        ``path``.

    Raises:
        InputError: no rounds, or shapes that disagree.
    """
    who, first, second = (np.asarray(values) for values in (clients, covariance, similarity))
    if (
        who.ndim != 2
        or who.size == 0
        or {first.shape, second.shape} != {(*who.shape, who.shape[1])}
    ):
        raise InputError(
            f"client_matrices: clients {who.shape} must be [R, m], and covariance {first.shape} "
            f"and similarity {second.shape} [R, m, m]"
        )
    known, shared = mean_over_rounds(who, first)
    _, aligned = mean_over_rounds(who, second)
    figure = new_figure(10.0, 4.6)
    reach = float(np.nanmax(np.abs(shared))) or 1.0
    size = len(known)
    for axes, values, title, colours, low, high in (
        (figure.add_subplot(1, 2, 1), shared, "covariance of updates", "RdBu_r", -reach, reach),
        (
            figure.add_subplot(1, 2, 2),
            aligned,
            "principal-angle similarity of updates",
            "viridis",
            0.0,
            1.0,
        ),
    ):
        axes.set_facecolor("#dddddd")  # pairs that were never in one round
        image = axes.imshow(
            np.ma.masked_invalid(values),
            cmap=colours,
            vmin=low,
            vmax=high,
            interpolation="nearest",
        )
        figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
        step = max(1, -(-size // 20))
        axes.set_xticks(range(0, size, step), [str(c) for c in known[::step]], fontsize=8)
        axes.set_yticks(range(0, size, step), [str(c) for c in known[::step]], fontsize=8)
        rounds = "1 round" if len(who) == 1 else f"{len(who)} rounds"
        axes.set_title(f"{title}, mean over {rounds}", fontsize=10)
        grey = " (grey: never in one round)" if np.isnan(values).any() else ""
        axes.set_xlabel(f"client{grey}")
        axes.set_ylabel("client")
    return save(figure, path, note)
