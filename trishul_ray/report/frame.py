"""Cells of a sweep, and the rounds of their runs, as DataFrames.

Index levels are the axes of the sweep, and labels are in its order. So group by levels:
``rounds_frame(sweep, sweep.cells).groupby(level=["method"], observed=True)``.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from trishul_ray.report.outcomes import CellOutcome, SweepHead, is_loss
from trishul_ray.runtime.lazy import pd

if TYPE_CHECKING:
    from pandas import DataFrame, MultiIndex, Series

CostName = Literal["megabytes", "hours", "epsilon"]


class Cost(NamedTuple):
    """A cost of training: columns of metrics.parquet, their unit, and how the cost is displayed.

    ``adds``: whether the columns are of each round, not of all rounds so far.
    """

    columns: tuple[str, ...]
    unit: float
    adds: bool
    label: str


COSTS: dict[CostName, Cost] = {
    "megabytes": Cost(
        ("uploaded_bytes", "downloaded_bytes"), 1e6, True, "megabytes up and down, all clients"
    ),
    "hours": Cost(("simulated_seconds",), 3600.0, False, "simulated hours"),
    "epsilon": Cost(("privacy_epsilon",), 1.0, False, "ε spent for each client"),
}


def cells_frame(sweep: SweepHead, cells: Sequence[CellOutcome]) -> "DataFrame":
    """Return a row for each cell: its id, status, reason, metric and value (NaN if missing)."""
    rows = [
        (cell.id, cell.status, cell.reason, cell.metric, math.nan if value is None else value)
        for cell in cells
        for value in [cell.value]
    ]
    columns = ["id", "status", "reason", "metric", "value"]
    return pd.DataFrame(rows, _index(sweep, cells), columns)


def rounds_frame(sweep: SweepHead, cells: Sequence[CellOutcome]) -> "DataFrame":
    """Return a row for each round of each finished cell: the numbers of its metrics.parquet.

    ``value`` is the metric that the cell is read by, ``cell`` its place in ``cells``, and each of
    :data:`COSTS` the cost so far (NaN if the run has none).
    """
    places = [place for place, cell in enumerate(cells) for _ in cell.records]
    found = pd.DataFrame([row for cell in cells for row in cell.records], columns=None)
    found.index = _index(sweep, [cells[place] for place in places])
    found["cell"] = places
    found["value"] = np.nan
    for metric in dict.fromkeys(cell.metric for cell in cells if cell.metric in found):
        mask = [cells[place].metric == metric for place in places]
        found.loc[mask, "value"] = found.loc[mask, metric]
    for name, cost in COSTS.items():
        known = found.reindex(columns=list(cost.columns))
        spent = known.sum(axis=1) / cost.unit
        by_cell = spent.groupby(found["cell"].to_numpy())
        so_far = by_cell.cumsum() if cost.adds else by_cell.cummax()
        has_cost = known.notna().any(axis=1).groupby(found["cell"].to_numpy()).transform("any")
        found[name] = so_far.where(has_cost)
    return found


def spent_until(
    sweep: SweepHead,
    cells: Sequence[CellOutcome],
    cost: CostName,
    axis: str,
    reference: str,
    share: float,
) -> "Series":
    """Return each cell's cost until a share of what the reference ends with, by place in ``cells``.

    The reference is the cell with that label on ``axis``, and else the same labels. A loss has to
    fall to the reference's, divided by the share. A target that is missed has an infinite cost,
    an unknown one NaN.
    """
    rounds = rounds_frame(sweep, cells)

    def others(cell: CellOutcome) -> tuple[str, ...]:
        return tuple(label for name, label in cell.labels.items() if name != axis)

    finals = {others(cell): cell.value for cell in cells if cell.labels.get(axis) == reference}
    found = []
    for place, cell in enumerate(cells):
        scored = rounds[rounds["cell"] == place].dropna(subset=["value", cost])
        final = finals.get(others(cell))
        if final is None or cell.value is None or scored.empty:
            found.append(math.nan)
            continue
        loss = is_loss(cell.metric)
        reached = scored["value"] <= final / share if loss else scored["value"] >= final * share
        found.append(float(scored.loc[reached, cost].min()) if reached.any() else math.inf)
    return pd.Series(found, dtype=float)


def _index(sweep: SweepHead, cells: Sequence[CellOutcome]) -> "MultiIndex":
    axes = {axis: [*labels] for axis, labels in sweep.axes.items()} or {"": [""]}
    levels = [
        pd.Categorical([cell.labels.get(axis, "") for cell in cells], [*dict.fromkeys(labels)])
        for axis, labels in axes.items()
    ]
    return pd.MultiIndex.from_arrays(levels, names=list(axes))
