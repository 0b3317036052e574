"""The two figures of core heads per block, by allocation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trishul_ray.report.figures import GREY, strip_common_parts
from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.selection import Estimate, Selection
from trishul_ray.report.paper_figures.style import (
    NORMAL,
    SMALL,
    Style,
    legend_above,
    new_panels,
    set_labels,
    styles_of,
)


@dataclass(frozen=True)
class Allocation:
    """Core heads on each adapted matrix of each block, by series, in one backbone."""

    title: str
    blocks: tuple[str, ...]
    norms: tuple[float, ...]
    heads: tuple[tuple[str, tuple[Estimate, ...]], ...]


@dataclass(frozen=True)
class AllocationData:
    """The content of either figure."""

    panels: tuple[Allocation, ...]
    names: tuple[str, ...]
    remarks: tuple[str, ...]
    paper: tuple[tuple[str, float], ...] = ()  # fewest and most heads of a series, as printed

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for the heads of each block and series, and one for its squared norm."""
        heads = [
            {"panel": panel.title, "block": block, "metric": "heads", "series": name}
            | estimate.row()
            for panel in self.panels
            for name, estimates in panel.heads
            for block, estimate in zip(panel.blocks, estimates, strict=True)
        ]
        norms = [
            {"panel": panel.title, "block": block, "metric": "squared norm", "value": norm}
            for panel in self.panels
            for block, norm in zip(panel.blocks, panel.norms, strict=True)
        ]
        return heads + norms

    def describe(self) -> str:
        """Return the heads of every block in words."""
        return "; ".join(
            f"{panel.title}, {name}: " + ", ".join(f"{each.centre:g}" for each in heads)
            for panel in self.panels
            for name, heads in panel.heads
        )


def allocation(selection: Selection) -> AllocationData | None:
    """Collect the heads and squared norms of each block, a panel for each backbone."""
    series = selection.axes("series")
    panels, pooled, without = [], [], []
    for model, blocks in _backbones(selection.finished):
        norms: list[list[float]] = []
        heads = []
        for group in selection.groups(series):
            cells = [cell for cell in group.cells if _backbone(cell) == (model, blocks)]
            if not cells:
                continue
            counts = [[cell.summary["heads"][block] for block in blocks] for cell in cells]
            estimates = tuple(Estimate.of_runs(each) for each in zip(*counts, strict=True))
            heads.append((group.name, estimates))
            norms += [[c.summary["block_squared_norms"][b] for b in blocks] for c in cells]
            if any(estimate.low < estimate.high for estimate in estimates):
                pooled.append(cells)
        means = tuple(float(value) for value in np.mean(norms, axis=0))
        panels.append(Allocation(model, tuple(strip_common_parts(blocks)), means, tuple(heads)))
    without = [cell for cell in selection.finished if not cell.summary["heads"]]
    if not panels:
        return None
    remarks = ["heads on each adapted matrix of a block"]
    if pooled:
        remarks += ["bars: mean ± standard deviation over runs", *selection.pooled(pooled)]
    if without:
        remarks.append(f"without core heads: {'; '.join(selection.names(without))}")
    groups = selection.groups(series)
    paper = tuple(
        (group.name, value)
        for group in groups
        for metric in ("fewest_heads", "most_heads")
        if math.isfinite(value := selection.paper(metric, group.cells))
    )
    for name in dict.fromkeys(name for name, _ in paper):
        span = " to ".join(f"{value:g}" for each, value in paper if each == name)
        remarks.append(f"dashed: the paper's {span} heads of {name}")
    names = tuple(group.name for group in groups)
    return AllocationData(tuple(panels), names, tuple(remarks), paper)


def _backbone(cell: CellOutcome) -> tuple[str, tuple[str, ...]]:
    return cell.summary["config"]["model"]["name"], tuple(cell.summary["heads"])


def _backbones(cells: tuple[CellOutcome, ...]) -> list[tuple[str, tuple[str, ...]]]:
    return list(dict.fromkeys(_backbone(cell) for cell in cells if cell.summary["heads"]))


def draw_bars(data: AllocationData, note: Sequence[str]) -> Figure:
    """Draw bars of heads for each allocation, and the squared norms on a second axis."""
    figure, panels = _panels(data, note)
    styles = styles_of(data.names)
    for axes, panel in zip(panels, data.panels, strict=True):
        width = 0.84 / len(panel.heads)
        for index, (name, heads) in enumerate(panel.heads):
            x = np.arange(len(heads)) + width * (index - (len(panel.heads) - 1) / 2)
            axes.bar(
                x, [e.centre for e in heads], width=0.92 * width, color=styles[name].colour,
                hatch=styles[name].hatch, edgecolor="white", label=name, zorder=2,
            )  # fmt: skip
            if any(e.low < e.high for e in heads):
                axes.vlines(x, [e.low for e in heads], [e.high for e in heads], color="black")
        second = axes.twinx()
        second.plot(
            range(len(panel.norms)), panel.norms, "kD:", markersize=3.5, linewidth=1,
            markerfacecolor="white", label="squared norm of a block's adapted matrices (right)",
        )  # fmt: skip
        second.set_ylim(0, 1.15 * max(panel.norms) or 1.0)
        second.set_ylabel("squared norm", fontsize=NORMAL)
        second.tick_params(labelsize=SMALL)
        second.spines["top"].set_visible(False)
        _finish(axes, panel, data.paper, styles)
    legend_above(figure)
    return figure


def draw_layerwise(data: AllocationData, note: Sequence[str]) -> Figure:
    """Draw the heads of each block as points, with a line from the mean number of heads."""
    figure, panels = _panels(data, note)
    styles = styles_of(data.names)
    for axes, panel in zip(panels, data.panels, strict=True):
        mean = float(np.mean([e.centre for _, heads in panel.heads for e in heads]))
        axes.axhline(mean, color=GREY, linestyle=":", linewidth=1.2, label=f"mean {mean:.3g}")
        offset = 0.5 / len(panel.heads)
        for index, (name, heads) in enumerate(panel.heads):
            style, y = styles[name], [e.centre for e in heads]
            x = np.arange(len(heads)) + offset * (index - (len(panel.heads) - 1) / 2)
            axes.vlines(x, mean, y, color=style.colour, linewidth=2)
            axes.plot(
                x, y, color=style.colour, marker=style.marker, linestyle="none", markersize=7,
                label=name,
            )  # fmt: skip
        _finish(axes, panel, data.paper, styles)
    legend_above(figure)
    return figure


def _panels(data: AllocationData, note: Sequence[str]) -> tuple[Figure, list[Axes]]:
    return new_panels(len(data.panels), note, columns=1)


def _finish(
    axes: Axes,
    panel: Allocation,
    paper: Sequence[tuple[str, float]],
    styles: Mapping[str, Style],
) -> None:
    for name, value in paper:
        axes.axhline(value, color=styles[name].colour, linestyle="--", linewidth=1.2, zorder=1)
    count = len(panel.blocks)
    long = max(map(len, panel.blocks)) * count > 80
    axes.set_xticks(
        range(count), panel.blocks, rotation=90 if long else 0, fontsize=SMALL if count < 40 else 7
    )
    axes.set_xlim(-0.6, count - 0.4)
    highest = [e.high for _, heads in panel.heads for e in heads]
    axes.set_ylim(0, 1.2 * max([*highest, *(value for _, value in paper)]) or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False, axis="x")
    set_labels(axes, panel.title, "block, from input to output", "heads per matrix")
