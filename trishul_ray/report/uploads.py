"""Figures of the cores that clients train and upload: spectra, diagnostics, similarity of clients.

Shapes: R rounds, m clients of a round, C clients in all, n cores, r rank.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from trishul_ray.errors import InputError
from trishul_ray.report.figures import (
    COLOURS,
    GREY,
    hide_spines,
    legend_below,
    new_axes,
    new_figure,
    save_figure,
)

#: Metrics of the panels of :func:`diagnostics_curves`, with their titles.
PANELS = {
    "principal_angle_similarity": "principal-angle similarity",
    "dominant_similarity": "dominant-vector similarity",
    "inconsistency_index": "inconsistency index",
    "spectral_entropy": "spectral entropy",
    "effective_rank": "effective rank",
    "aggregation_variance": "aggregation variance (equal for both)",
}
_BLUE, _ORANGE = COLOURS[:2]


def spectra(
    before: ArrayLike, after: ArrayLike, threshold: float, path: Path | str, note: str | None = None
) -> Path:
    """Draw the singular values of the cores before and after the prox, and return ``path``.

    Both are [n, r], descending, NaN beyond the rank of a core. Below them is what the prox took
    away: the threshold λ η, a horizontal line, or all of a smaller value. Both axes are
    logarithmic, since the threshold is mostly far below the singular values; zeros have no place on
    them. The note stands above the figure.

    Raises:
        InputError: the shapes differ, are not [n, r], or are empty.
    """
    first = np.asarray(before, dtype=np.float64)
    second = np.asarray(after, dtype=np.float64)
    if first.ndim != 2 or first.shape != second.shape or first.size == 0:
        raise InputError(
            f"spectra: before {first.shape} and after {second.shape} must be the same [n, r]"
        )
    figure = new_figure(7.0, 6.2)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_spectrum(axes, first, _ORANGE, "--", "before the prox")
    _draw_spectrum(axes, second, _BLUE, "-", "after the prox")
    _draw_spectrum(below, first - second, COLOURS[2], "-", "taken away")
    for panel, corner in ((axes, "upper right"), (below, "lower left")):
        level = f"threshold {threshold:.2g}"
        panel.axhline(threshold, color=GREY, linestyle=":", linewidth=1.4, label=level)
        hide_spines(panel)
        _finish_spectrum(panel, first.shape[1])
        _set_log_scale(panel, threshold)
        panel.legend(loc=corner, frameon=False, fontsize=9)
    axes.set_xlabel("")
    below.set_ylabel("before minus after")
    zeroed = float((second[np.isfinite(second)] <= 0).mean())
    title = f"{_plural(len(first), 'core')} of rank {first.shape[1]}; {zeroed:.1%} of singular"
    axes.set_title(f"{title} values zero after the prox", fontsize=10)
    return save_figure(figure, path, note)


def _set_log_scale(axes: Axes, threshold: float) -> None:
    """Make the vertical axis logarithmic, with room below the threshold; values may be zero."""
    top = axes.get_ylim()[1]
    if top > 0:
        axes.set_yscale("log", nonpositive="clip")
        bottom = threshold / 3 if threshold > 0 else top / 1e4
        axes.set_ylim(min(bottom, top / 10), 2 * top)


def uploaded_spectrum(values: ArrayLike, path: Path | str, note: str | None = None) -> Path:
    """Draw the singular values of the cores that one client uploads, and return ``path``.

    They are [n, r], descending, NaN beyond the rank of a core.

    Raises:
        InputError: ``values`` is not [n, r] or is empty.
    """
    sigma = np.asarray(values, dtype=np.float64)
    if sigma.ndim != 2 or sigma.size == 0:
        raise InputError(f"uploaded_spectrum: values {sigma.shape} must be [n, r]")
    figure, axes = new_axes(7.0, 4.2)
    _draw_spectrum(axes, sigma, _BLUE, "-")
    _finish_spectrum(axes, sigma.shape[1])
    cores = _plural(len(sigma), "core")
    axes.set_title(f"{cores} s·H of rank {sigma.shape[1]} as uploaded by one client", fontsize=10)
    return save_figure(figure, path, note)


def _draw_spectrum(
    axes: Axes, values: NDArray[np.float64], colour: str, dash: str, label: str | None = None
) -> None:
    """Draw the median and the 10-90 % band over the cores of singular values [n, r]."""
    index = np.arange(1, values.shape[1] + 1)
    low, median, high = np.nanquantile(values, [0.1, 0.5, 0.9], axis=0)  # each [r]
    axes.fill_between(index, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(index, median, color=colour, linestyle=dash, linewidth=1.8, label=label)


def _finish_spectrum(axes: Axes, rank: int) -> None:
    """Label the axes and fix their limits, after everything is drawn."""
    axes.set_xlabel("index of the singular value")
    axes.set_ylabel("singular value (median, 10–90 % band)")
    axes.set_xlim(1, max(2, rank))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    axes.grid(True, alpha=0.25)


def diagnostics_curves(
    rounds: Sequence[int],
    uploads: Mapping[str, Sequence[float]],
    updates: Mapping[str, Sequence[float]],
    path: Path | str,
    note: str | None = None,
) -> Path:
    """Draw each metric of :data:`PANELS` over rounds, and return ``path``.

    ``uploads`` has [R] of each metric, of the uploaded cores, NaN if it was not measured;
    ``updates`` the same of the updates (uploads minus broadcast).

    Raises:
        InputError: the length of a series differs from ``rounds``.
    """
    figure = new_figure(10.0, 6.0)
    panels = figure.subplots(2, 3, sharex=True)
    x = np.asarray(rounds, dtype=np.int64)
    for axes, (name, title) in zip(panels.flat, PANELS.items(), strict=True):
        hide_spines(axes)
        for label, series, colour, dash, marker in (
            ("updates (uploads minus broadcast)", updates, _BLUE, "-", "o"),
            ("uploaded cores s·H", uploads, _ORANGE, "--", "s"),
        ):
            y = np.asarray(series[name], dtype=np.float64)
            if y.shape != x.shape:
                raise InputError(f"diagnostics_curves: {name} has {y.size} values, {x.size} rounds")
            measured = np.isfinite(y)
            axes.plot(
                x[measured], y[measured], label=label, color=colour, linestyle=dash, linewidth=1.5,
                marker=marker, markersize=3.5, markevery=max(1, int(measured.sum()) // 10),
            )  # fmt: skip
        axes.set_title(title, fontsize=10)
        share = name.endswith(("similarity", "index"))
        axes.set_ylim(0, 1.02 if share else 1.05 * axes.get_ylim()[1])
        axes.grid(True, alpha=0.25)
    for axes in panels[1]:
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    legend_below(figure, panels.flat[0])
    return save_figure(figure, path, note)


def client_matrices(
    clients: ArrayLike,
    cosine: ArrayLike,
    similarity: ArrayLike,
    path: Path | str,
    note: str | None = None,
) -> Path:
    """Draw cosine and similarity of the clients' updates, mean over rounds; return ``path``.

    ``clients`` is the cohort of each round, [R, m], -1 if a round had fewer clients; ``cosine``
    and ``similarity`` (of principal angles) are [R, m, m].

    Raises:
        InputError: there are no rounds, or the shapes disagree.
    """
    cohorts, first, second = (np.asarray(values) for values in (clients, cosine, similarity))
    square = (*cohorts.shape, *cohorts.shape[1:])
    if cohorts.ndim != 2 or cohorts.size == 0 or {first.shape, second.shape} != {square}:
        raise InputError(
            f"client_matrices: clients {cohorts.shape} must be [R, m], and cosine "
            f"{first.shape} and similarity {second.shape} [R, m, m]"
        )
    known, cosines = mean_over_rounds(cohorts, first)
    _, similarities = mean_over_rounds(cohorts, second)
    figure = new_figure(10.0, 4.6)
    left, right = figure.subplots(1, 2)
    for axes, values, title, colours, low, high in (
        (left, cosines, "cosine of updates", "RdBu_r", -1.0, 1.0),
        (right, similarities, "principal-angle similarity of updates", "viridis", 0.0, 1.0),
    ):
        axes.set_facecolor("#dddddd")  # pairs that were never in one round
        image = axes.imshow(
            np.ma.masked_invalid(values), cmap=colours, vmin=low, vmax=high, interpolation="nearest"
        )
        figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
        step = max(1, -(-len(known) // 20))
        for set_ticks in (axes.set_xticks, axes.set_yticks):
            set_ticks(range(0, len(known), step), [str(c) for c in known[::step]], fontsize=8)
        axes.set_title(f"{title}, mean over {_plural(len(cohorts), 'round')}", fontsize=10)
        grey = " (grey: never in one round)" if np.isnan(values).any() else ""
        axes.set_xlabel(f"client{grey}")
        axes.set_ylabel("client")
    return save_figure(figure, path, note)


def mean_over_rounds(
    clients: ArrayLike, matrices: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Average matrices [R, m, m] of changing cohorts [R, m] by pair of clients.

    A round with fewer clients has -1 for the others; NaN stands for no value.

    Returns:
        The C clients that took part, ascending, and the means [C, C] over the rounds with both
        clients; NaN for pairs that were never in one round.
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


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
