"""Cells of a sweep, and the rounds of their runs, as DataFrames.

Index levels are the axes of the sweep, and labels are in its order. So group by levels:
``rounds_frame(sweep, sweep.cells).groupby(level=["method"], observed=True)``.
"""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from trishul_ray.errors import CorruptFileError
from trishul_ray.report.layouts import CostName, EvalShare, TableLayout, Target
from trishul_ray.report.outcomes import EVALUATION, CellOutcome, SweepHead, is_loss, unit_of
from trishul_ray.runtime.lazy import pd
from trishul_ray.storage.integrity import from_checked_json

if TYPE_CHECKING:
    from pandas import DataFrame, MultiIndex

#: Symbols of fields next to a numeric label.
_SYMBOLS = {"alpha": "α", "lam": "λ"}


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


def shown_frame(
    sweep: SweepHead, cells: Sequence[CellOutcome], layout: TableLayout
) -> tuple["DataFrame", str]:
    """Return the cells that a table shows, and the quantity that it shows of them.

    In addition to the columns of :func:`cells_frame`, ``gap`` is the reason of a missing value,
    ``unit`` the unit, and ``shown`` the value in this unit.
    """
    found = cells_frame(sweep, cells)
    found["unit"] = [unit_of(metric) for metric in found["metric"]]
    found["gap"] = found["status"].where(found["status"] != "finished", "not measured")
    names = " and ".join(metric.replace("_", " ") for metric in dict.fromkeys(found["metric"]))
    label = f"{names}, %" if (found["unit"] == "%").any() else names
    if (target := layout.target) is not None:
        found["value"] = spent_until(sweep, cells, target)
        found.loc[np.isinf(found["value"]), "gap"] = "not reached"
        found["value"] = found["value"].replace(math.inf, math.nan)
        found["metric"] = found["unit"] = target.cost
        reference = sweep.shown_label(target.axis, target.reference)
        label = f"{COSTS[target.cost].label} until {target.share:.0%} of what {reference} ends with"
    if (score := layout.eval) is not None:
        answers = [_evaluation(cell) for cell in cells]
        found["value"] = [each.get(score.model, {}).get(score.score, math.nan) for each in answers]
        found.loc[_asked_otherwise(answers), ["value", "gap"]] = math.nan, "asked otherwise"
        found["metric"] = score.score
        found["unit"] = "%" if score.score in get_args(EvalShare) else "loss"
        name = score.score.replace("_", " ")
        label = f"{name} of generated answers, {score.model}"
        label += ", %" if score.score in get_args(EvalShare) else ""
    found["shown"] = found["value"] * np.where(found["unit"] == "%", 100.0, 1.0)
    found["gap"] = found["gap"].where(found["value"].isna(), "")
    return found, label


def spent_until(sweep: SweepHead, cells: Sequence[CellOutcome], target: Target) -> list[float]:
    """Return each cell's cost until a share of what the reference ends with.

    The reference is the cell with its label on the axis, and else the same labels. A loss has to
    fall to the reference's, divided by the share. The cost is infinite if the target is missed, and
    NaN if it is unknown.
    """
    rounds = rounds_frame(sweep, cells).dropna(subset=["value", target.cost])

    def others(cell: CellOutcome) -> tuple[str, ...]:
        return tuple(label for name, label in cell.labels.items() if name != target.axis)

    references = [cell for cell in cells if cell.labels[target.axis] == target.reference]
    finals = {others(cell): cell.value for cell in references}
    found = []
    for place, cell in enumerate(cells):
        scored, final = rounds[rounds["cell"] == place], finals.get(others(cell))
        if final is None or cell.value is None or scored.empty:
            found.append(math.nan)
            continue
        loss, value = is_loss(cell.metric), scored["value"]
        reached = value <= final / target.share if loss else value >= final * target.share
        found.append(float(scored.loc[reached, target.cost].min()) if reached.any() else math.inf)
    return found


def _evaluation(cell: CellOutcome) -> dict[str, Any]:
    """Return the content of eval.json of a cell's run; empty if it was not evaluated.

    Raises:
        CorruptFileError: The file is damaged.
    """
    if cell.summary is None or not cell.home.exists(EVALUATION):
        return {}
    try:
        found = from_checked_json(cell.home.read(EVALUATION), cell.home.place(EVALUATION))
    except CorruptFileError as error:
        again = f"trishul eval {cell.home.uri} makes it again"
        raise CorruptFileError(f"{error}; {again}") from None
    # It may be of a run that has started over since.
    return found if found["state_sha256"] == cell.summary.state_sha256 else {}


def _asked_otherwise(answers: Sequence[dict[str, Any]]) -> list[bool]:
    """Return which evaluations are of other rows, or by another limit, than most on their data."""
    fields = ("split", "rows_sha256", "new_tokens", "answer_pattern")
    asked = [str([each.get(name) for name in fields]) if each else "" for each in answers]
    data = [str(each.get("sources")) for each in answers]
    usual = {}
    for name in dict.fromkeys(data):
        mine = [ask for ask, its in zip(asked, data, strict=True) if ask and its == name]
        usual[name] = max(mine, key=mine.count, default="")
    return [bool(ask) and ask != usual[name] for ask, name in zip(asked, data, strict=True)]


def shown_label(sweep: SweepHead, axis: str, label: str) -> str:
    """Return how a label is displayed; a numeric label follows its axis."""
    shown = sweep.shown_label(axis, label)
    is_number = shown == label and re.fullmatch(r"[-+.e\d]*\d[-+.e\d]*", label) is not None
    return f"{_SYMBOLS.get(axis.rpartition('.')[2], axis)} = {label}" if is_number else shown


def _index(sweep: SweepHead, cells: Sequence[CellOutcome]) -> "MultiIndex":
    axes = {axis: [*labels] for axis, labels in sweep.axes.items()} or {"": [""]}
    levels = [
        pd.Categorical([cell.labels.get(axis, "") for cell in cells], [*dict.fromkeys(labels)])
        for axis, labels in axes.items()
    ]
    return pd.MultiIndex.from_arrays(levels, names=list(axes))
