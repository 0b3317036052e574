"""Load the cells of a sweep, and the rounds of their runs, into DataFrames.

The axes of the sweep are index levels, with labels in the order of the sweep file, for example
``rounds_frame(sweep, sweep.cells).groupby(level=["method"], observed=True)``.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from pydantic import TypeAdapter, ValidationError

from trishul_ray.errors import CorruptFileError
from trishul_ray.report.layouts import CostName, EvalShare, TableLayout, Target
from trishul_ray.report.outcomes import CellOutcome, SweepHead, is_loss, unit_of
from trishul_ray.report.summary import EVALUATION
from trishul_ray.runtime.lazy import pd
from trishul_ray.storage.integrity import from_checked_json

if TYPE_CHECKING:
    from pandas import DataFrame, MultiIndex

#: Validates the scores of the evaluated models in eval.json; a nested dictionary has the groups.
_SCORES = TypeAdapter(list[dict[str, float | dict[str, Any] | None]])
#: Reason for excluding a cell whose stack differs from the stack of most cells.
OTHER_STACK = "other stack"
#: Displayed names of numeric axes, keyed by the last part of the field.
_SYMBOLS = {"alpha": "α", "lam": "λ"}


class Cost(NamedTuple):
    """A training cost: the sum of columns of metrics.parquet, divided by ``unit``.

    If ``adds`` is true, the columns are per round; otherwise, they are cumulative.
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
    "epsilon": Cost(("privacy_epsilon",), 1.0, False, "ε spent per client"),
}


def rounds_frame(sweep: SweepHead, cells: Sequence[CellOutcome]) -> "DataFrame":
    """Load metrics.parquet of all finished cells, one row per cell and round.

    Added columns: ``value`` is the metric of the cell, ``cell`` its position in ``cells``, and each
    of :data:`COSTS` the cumulative cost (NaN if the run does not record it).
    """
    rows = [
        {**row, "cell": place, "value": row.get(cell.metric, math.nan)}
        for place, cell in enumerate(cells)
        if cell.status == "finished"
        for row in cell.records
    ]
    found = pd.DataFrame(rows, columns=None if rows else ["cell", "round", "value"])
    found.index = _index(sweep, [cells[place] for place in found["cell"]])
    by_cell = found["cell"].to_numpy()
    for name, cost in COSTS.items():
        known = found.reindex(columns=list(cost.columns))
        spent = (known.sum(axis=1) / cost.unit).groupby(by_cell)
        has_cost = known.notna().any(axis=1).groupby(by_cell).transform("any")
        found[name] = (spent.cumsum() if cost.adds else spent.cummax()).where(has_cost)
    return found


def cells_frame(
    sweep: SweepHead, cells: Sequence[CellOutcome], layout: TableLayout
) -> tuple["DataFrame", str]:
    """Load the values of a table, one row per cell, and name the displayed quantity.

    ``value`` is the quantity, ``shown`` the value in its ``unit``, and ``gap`` the reason for a
    missing value, or an empty string.
    """
    rows = [(each.id, each.status, each.reason, each.metric, each.value) for each in cells]
    columns = ["id", "status", "reason", "metric", "value"]
    found = pd.DataFrame(rows, _index(sweep, cells), columns).astype({"value": float})
    found["unit"] = [unit_of(metric) for metric in found["metric"]]
    found["gap"] = found["status"].where(found["status"] != "finished", "not measured")
    units = dict(zip(found["metric"], found["unit"], strict=True))
    mixed = len({unit == "%" for unit in units.values()}) > 1
    label = " and ".join(
        metric.replace("_", " ") + " (%)" * (mixed and unit == "%")
        for metric, unit in units.items()
    )
    if (target := layout.target) is not None:
        found["value"] = spent_until(sweep, cells, target)
        found.loc[np.isinf(found["value"]), "gap"] = "not reached"
        found["value"] = found["value"].replace(math.inf, math.nan)
        found["metric"] = found["unit"] = target.cost
        reference = sweep.title_of(target.axis, target.reference)
        goal = f"{target.share:.0%} of {reference}'s final score"
        if any(map(is_loss, units)):
            goal = f"within {1 / target.share - 1:.2%} of {reference}'s final loss"
        label = f"{COSTS[target.cost].label} until {goal}"
    if (score := layout.eval) is not None:
        evaluations = [_evaluation(cell) for cell in cells]
        scores = [each.get(score.model, {}).get(score.score, math.nan) for each in evaluations]
        found["value"], found["metric"] = scores, score.score
        found["unit"] = "%" if score.score in get_args(EvalShare) else "loss"
        found.loc[_differently_evaluated(evaluations), ["value", "gap"]] = (
            math.nan, "evaluated differently",
        )  # fmt: skip
        label = f"{score.score.replace('_', ' ')} of generated answers, {score.model}"
    others = stack_differences(sweep, cells)
    found.loc[[place in others for place in range(len(cells))], ["value", "gap"]] = (
        math.nan, OTHER_STACK,
    )  # fmt: skip
    is_percent = found["unit"] == "%"
    found["shown"] = found["value"] * np.where(is_percent, 100.0, 1.0)
    found["gap"] = found["gap"].where(found["value"].isna(), "")
    return found, f"{label}, %" if is_percent.all() else label


