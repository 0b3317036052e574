"""Charts of one run's clients and classes: who has which rows, and who scores how."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trishul_ray.data.partition import LabelCounts
from trishul_ray.report.figures.chart import Axis, Chart, Panel, Row

#: With more clients, the figure of rows shows groups of similar clients.
MAX_COLUMNS = 60
#: With more names, a line of the sorted scores is drawn, without names.
MAX_NAMES = 40


def rows_of_clients(held: LabelCounts) -> Chart:
    """Return the number of each client's rows, and the share of every class in them.

    Up to :data:`MAX_COLUMNS` clients have a column each. More are sorted by their most common class
    and shown in groups: mean shares, and mean, smallest and largest number of rows.
    """
    counts, names = np.asarray(held.counts, dtype=np.float64), held.names
    sizes = counts.sum(axis=1)  # [C]
    shares = counts / np.maximum(sizes, 1.0)[:, None]  # [C, K]
    columns = group_clients(shares)
    grouped = len(sizes) > MAX_COLUMNS
    clients, label = f"{len(sizes):,} clients", "client"
    if grouped:
        members = sorted({len(group) for group in columns})
        span = f"{members[0]}" if len(members) == 1 else f"{members[0]}–{members[-1]}"
        label = f"groups of {span} clients, sorted by most common {held.what}"
        clients += f" in {len(columns)} groups"
    totals = [
        Row(value=float(rows.mean()), low=float(rows.min()), high=float(rows.max()), x=place,
            series="rows", metric="rows")
        for place, rows in enumerate(sizes[group] for group in columns)
    ]  # fmt: skip
    means = [shares[group].mean(axis=0) for group in columns]
    parts = [
        Row(value=float(mean[k]), x=place, y=name, metric="share")
        for k, name in enumerate(names)
        for place, mean in enumerate(means)
    ]
    whole = "mean share of a client's rows" if grouped else "share of the client's rows"
    share = Axis(whole, percent=True)
    y = Axis("rows (mean, range)" if grouped else "rows", "whole")
    title = f"{clients}, {int(counts.sum()):,} rows"
    panels = (
        Panel(tuple(totals), "bar", title, Axis("", "names"), y),
        Panel(
            tuple(parts), "heatmap", "", Axis(label, "names"), Axis(held.what, "names"),
            colours=share, palette="Blues",
        ),
    )  # fmt: skip
    return Chart(panels, ("rows",), across=1, height=2.8)


def group_clients(shares: NDArray[np.float64]) -> list[NDArray[np.intp]]:
    """Return the clients of each column: one, or neighbours when sorted by most common class."""
    if len(shares) <= MAX_COLUMNS:
        return [np.array([client]) for client in range(len(shares))]
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    return [np.asarray(part) for part in np.array_split(order, MAX_COLUMNS)]


def scores_by_name(scores: Mapping[str, float | None], what: str, metric: str) -> Chart:
    """Return scores in [0, 1] by the name of a ``what``, the lowest first, and their mean.

    None, where there are no rows, is not shown.
    """
    ordered = sorted((value, name) for name, value in scores.items() if value is not None)
    mean = float(np.mean([value for value, _ in ordered]))
    rows = tuple(
        Row(value=value, series=name, metric=metric, x=place, n=1)
        for place, (value, name) in enumerate(ordered)
    )
    title = f"by {what}: {len(rows)}, mean {mean:.1%}"
    if len(rows) <= MAX_NAMES:
        x = Axis(metric, percent=True)
        panel = Panel(
            rows, "bar", f"{title} (dashed)", x, levels={"": mean}, dots=True, sideways=True
        )
        return Chart((panel,), (what,), height=max(2.4, 1.2 + 0.2 * len(rows)))
    y, x = Axis(metric, percent=True), Axis(f"{what}, sorted", "whole")
    panel = Panel(rows, "line", f"{title} (dotted)", x, y, levels={"": mean}, by="metric")
    return Chart((panel,), (metric,), height=3.6)
