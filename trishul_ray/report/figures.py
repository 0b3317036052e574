"""Figures of a run as PNG files.

Figures are objects of their own, drawn by Agg: no pyplot, no display, no state between calls, so
they may be drawn from any thread. Colours are Okabe and Ito's, told apart by colour-blind readers;
lines differ in dash and marker as well.

Shapes: n cores, r rank, C clients, K classes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike, NDArray

from trishul_ray.errors import InputError

DPI = 150
#: More clients than this are shown as groups of clients with similar labels.
MOST_CLIENTS = 60

# Okabe & Ito (2008), without yellow, which is too faint for a line on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_GREY = "#555555"


def accuracy_curve(
    rounds: Sequence[int],
    series: Mapping[str, Sequence[float]],
    path: Path | str,
    references: Mapping[str, float] | None = None,
) -> Path:
    """Accuracy over rounds, one line for each series.

    Args:
        rounds: round numbers, shared by all series.
        series: label to accuracies in [0, 1]; NaN where a round was not evaluated.
        path: the PNG file to write.
        references: label to an accuracy drawn as a level line, such as the untouched backbone.

    Returns:
        ``path``.

    Raises:
        InputError: nothing to draw, or a series as long as ``rounds`` is not.
    """
    if not series:
        raise InputError("accuracy_curve: series is empty; at least one line is needed")
    figure, axes = _figure(7.0, 4.2)
    x = np.asarray(rounds, dtype=np.int64)
    for index, (label, values) in enumerate(series.items()):
        y = np.asarray(values, dtype=np.float64)
        if y.shape != x.shape:
            raise InputError(f"accuracy_curve: {label!r} has {y.size} values for {x.size} rounds")
        seen = np.isfinite(y)
        axes.plot(
            x[seen],
            y[seen],
            label=label,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_DASHES[(index // len(_COLOURS)) % len(_DASHES)],
            marker=_MARKERS[index % len(_MARKERS)],
            markevery=max(1, int(seen.sum()) // 12),
            markersize=4,
            linewidth=1.6,
        )
    for index, (label, level) in enumerate((references or {}).items()):
        axes.axhline(
            level,
            color=_GREY,
            linestyle=_DASHES[1:][index % 3],
            linewidth=1.1,
            label=f"{label} ({level:.1%})",
            zorder=1,
        )
    axes.set_xlabel("communication round")
    axes.set_ylabel("test accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.grid(True, alpha=0.25)
    lines = len(series) + len(references or {})
    if lines > 1:
        columns = 3 if lines <= 9 else 4
        figure.legend(loc="outside lower center", ncols=min(lines, columns), frameon=False)
    return _save(figure, path)


def spectra(before: ArrayLike, after: ArrayLike, threshold: float, path: Path | str) -> Path:
    """Singular values of the cores before and after the prox: median and middle 80 percent.

    Args:
        before: singular values [n, r], in descending order, before the prox.
        after: the same cores [n, r] after it.
        threshold: what the prox took off each singular value (λ η); drawn as a level.
        path: the PNG file to write.

    Returns:
        ``path``.

    Raises:
        InputError: the shapes differ, are not [n, r], or hold no core.
    """
    first = np.asarray(before, dtype=np.float64)
    second = np.asarray(after, dtype=np.float64)
    if first.ndim != 2 or first.shape != second.shape or first.size == 0:
        raise InputError(
            f"spectra: before {first.shape} and after {second.shape} must be the same [n, r]"
        )
    figure, axes = _figure(7.0, 4.2)
    index = np.arange(1, first.shape[1] + 1)
    for values, label, colour, dash in (
        (first, "before the prox", _COLOURS[1], "--"),
        (second, "after the prox", _COLOURS[0], "-"),
    ):
        low, median, high = np.quantile(values, [0.1, 0.5, 0.9], axis=0)  # each [r]
        axes.fill_between(index, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(index, median, color=colour, linestyle=dash, linewidth=1.8, label=label)
    level = f"threshold {threshold:.2g}"
    axes.axhline(threshold, color=_GREY, linestyle=":", linewidth=1.4, label=level)
    zeroed = float((second <= 0).mean())
    cores = "1 core" if first.shape[0] == 1 else f"{first.shape[0]} cores"
    axes.set_title(
        f"{cores} of rank {first.shape[1]}; {zeroed:.1%} of singular values zero after the prox",
        fontsize=10,
    )
    axes.set_xlabel("index of the singular value")
    axes.set_ylabel("singular value (median, 10–90 % band)")
    axes.set_xlim(1, max(2, first.shape[1]))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    axes.grid(True, alpha=0.25)
    axes.legend(loc="upper right", frameon=False)
    return _save(figure, path)


def heads_per_layer(blocks: Sequence[str], heads: Sequence[int], path: Path | str) -> Path:
    """How many heads the allocation gave to each block.

    Args:
        blocks: names from input to output; what all share at either end is not shown.
        heads: heads of each block.
        path: the PNG file to write.

    Returns:
        ``path``.

    Raises:
        InputError: nothing to draw, or the lengths differ.
    """
    if not blocks or len(blocks) != len(heads):
        raise InputError(f"heads_per_layer: {len(blocks)} blocks, {len(heads)} numbers of heads")
    labels = _short(blocks)
    rotate = max(map(len, labels)) * len(labels) > 70
    width = min(14.0, max(4.5, 1.5 + 0.36 * len(labels)))
    figure, axes = _figure(width, 4.2 if rotate else 3.6)
    mean = float(np.mean(heads))
    bars = axes.bar(range(len(labels)), heads, width=0.72, color=_COLOURS[0], zorder=2)
    if len(labels) <= 40:
        axes.bar_label(bars, padding=2, fontsize=9)
    axes.axhline(
        mean, color=_COLOURS[1], linestyle="--", linewidth=1.4, label=f"mean {mean:.3g}", zorder=3
    )
    step = max(1, -(-len(labels) // 48))
    ticks = range(0, len(labels), step)
    axes.set_xticks(
        list(ticks),
        [labels[i] for i in ticks],
        rotation=90 if rotate else 0,
        fontsize=8 if rotate else 9,
    )
    axes.set_xlabel("block, from input to output")
    axes.set_ylabel("heads per adapted matrix")
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(0, max(*heads, mean, 1) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, axis="y", alpha=0.25)
    figure.legend(loc="outside upper right", frameon=False)
    return _save(figure, path)


def label_distribution(
    counts: ArrayLike, path: Path | str, classes: Sequence[str] | None = None
) -> Path:
    """Who holds what: the share of every class in a client's rows, and the client's size.

    Up to :data:`MOST_CLIENTS` clients each have a column. More are sorted by their commonest
    class and shown in groups; a group's column is the mean over its clients, and its size shows
    mean, smallest and largest client.

    Args:
        counts: rows per client and class, [C, K].
        path: the PNG file to write.
        classes: names of the K classes.

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
    figure = Figure(
        figsize=(
            min(10.0, max(6.0, 2.5 + 0.13 * len(groups))),
            min(6.5, max(4.0, 2.4 + 0.2 * min(kinds, 20))),
        ),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    size_axes, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3.2])
    x = np.arange(len(groups))
    if grouped:
        size_axes.fill_between(x, low, high, step="mid", color=_GREY, alpha=0.25, linewidth=0)
        size_axes.step(x, mean, where="mid", color="black", linewidth=1.2)
    else:
        size_axes.bar(x, mean, width=0.8, color=_GREY)
    size_axes.set_ylabel("rows\n(mean, range)" if grouped else "rows")
    size_axes.set_ylim(bottom=0)
    size_axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    _bare(size_axes)
    image = axes.imshow(
        shown.T, aspect="auto", cmap="Blues", vmin=0.0, origin="lower", interpolation="nearest"
    )
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.05)
    bar.set_label("mean share of a client's rows" if grouped else "share of the client's rows")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    axes.set_ylabel("class")
    if classes is not None and kinds <= 25:
        axes.set_yticks(range(kinds), [name[:18] for name in classes], fontsize=8)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    if grouped:
        members = sorted({len(group) for group in groups})
        span = f"{members[0]}" if len(members) == 1 else f"{members[0]}–{members[-1]}"
        axes.set_xlabel(f"groups of {span} clients, sorted by commonest class")
        axes.set_xticks([])
        title = f"{clients:,} clients in {len(groups)} groups, {int(rows.sum()):,} rows"
    else:
        axes.set_xlabel("client")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        title = f"{clients} clients, {int(rows.sum()):,} rows"
    size_axes.set_title(title, fontsize=10)
    return _save(figure, path)


def _groups(shares: NDArray[np.float64]) -> list[NDArray[np.intp]]:
    """Client numbers by column: one each, or neighbours in a sort by commonest class."""
    clients = shares.shape[0]
    if clients <= MOST_CLIENTS:
        return [np.array([client]) for client in range(clients)]
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    return [np.asarray(part) for part in np.array_split(order, MOST_CLIENTS)]


def _short(names: Sequence[str]) -> list[str]:
    """Dotted names without the parts that all of them share at either end."""
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts))
    start = 0
    while start < shortest - 1 and len({part[start] for part in parts}) == 1:
        start += 1
    end = 0
    while end < shortest - start - 1 and len({part[-1 - end] for part in parts}) == 1:
        end += 1
    return [".".join(part[start : len(part) - end]) for part in parts]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _bare(axes)
    return figure, axes


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path | str) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # No software or date in the file: the same numbers give the same bytes.
    figure.savefig(target, dpi=DPI, format="png", metadata={"Software": None})
    return target