def spent_until(sweep: SweepHead, cells: Sequence[CellOutcome], target: Target) -> list[float]:
    """Compute the cost of each cell until it reaches a fraction of its reference's last score.

    The reference has the label ``target.reference`` on ``target.axis``, and equal labels on all
    other axes. A loss must fall to the loss of the reference divided by the fraction.

    Returns:
        The costs [cells]: infinite if the cell misses the target, NaN if the cost is unknown.
    """
    rounds = rounds_frame(sweep, cells).dropna(subset=["value", target.cost])
    finals = {
        tuple(cell.labels.items()): cell.value
        for cell in cells
        if cell.labels[target.axis] == target.reference
    }
    found = []
    for place, cell in enumerate(cells):
        scored = rounds[rounds["cell"] == place]
        labels = {**cell.labels, target.axis: target.reference}
        final = finals.get(tuple(labels.items()))
        if final is None or scored.empty:
            found.append(math.nan)
            continue
        loss, value = is_loss(cell.metric), scored["value"]
        reached = value <= final / target.share if loss else value >= final * target.share
        found.append(float(scored.loc[reached, target.cost].min()) if reached.any() else math.inf)
    return found


def stack_differences(sweep: SweepHead, cells: Sequence[CellOutcome]) -> dict[int, str]:
    """Find cells whose stack differs from the stack of most cells.

    Returns:
        The difference, keyed by the position of the cell. Empty if ``mixed_stacks`` of the sweep
        allows different stacks.
    """
    stacks = {
        place: tuple(cell.summary.stacks)
        for place, cell in enumerate(cells)
        if cell.status == "finished" and cell.summary is not None
    }
    if sweep.mixed_stacks or len({*stacks.values()}) < 2:
        return {}
    usual = Counter(stacks.values()).most_common(1)[0][0]
    return {
        place: next(filter(None, (a.difference(b) for a in own for b in usual)), "no stack")
        for place, own in stacks.items()
        if own != usual
    }


def _evaluation(cell: CellOutcome) -> Mapping[str, Any]:
    """Load eval.json of a cell's run; empty if it evaluates another result or does not exist."""
    if cell.summary is None or not cell.home.exists(EVALUATION):
        return {}
    place = cell.home.place(EVALUATION)
    found = from_checked_json(cell.home.read(EVALUATION), place)
    try:
        _SCORES.validate_python([found[name] for name in ("tuned", "untuned") if name in found])
    except ValidationError as error:
        raise CorruptFileError(
            f"{place} has invalid fields ({error.errors()[0]['msg']})"
        ) from error
    return found if found.get("state_sha256") == cell.summary.state_sha256 else {}


def _differently_evaluated(evaluations: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Mark evaluations whose rows or limits differ from most evaluations on the same data."""
    fields = ("split", "rows_sha256", "new_tokens", "answer_pattern", "scores")
    known = pd.DataFrame(
        [
            (place, json.dumps(each.get("sources")), json.dumps([each.get(f) for f in fields]))
            for place, each in enumerate(evaluations)
            if each
        ],
        columns=["place", "sources", "options"],
    )
    usual = known.groupby("sources")["options"].transform(lambda each: each.value_counts().index[0])
    different = {*known.loc[known["options"] != usual, "place"]}
    return [place in different for place in range(len(evaluations))]


def title_of(sweep: SweepHead, axis: str, label: str) -> str:
    """Return the displayed text of a label, such as ``λ = 0.1`` if it is a number."""
    shown = sweep.title_of(axis, label)
    is_number = shown == label and re.fullmatch(r"[-+.e\d]*\d[-+.e\d]*", label) is not None
    return f"{_SYMBOLS.get(axis.rpartition('.')[2], axis)} = {label}" if is_number else shown


def _index(sweep: SweepHead, cells: Sequence[CellOutcome]) -> "MultiIndex":
    axes = {axis: [*labels] for axis, labels in sweep.axes.items()} or {"": [""]}
    levels = [
        pd.Categorical([cell.labels.get(axis, "") for cell in cells], [*dict.fromkeys(labels)])
        for axis, labels in axes.items()
    ]
    return pd.MultiIndex.from_arrays(levels, names=list(axes))
