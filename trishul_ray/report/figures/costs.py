"""Figures over what training costs: megabytes sent, simulated hours, energy, privacy."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from trishul_ray.edge.devices import DevicesConfig
from trishul_ray.edge.fleet import clock_line
from trishul_ray.report.figures import COSTS
from trishul_ray.report.figures.curves import BAND, CurveData, Line, Panel, metric_of
from trishul_ray.report.figures.selection import Band, Group, Selection, records_of
from trishul_ray.report.figures.style import INK, SMALL, new_panels, set_labels, styles_of
from trishul_ray.report.outcomes import CellOutcome, is_loss


def _assumed(selection: Selection, cost: str) -> list[str]:
    """Return what simulated costs rest on: the defaults of our own, for each setting of devices."""
    if not COSTS[cost].simulated:
        return []
    sections = [cell.result.config.get("devices", {}) for cell in selection.finished]
    lines = [clock_line(DevicesConfig.model_validate(section)) for section in sections]
    return list(dict.fromkeys(line for line in lines if line))


def _rounds(cell: CellOutcome, cost: str) -> list[tuple[int, float, float]]:
    """Return the scored rounds of a cell that have this cost: round, cost so far, metric."""
    columns, unit, adds = COSTS[cost].columns, COSTS[cost].unit, COSTS[cost].adds
    spent, found = 0.0, []
    for record in records_of(cell):
        values = [float(record[name]) for name in columns if name in record]
        # What no round has named yet is free; a run without the column has no cost at all.
        spent = math.fsum([spent, *values]) if adds else max([spent, *values])
        if cell.metric in record:
            found.append((int(record["round"]), spent / unit, float(record[cell.metric])))
    return found if spent > 0 else []


def metric_over_cost(selection: Selection) -> CurveData | None:
    """Collect the metric over what was spent so far: a panel for each of ``panels``.

    A point is a round: the means over seeds of its cost and of its metric.
    """
    cost, series = selection.options["cost"], selection.axes("series")
    panels, without = [], []
    for panel in selection.groups(selection.axes("panels")):
        lines = []
        for group in selection.groups(series, panel):
            found: dict[int, list[tuple[float, float]]] = {}
            for cell in group.cells:
                rounds = _rounds(cell, cost)
                without += [] if rounds else [cell]
                for number, spent, value in rounds:
                    found.setdefault(number, []).append((spent, value))
            if found:
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
    remarks = [BAND] * several + _assumed(selection, cost)
    if without:
        remarks.append(f"without this cost: {'; '.join(selection.names(without))}")
    names = tuple(group.name for group in selection.groups(series))
    return CurveData(tuple(panels), COSTS[cost].label, "amount", names, tuple(remarks))


@dataclass(frozen=True)
class Reached:
    """What a series has spent when it first reaches a target.

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

    def rows(self) -> list[dict[str, Any]]:
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
    for panel in selection.groups(selection.axes("panels")):
        by_name = {group.name: group for group in selection.groups(series, panel)}
        finals = _finals(by_name.get(reference), axes)
        for share in options["shares"]:
            for name, group in by_name.items():
                spent = [_spent(c, finals, axes, share, options["cost"]) for c in group.cells]
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
        *_assumed(selection, options["cost"]),
    ]
    return TargetData(options["cost"], reference, names, tuple(cells), tuple(remarks))


def _finals(group: Group | None, axes: Sequence[str]) -> dict[tuple[str, ...], float]:
    """Return what the runs of a group end with, by their labels of ``axes``."""
    cells = () if group is None else group.cells
    return {cell.labels_of(axes): cell.value for cell in cells if cell.value is not None}


def _spent(
    cell: CellOutcome,
    finals: Mapping[tuple[str, ...], float],
    axes: Sequence[str],
    share: float,
    cost: str,
) -> float | None:
    """Return what a run spends to reach the target; infinite if it does not, None if unknown."""
    final, rounds = finals.get(cell.labels_of(axes)), _rounds(cell, cost)
    if final is None or not rounds:
        return None
    if is_loss(cell.metric):
        return next((spent for _, spent, value in rounds if value <= final / share), math.inf)
    return next((spent for _, spent, value in rounds if value >= final * share), math.inf)


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
