"""Figures of a run as PNG files: metric curves, heads per block, labels per client.

Lines differ in dash and marker as well as in colour, for colour-blind readers.
"""

import textwrap
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
GREY = "#555555"
#: Okabe & Ito (2008), safe for colour-blind readers; without yellow, too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: With more clients, :func:`label_distribution` shows groups of similar clients.
MAX_COLUMNS = 60


def new_figure(width: float, height: float) -> Figure:
    """Return a figure without axes; the size is in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes; the size is in inches."""
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    hide_spines(axes)
    return figure, axes


def hide_spines(axes: Axes) -> None:
    """Hide the top and right of the frame."""
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Add a legend below the axes if there are several lines, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    canvas, size = figure.canvas, 10 if len(labels) <= 9 else 8
    assert isinstance(canvas, FigureCanvasAgg)
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=size
        )
        renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]  # matplotlib's
        width = legend.get_window_extent(renderer).width
        if width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def save_figure(figure: Figure, path: Path | str, note: str | None = None) -> Path:
    """Write the figure as PNG with ``note`` above it, create its folder, and return the path."""
    if note:
        # About 14 letters of this size fit into an inch.
        lines = textwrap.wrap(note, int(14 * figure.get_figwidth()), break_long_words=True)
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=8, color=GREY)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Without software version and date, the same numbers give the same bytes.
    figure.savefig(target, dpi=DPI, format="png", metadata={"Software": None})
    return target


