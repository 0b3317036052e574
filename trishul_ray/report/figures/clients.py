"""Figures of one run's clients and classes: who has which rows, and who scores how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from trishul_ray.data.partition import LabelCounts
from trishul_ray.errors import InputError
from trishul_ray.report.figures.style import COLOURS, GREY, SMALL, new_panels, set_labels
from trishul_ray.report.outcomes import Row

#: With more clients, the figure of rows shows groups of similar clients.
MAX_COLUMNS = 60
#: With more names, a line of the sorted scores is drawn, without names.
MAX_NAMES = 40
#: Letters of a name that are shown, of a class with its rows and of what has a score.
CLASS_LETTERS, NAME_LETTERS = 18, 24


@dataclass(frozen=True)
class RowsData:
    """The rows of each client by class."""

    held: LabelCounts
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts, names = np.asarray(self.held.counts), self.held.names
        if counts.ndim != 2 or counts.size == 0 or not (counts >= 0).all():
            raise InputError(f"rows of clients {counts.shape} must be [clients, classes], >= 0")
        if len(names) != counts.shape[1]:
            raise InputError(
                f"rows of clients: {len(names)} class names for {counts.shape[1]} classes"
            )

    def describe(self) -> str:
        """Return the numbers of clients and rows in words."""
        counts = self.held.counts
        return f"{len(counts):,} clients, {int(np.sum(counts)):,} rows"

    def rows(self) -> list[Row]:
        """Return one row for each client and class."""
        return [
            {"client": client, "metric": f"rows by {self.held.what}", "series": name, "value": rows}
            for client, counts in enumerate(np.asarray(self.held.counts).tolist())
            for name, rows in zip(self.held.names, counts, strict=True)
        ]


def draw_rows(data: RowsData, note: Sequence[str]) -> Figure:
    """Draw the number of each client's rows, and the share of every class in them.

    Up to :data:`MAX_COLUMNS` clients have a column each. More are sorted by their most common class
    and shown in groups: mean shares, and mean, smallest and largest number of rows.
    """
    counts, what = np.asarray(data.held.counts, dtype=np.float64), data.held.what
    sizes = counts.sum(axis=1)  # [C]
    shares = counts / np.maximum(sizes, 1.0)[:, None]  # [C, K]
    columns = group_clients(shares)
    shown = np.stack([shares[group].mean(axis=0) for group in columns])  # [columns, K]
    rows_of = [sizes[group] for group in columns]
    mean, low, high = (np.array([f(rows) for rows in rows_of]) for f in (np.mean, np.min, np.max))
    grouped, x = len(sizes) > MAX_COLUMNS, np.arange(len(columns))
    figure, (above, axes) = new_panels(2, note, columns=1, height=2.8)
    above.sharex(axes)
    above.tick_params(labelbottom=False)
    if grouped:
        above.fill_between(x, low, high, step="mid", color=GREY, alpha=0.25, linewidth=0)
        above.step(x, mean, where="mid", color="black", linewidth=1.2)
    else:
        above.bar(x, mean, width=0.8, color=GREY)
    above.set_ylim(bottom=0)
    above.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    title = data.describe()
    x_label = "client"
    if grouped:
        members = sorted({len(group) for group in columns})
        span = f"{members[0]}" if len(members) == 1 else f"{members[0]}–{members[-1]}"
        x_label = f"groups of {span} clients, sorted by most common {what}"
        title = title.replace("clients", f"clients in {len(columns)} groups")
        axes.set_xticks([])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.grid(False)
    image = axes.imshow(
        shown.T, aspect="auto", cmap="Blues", vmin=0.0, origin="lower", interpolation="nearest"
    )
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.05)
    bar.set_label("mean share of a client's rows" if grouped else "share of the client's rows")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    if len(data.held.names) <= 25:
        names = [_shorten(name, CLASS_LETTERS) for name in data.held.names]
        axes.set_yticks(range(len(names)), names, fontsize=8)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    set_labels(above, title, "", "rows (mean, range)" if grouped else "rows")
    set_labels(axes, "", x_label, what)
    return figure


def group_clients(shares: NDArray[np.float64]) -> list[NDArray[np.intp]]:
    """Return the clients of each column: one, or neighbours when sorted by most common class."""
    if len(shares) <= MAX_COLUMNS:
        return [np.array([client]) for client in range(len(shares))]
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    return [np.asarray(part) for part in np.array_split(order, MAX_COLUMNS)]


@dataclass(frozen=True)
class ScoresData:
    """Scores in [0, 1] by the name of a ``what``; None, where there are no rows, is not shown."""

    scores: Mapping[str, float | None]
    what: str
    metric: str
    remarks: tuple[str, ...] = ()

    @property
    def ordered(self) -> list[tuple[float, str]]:
        """Scores with their names, the lowest first."""
        return sorted((value, name) for name, value in self.scores.items() if value is not None)

    def describe(self) -> str:
        """Return the mean in words."""
        values = [value for value, _ in self.ordered]
        return f"by {self.what}: {len(values)}, mean {np.mean(values):.1%}"

    def rows(self) -> list[Row]:
        """Return one row for each name."""
        return [{"metric": self.metric, "series": name, "value": v} for v, name in self.ordered]


def draw_scores(data: ScoresData, note: Sequence[str]) -> Figure:
    """Draw a score by name, the lowest first, and their mean."""
    values = np.array([value for value, _ in data.ordered])
    names = [_shorten(name, NAME_LETTERS) for _, name in data.ordered]
    named = len(names) <= MAX_NAMES
    figure, (axes,) = new_panels(1, note, height=max(2.4, 1.2 + 0.2 * len(names)) if named else 3.6)
    places = np.arange(len(names))
    if named:
        axes.hlines(places, 0, values, color=COLOURS[0], linewidth=1.0, alpha=0.5)
        axes.plot(values, places, "o", color=COLOURS[0], markersize=5)
        axes.set_yticks(places, names, fontsize=SMALL)
        axes.invert_yaxis()
    else:
        axes.plot(values, places, color=COLOURS[0], linewidth=1.6)
    axes.axvline(float(values.mean()), color=GREY, linestyle="--", linewidth=1.1)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    y_label = "" if named else f"{data.what}, sorted"
    set_labels(axes, f"{data.describe()} (dashed)", data.metric, y_label)
    return figure


def _shorten(name: str, letters: int) -> str:
    """Return a name of at most so many letters; the end of a longer one becomes an ellipsis."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"
