"""Who holds what, as a picture. Shapes: C clients, K classes, G groups of clients."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike, NDArray

from trishul_ray.errors import InputError
from trishul_ray.report.canvas import GREY, bare, new_figure, save

#: More clients than this are shown as groups of clients with similar labels.
MOST_CLIENTS = 60


def label_distribution(
    counts: ArrayLike,
    path: Path | str,
    classes: Sequence[str] | None = None,
    what: str = "class",
    note: str | None = None,
) -> Path:
    """Who holds what: the share of every class in a client's rows, and the client's size.

    Up to :data:`MOST_CLIENTS` clients each have a column. More are sorted by their commonest
    class and shown in groups; a group's column is the mean over its clients, and its size shows
    mean, smallest and largest client.

    Args:
        counts: rows per client and class, [C, K].
        path: the PNG file to write.
        classes: names of the K classes.
        what: what a class is, for the axis.
        note: what the numbers are numbers of, in small letters above the figure.

    Returns:
        ``path``.

    Raises:
        InputError: ``counts`` is not [C, K] with at least one client and class, is negative, or
            ``classes`` has another length than K.
    """
    rows = np.asarray(counts, dtype=np.float64)
    if rows.ndim != 2 or rows.size == 0 or not (rows >= 0).all():
        raise InputError(
            f"label_distribution: counts {rows.shape} must be [clients, classes], >= 0"
        )
    clients, kinds = rows.shape
    if classes is not None and len(classes) != kinds:
        raise InputError(f"label_distribution: {len(classes)} class names for {kinds} classes")
    sizes = rows.sum(axis=1)  # [C]
    shares = rows / np.maximum(sizes, 1.0)[:, None]  # [C, K]
    groups = _groups(shares)
    shown = np.stack([shares[group].mean(axis=0) for group in groups])  # [G, K]
    mean = np.array([sizes[group].mean() for group in groups])
    low = np.array([sizes[group].min() for group in groups])
    high = np.array([sizes[group].max() for group in groups])

    grouped = clients > MOST_CLIENTS
    figure = new_figure(
        min(10.0, max(6.0, 2.5 + 0.13 * len(groups))),
        min(6.5, max(4.0, 2.4 + 0.2 * min(kinds, 20))),
    )
    size_axes, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3.2])
    x = np.arange(len(groups))
    if grouped:
        size_axes.fill_between(x, low, high, step="mid", color=GREY, alpha=0.25, linewidth=0)
        size_axes.step(x, mean, where="mid", color="black", linewidth=1.2)
    else:
        size_axes.bar(x, mean, width=0.8, color=GREY)
    size_axes.set_ylabel("rows\n(mean, range)" if grouped else "rows")
    size_axes.set_ylim(bottom=0)
    size_axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    bare(size_axes)
    image = axes.imshow(
        shown.T, aspect="auto", cmap="Blues", vmin=0.0, origin="lower", interpolation="nearest"
    )
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.05)
    bar.set_label("mean share of a client's rows" if grouped else "share of the client's rows")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    axes.set_ylabel(what)
    if classes is not None and kinds <= 25:
        axes.set_yticks(range(kinds), [name[:18] for name in classes], fontsize=8)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    if grouped:
        members = sorted({len(group) for group in groups})
        span = f"{members[0]}" if len(members) == 1 else f"{members[0]}–{members[-1]}"
        axes.set_xlabel(f"groups of {span} clients, sorted by commonest {what}")
        axes.set_xticks([])
        title = f"{clients:,} clients in {len(groups)} groups, {int(rows.sum()):,} rows"
    else:
        axes.set_xlabel("client")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        title = f"{clients} clients, {int(rows.sum()):,} rows"
    size_axes.set_title(title, fontsize=10)
    return save(figure, path, note)


def _groups(shares: NDArray[np.float64]) -> list[NDArray[np.intp]]:
    """Client numbers by column: one each, or neighbours in a sort by commonest class."""
    clients = shares.shape[0]
    if clients <= MOST_CLIENTS:
        return [np.array([client]) for client in range(clients)]
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    return [np.asarray(part) for part in np.array_split(order, MOST_CLIENTS)]
