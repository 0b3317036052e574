"""Figures over what training costs: megabytes sent, simulated hours, energy, privacy."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from trishul_ray.report.costs import COSTS, Targets, assumed, costs_by_round
from trishul_ray.report.figures.curves import CurveData, Line, Panel, metric_of, spread_remark
from trishul_ray.report.figures.selection import Band, Selection
from trishul_ray.report.figures.style import INK, SMALL, new_panels, set_labels, styles_of
from trishul_ray.report.outcomes import CellOutcome, Row


def metric_over_cost(selection: Selection) -> CurveData | None:
    """Collect the metric over what was spent so far: a panel for each of ``panels``.

    A point is a round: the means over seeds of its cost and of its metric.
    """
    cost, series = selection.options["cost"], selection.axes("series")
    panels, without, points = [], [], []
    for panel in selection.groups(selection.axes("panels")):
        lines = []
        for group in selection.groups(series, panel):
            found: dict[int, list[tuple[float, float]]] = {}
            for cell in group.cells:
                rounds = costs_by_round(cell, cost)
                without += [] if rounds else [cell]
                for number, spent, value in rounds:
                    found.setdefault(number, []).append((spent, value))
            if found:
                points.append(group.cells)
                means = [float(np.mean([spent for spent, _ in at])) for at in found.values()]
                bands = [Band.of_runs([value for _, value in at]) for at in found.values()]
                nothing = (math.nan,) * len(means)
                lines.append(Line(group.name, tuple(means), tuple(bands), nothing))
        if lines:
            metric, percent = metric_of(panel.cells)
            panels.append(Panel(panel.name, metric, tuple(lines), percent))
    if not panels:
        return None
    several = any(b.count > 1 for panel in panels for line in panel.lines for b in line.y)
    pooled = selection.pooled(points)
    remarks = [spread_remark("line and band", pooled)] * several
    remarks += [*assumed(selection.finished, cost), *pooled]
    if without:
        remarks.append(f"without this cost: {'; '.join(selection.names(without))}")
    names = tuple(group.name for group in selection.groups(series))
    return CurveData(tuple(panels), COSTS[cost].label, "amount", names, tuple(remarks))


@dataclass(frozen=True)
class Reached:
    """Amount that a series has spent when it first reaches a target.

    Attributes:
        cost: Over the seeds that reach it; None if none does.
        runs: Number of seeds.
    """

    panel: str
    series: str
    share: float
    cost: Band | None
    runs: int


@dataclass(frozen=True)
class TargetData:
    """Costs to reach shares of what the reference ends with; ``names`` are all series."""

    cost: str
    reference: str
    names: tuple[str, ...]
    cells: tuple[Reached, ...]
    remarks: tuple[str, ...]

    def describe(self) -> str:
        """Return the costs in words."""
        return "; ".join(
            f"{cell.panel} {cell.series} to {cell.share:.0%}: {self.text(cell)}".strip()
            for cell in self.cells
        )

    def text(self, cell: Reached) -> str:
        """Return a cost with its unit, and how many seeds reach the target if not all do."""
        if cell.cost is None:
            return "not reached"
        some = f", {cell.cost.count} of {cell.runs} seeds" * (cell.cost.count < cell.runs)
        return f"{cell.cost.centre:.3g} {COSTS[self.cost].short}{some}"

    def rows(self) -> list[Row]:
        """Return one row for each series and target."""
        label = COSTS[self.cost].label
        nothing = {"value": math.nan, "low": math.nan, "high": math.nan, "n": 0}
        return [
            {"panel": c.panel, "series": c.series, "target": c.share, "metric": label}
            | (c.cost.row() if c.cost else nothing)
            | {"runs": c.runs}
            for c in self.cells
        ]


def cost_to_target(selection: Selection) -> TargetData | None:
    """Collect what each series spends until it reaches shares of the reference's final metric.

    The reference is the first label of the series, or the option ``reference``; targets are those
    of the same seed. A loss has to fall to the reference's, divided by the share.
    """
    options, series = selection.options, selection.axes("series")
    groups = selection.groups(series)
    names = tuple(group.name for group in groups)
    reference = options["reference"] or names[0]
    axes = selection.run_axes(series)
    cells: list[Reached] = []
    points: list[Sequence[CellOutcome]] = []
    for panel in selection.groups(selection.axes("panels")):
        by_name = {group.name: group for group in selection.groups(series, panel)}
        points += [group.cells for group in by_name.values()]
        first = by_name.get(reference)
        targets = Targets(first.cells if first else (), axes, options["cost"])
        for share in options["shares"]:
            for name, group in by_name.items():
                spent = [targets.spent(cell, share) for cell in group.cells]
                known = [each for each in spent if each is not None]
                costs = [each for each in known if math.isfinite(each)]
                if known:
                    band = Band.of_runs(costs) if costs else None
                    cells.append(Reached(panel.name, name, share, band, len(known)))
    if not cells:
        return None
    remarks = [
        f"targets: shares of what {reference} ends with, for each seed",
        "mean over the seeds that reach it; line: ± standard deviation",
        *assumed(selection.finished, options["cost"]),
        *selection.pooled(points),
    ]
    return TargetData(options["cost"], reference, names, tuple(cells), tuple(remarks))


def draw_targets(data: TargetData, note: Sequence[str]) -> Figure:
    """Draw a panel of horizontal bars for each target, with the costs in figures."""
    places = list(dict.fromkeys((cell.panel, cell.share) for cell in data.cells))
    figure, panels = new_panels(len(places), note, height=0.9 + 0.32 * len(data.names))
    styles = styles_of(data.names)
    most = max([c.cost.high for c in data.cells if c.cost] or [1.0]) or 1.0
    for axes, (title, share) in zip(panels, places, strict=True):
        for cell in data.cells:
            if (cell.panel, cell.share) != (title, share):
                continue
            y, style = len(data.names) - 1 - data.names.index(cell.series), styles[cell.series]
            end = 0.0
            if cell.cost:
                end = cell.cost.high
                axes.barh(
                    y, cell.cost.centre, height=0.7, color=style.colour, alpha=0.75,
                    hatch=style.hatch, edgecolor="white",
                )  # fmt: skip
                axes.hlines(y, cell.cost.low, cell.cost.high, color=INK, linewidth=1.2)
            axes.annotate(
                data.text(cell), (end, y), (4.0, 0.0), textcoords="offset points", fontsize=SMALL,
                color=INK, ha="left", va="center",
            )  # fmt: skip
        labels = ["\n".join(textwrap.wrap(name, 24)) for name in reversed(data.names)]
        axes.set_yticks(range(len(data.names)), labels)
        axes.set_ylim(-0.6, len(data.names) - 0.4)
        axes.set_xlim(0, 1.45 * most)
        axes.grid(False, axis="y")
        head = f"to {share:.0%} of {data.reference}"
        set_labels(axes, f"{title}: {head}" if title else head, COSTS[data.cost].label, "")
    return figure
