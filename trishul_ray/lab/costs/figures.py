"""Figures over the costs of training: megabytes sent, simulated hours, energy, privacy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trishul_ray.lab.costs.costs import COSTS, CostName, Targets, assumed, costs_by_round
from trishul_ray.report.figures.chart import NUMBER, Axis, Band, Chart, Panel, Row
from trishul_ray.report.figures.kind import BY_DATASET, BY_METHOD, FIGURES, FigureKind
from trishul_ray.report.figures.kinds.curves import OverField, metric_of, spread_remark
from trishul_ray.report.figures.selection import Selection
from trishul_ray.report.outcomes import CellOutcome

_COST = BY_METHOD | BY_DATASET | {"cost": "megabytes"}


class CostFigure(FigureKind):
    """A figure of a cost."""

    def problem(self, option: str, value: Any) -> str | None:
        """Check cost, reference and shares."""
        if option == "cost":
            return None if value in COSTS else f"must be one of {', '.join(COSTS)}"
        if option == "reference":
            known = value is None or isinstance(value, str)
            return None if known else "must be a label of the series"
        fits = isinstance(value, list | tuple) and len(value) > 0
        fits = fits and all(isinstance(v, int | float) and 0 < v <= 1 for v in value)
        return None if fits else "must be a list of shares, above 0 and at most 1"


@FIGURES.register("cost")
class MetricOverCost(CostFigure):
    """The metric over the cost so far: a panel for each of ``panels``.

    A point is a round: the means over seeds of its cost and of its metric.
    """

    options = _COST

    def chart(self, selection: Selection) -> Chart | None:
        """Return a line for each series."""
        cost, series = selection.options["cost"], selection.axes("series")
        x = Axis(COSTS[cost].label)
        panels: list[Panel] = []
        without: list[CellOutcome] = []
        points = []
        for panel in selection.groups(selection.axes("panels")):
            metric, percent = metric_of(panel.cells)
            rows: list[Row] = []
            for group in selection.groups(series, panel):
                found: dict[int, list[tuple[float, float]]] = {}
                for cell in group.cells:
                    rounds = costs_by_round(cell, cost)
                    without += [] if rounds else [cell]
                    for number, spent, value in rounds:
                        found.setdefault(number, []).append((spent, value))
                points += [group.cells] * bool(found)
                for at in found.values():
                    costs, values = zip(*at, strict=True)
                    place = {"panel": panel.name, "metric": metric, "series": group.name}
                    rows.append(Row.of(Band.of_runs(values), x=float(np.mean(costs)), **place))
            if rows:
                y = Axis(metric, percent=percent)
                panels.append(Panel(tuple(rows), title=panel.name, x=x, y=y))
        if not panels:
            return None
        several = any((row.n or 0) > 1 for panel in panels for row in panel.rows)
        pooled = selection.pooled(points)
        remarks = [spread_remark("line and band", pooled)] * several
        remarks += [*assumed(selection.finished, cost), *pooled]
        if without:
            remarks.append(f"without this cost: {'; '.join(selection.names(without))}")
        names = tuple(group.name for group in selection.groups(series))
        return Chart(tuple(panels), names, remarks=tuple(remarks))


@dataclass(frozen=True, kw_only=True)
class TargetRow(Row):
    """A cost over the seeds that reach a target, of so many."""

    runs: int


_COLUMNS = {"panel": "panel", "series": "series", "target": "x", "metric": "metric"}
_COLUMNS |= {**NUMBER, "runs": "runs"}


@FIGURES.register("cost_to_target")
class CostToTarget(CostFigure):
    """The cost until each series reaches shares of the reference's final metric.

    The reference is the first label of the series, or the option ``reference``; targets are those
    of the same seed. A loss has to fall to the reference's, divided by the share.
    """

    options = _COST | {"reference": None, "shares": (0.9, 0.95, 0.99)}

    def chart(self, selection: Selection) -> Chart | None:
        """Return a panel of bars for each target, with the costs in figures."""
        options, series = selection.options, selection.axes("series")
        names = tuple(group.name for group in selection.groups(series))
        reference, cost = options["reference"] or names[0], options["cost"]
        axes = selection.run_axes(series)
        panels: list[Panel] = []
        points: list[Sequence[CellOutcome]] = []
        for panel in selection.groups(selection.axes("panels")):
            by_name = {group.name: group for group in selection.groups(series, panel)}
            points += [group.cells for group in by_name.values()]
            first = by_name.get(reference)
            targets = Targets(first.cells if first else (), axes, cost)
            for share in options["shares"]:
                spent = {
                    name: [targets.spent(cell, share) for cell in group.cells]
                    for name, group in by_name.items()
                }
                rows = [
                    _row(cost, known, panel=panel.name, series=name, x=share)
                    for name, each in spent.items()
                    if (known := [value for value in each if value is not None])
                ]
                if rows:
                    head = f"to {share:.0%} of {reference}"
                    title = f"{panel.name}: {head}" if panel.name else head
                    label = Axis(COSTS[cost].label)
                    panels.append(Panel(tuple(rows), "bar", title, label, sideways=True))
        if not panels:
            return None
        remarks = (
            f"targets: shares of what {reference} ends with, for each seed",
            "mean over the seeds that reach it; line: ± standard deviation",
            *assumed(selection.finished, cost),
            *selection.pooled(points),
        )
        height = 0.9 + 0.32 * len(names)
        return Chart(tuple(panels), names, _COLUMNS, remarks, height=height)


def _row(cost: CostName, spent: Sequence[float], **place: Any) -> TargetRow:
    """Return the mean cost of the runs that reach a target; infinite is one that does not."""
    costs = [value for value in spent if math.isfinite(value)]
    place |= {"metric": COSTS[cost].label, "runs": len(spent)}
    if not costs:
        return TargetRow(value=math.nan, n=0, text="not reached", **place)
    band = Band.of_runs(costs)
    some = f", {len(costs)} of {len(spent)} seeds" * (len(costs) < len(spent))
    text = f"{band.centre:.3g} {COSTS[cost].short}{some}"
    return TargetRow(
        value=band.centre, low=band.low, high=band.high, n=band.count, text=text, **place
    )


@FIGURES.register("privacy")
class OverEpsilon(OverField):
    """The final metric over ε; runs without noise lie beyond every ε."""

    options = BY_METHOD | BY_DATASET | {"x": "privacy.epsilon"}
    fields: ClassVar[Mapping[str, Axis]] = {
        "privacy.epsilon": Axis("ε for each client (∞: no noise)", "strength")
    }

    def place(self, cell: CellOutcome, field: str) -> float | None:
        """Return ε: None without privacy, and that of the last round if noise was set."""
        value, private = super().place(cell, field), cell.result.reports.get("privacy")
        if field == "privacy.epsilon" and value is None and private is not None:
            return float(private["epsilon"] or math.inf)  # none without noise
        return value