def metric_curve(
    rounds: Sequence[int],
    series: Mapping[str, Sequence[float]],
    path: Path | str,
    references: Mapping[str, float] | None = None,
    metric: str = "accuracy",
    note: str | None = None,
    rows: int | None = None,
) -> Path:
    """Draw a metric over rounds, one line for each series, and return ``path``.

    ``series`` are values by label, in [0, 1] unless a loss, NaN if a round was not evaluated;
    ``references`` are values drawn as horizontal lines, such as that of the untouched backbone. The
    metric ``loss`` is drawn as it is, any other in percent. The note stands above the figure.
    ``rows`` is the number of test rows of an accuracy: a band shows its 95 % interval, so that
    noise is not taken for progress.

    Raises:
        InputError: ``series`` is empty, or the length of one differs from ``rounds``.
    """
    if not series:
        raise InputError("metric_curve: series is empty; at least one line is needed")
    is_loss = metric == "loss"
    figure, axes = new_axes(7.0, 4.2)
    x = np.asarray(rounds, dtype=np.int64)
    for index, (label, values) in enumerate(series.items()):
        y = np.asarray(values, dtype=np.float64)
        if y.shape != x.shape:
            raise InputError(f"metric_curve: {label!r} has {y.size} values for {x.size} rounds")
        evaluated = np.isfinite(y)
        if rows is not None:
            low, high = share_interval(y[evaluated], rows)
            colour = COLOURS[index % len(COLOURS)]
            axes.fill_between(x[evaluated], low, high, color=colour, alpha=0.15, linewidth=0)
            if len(x[evaluated]) == 1:
                axes.vlines(x[evaluated], low, high, color=colour, alpha=0.4)
        axes.plot(
            x[evaluated], y[evaluated], label=label, color=COLOURS[index % len(COLOURS)],
            linestyle=_DASHES[(index // len(COLOURS)) % len(_DASHES)], linewidth=1.6,
            marker=_MARKERS[index % len(_MARKERS)], markersize=4,
            markevery=max(1, int(evaluated.sum()) // 12),
        )  # fmt: skip
    for index, (label, level) in enumerate((references or {}).items()):
        title = f"{label} ({level:.3g})" if is_loss else f"{label} ({level:.1%})"
        dash = _DASHES[1:][index % 3]
        axes.axhline(level, color=GREY, linestyle=dash, linewidth=1.1, label=title, zorder=1)
    axes.set_xlabel("communication round")
    band = "" if rows is None else f"\n(band: 95 % interval for {rows:,} test rows)"
    axes.set_ylabel(metric if is_loss else f"test {metric.replace('_', ' ')}{band}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if not is_loss:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.grid(True, alpha=0.25)
    legend_below(figure, axes)
    return save_figure(figure, path, note)


def share_interval(shares: ArrayLike, rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both ends of the 95 % interval (Wilson 1927) of shares in [0, 1] of ``rows`` rows."""
    p, z = np.asarray(shares, dtype=np.float64), 1.959964
    centre = (p + z**2 / (2 * rows)) / (1 + z**2 / rows)
    half = z / (1 + z**2 / rows) * np.sqrt(p * (1 - p) / rows + z**2 / (4 * rows**2))
    return centre - half, centre + half


def shorten(name: str, letters: int) -> str:
    """Return a name of at most so many letters; the end of a longer one becomes an ellipsis."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def heads_per_layer(
    blocks: Sequence[str],
    heads: Sequence[int],
    path: Path | str,
    norms: Sequence[float] | None = None,
    note: str | None = None,
) -> Path:
    """Draw the number of core heads allocated to each block, and return ``path``.

    Blocks are named from input to output; shared parts at either end of the names are not shown.
    ``norms``, ``||W||_F^2`` of each block's adapted matrices, are drawn on a second axis.

    Raises:
        InputError: ``blocks`` is empty, or the lengths differ.
    """
    if not blocks or len(blocks) != len(heads):
        raise InputError(f"heads_per_layer: {len(blocks)} blocks, {len(heads)} numbers of heads")
    if norms is not None and len(norms) != len(blocks):
        raise InputError(f"heads_per_layer: {len(blocks)} blocks, {len(norms)} norms")
    labels = strip_common_parts(blocks)
    rotate = max(map(len, labels)) * len(labels) > 70
    width = min(14.0, max(4.5, 1.5 + 0.36 * len(labels)))
    figure, axes = new_axes(width, 4.2 if rotate else 3.6)
    mean = float(np.mean(heads))
    bars = axes.bar(range(len(labels)), heads, width=0.72, color=COLOURS[0], zorder=2)
    if len(labels) <= 40:
        axes.bar_label(bars, padding=2, fontsize=9)
    axes.axhline(
        mean, color=COLOURS[1], linestyle="--", linewidth=1.4, label=f"mean {mean:.3g}", zorder=3
    )
    step = max(1, -(-len(labels) // 48))
    ticks = range(0, len(labels), step)
    angle, size = (90, 8) if rotate else (0, 9)
    axes.set_xticks(list(ticks), [labels[i] for i in ticks], rotation=angle, fontsize=size)
    axes.set_xlabel("block, from input to output")
    axes.set_ylabel("heads per adapted matrix")
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(0, max(*heads, mean, 1) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, axis="y", alpha=0.25)
    if norms is not None:
        second = axes.twinx()
        second.plot(
            range(len(labels)), norms, "ko:", markersize=3.5, linewidth=1.0, label="squared norm"
        )
        second.set_ylabel("squared norm of the adapted weights")
        second.set_ylim(0, max(*norms, 1e-12) * 1.15)
        second.spines["top"].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    return save_figure(figure, path, note)


def strip_common_parts(names: Sequence[str]) -> list[str]:
    """Remove from dotted names the parts that all of them share at either end."""
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts))
    start = 0
    while start < shortest - 1 and len({part[start] for part in parts}) == 1:
        start += 1
    end = 0
    while end < shortest - start - 1 and len({part[-1 - end] for part in parts}) == 1:
        end += 1
    return [".".join(part[start : len(part) - end]) for part in parts]


def label_distribution(
    counts: ArrayLike,
    path: Path | str,
    classes: Sequence[str] | None = None,
    what: str = "class",
    note: str | None = None,
) -> Path:
    """Draw the share of every class in each client's rows, and return ``path``.

    ``counts`` are rows per client and class, [C, K]; ``what`` is what a class is called. Up to
    :data:`MAX_COLUMNS` clients have a column each. More are sorted by their most common class and
    shown in groups: mean shares, and mean, smallest and largest number of rows.

    Raises:
        InputError: ``counts`` is not [C, K], is empty or negative, or ``classes`` does not have K
            names.
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
    groups = _group_clients(shares)
    shown = np.stack([shares[group].mean(axis=0) for group in groups])  # [G, K]
    rows_of = [sizes[group] for group in groups]
    mean, low, high = (np.array([f(part) for part in rows_of]) for f in (np.mean, np.min, np.max))

    grouped = clients > MAX_COLUMNS
    width = min(10.0, max(6.0, 2.5 + 0.13 * len(groups)))
    figure = new_figure(width, min(6.5, max(4.0, 2.4 + 0.2 * min(kinds, 20))))
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
    hide_spines(size_axes)
    image = axes.imshow(
        shown.T, aspect="auto", cmap="Blues", vmin=0.0, origin="lower", interpolation="nearest"
    )
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.05)
    bar.set_label("mean share of a client's rows" if grouped else "share of the client's rows")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    axes.set_ylabel(what)
    if classes is not None and kinds <= 25:
        axes.set_yticks(range(kinds), [shorten(name, 18) for name in classes], fontsize=8)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    if grouped:
        members = sorted({len(group) for group in groups})
        span = f"{members[0]}" if len(members) == 1 else f"{members[0]}–{members[-1]}"
        axes.set_xlabel(f"groups of {span} clients, sorted by most common {what}")
        axes.set_xticks([])
        title = f"{clients:,} clients in {len(groups)} groups, {int(rows.sum()):,} rows"
    else:
        axes.set_xlabel("client")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        title = f"{clients} clients, {int(rows.sum()):,} rows"
    size_axes.set_title(title, fontsize=10)
    return save_figure(figure, path, note)


def _group_clients(shares: NDArray[np.float64]) -> list[NDArray[np.intp]]:
    """Return the clients of each column: one, or neighbours when sorted by most common class."""
    clients = shares.shape[0]
    if clients <= MAX_COLUMNS:
        return [np.array([client]) for client in range(clients)]
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    return [np.asarray(part) for part in np.array_split(order, MAX_COLUMNS)]
