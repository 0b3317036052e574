"""Figures of core heads per block, by allocation and over rounds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trishul_ray.report.figures.selection import Band, Selection
from trishul_ray.report.figures.style import (
    GREY,
    NORMAL,
    SMALL,
    Style,
    legend_above,
    new_panels,
    set_labels,
    styles_of,
)
from trishul_ray.report.outcomes import CellOutcome, Row

_REMARK = "heads on each adapted matrix of a block"
#: Columns of metrics.parquet with the heads of a block that clients trained in a round.
PREFIX = "heads/"
#: Few colours, so that the bar beside them is drawn as vectors.
_SHADES = matplotlib.colormaps["viridis"].resampled(24)


@dataclass(frozen=True)
class Heads:
    """Core heads on each adapted matrix of each block, by series, in one backbone."""

    title: str
    blocks: tuple[str, ...]
    norms: tuple[float, ...]
    heads: tuple[tuple[str, tuple[Band, ...]], ...]


@dataclass(frozen=True)
class HeadsData:
    """The content of either figure."""

    panels: tuple[Heads, ...]
    names: tuple[str, ...]
    remarks: tuple[str, ...]
    paper: tuple[tuple[str, float], ...] = ()  # fewest and most heads of a series, as printed

    def rows(self) -> list[Row]:
        """Return one row for the heads of each block and series, and one for its squared norm."""
        heads = [
            {"panel": panel.title, "block": block, "metric": "heads", "series": name} | band.row()
            for panel in self.panels
            for name, bands in panel.heads
            for block, band in zip(panel.blocks, bands, strict=True)
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


def heads_by_series(selection: Selection) -> HeadsData | None:
    """Collect the heads and squared norms of each block, a panel for each backbone."""
    groups = selection.groups(selection.axes("series"))
    panels, pooled = [], []
    backbones = dict.fromkeys(_backbone(c) for c in selection.finished if c.result.heads)
    for model, blocks in backbones:
        norms, heads = [], []
        for group in groups:
            cells = [cell for cell in group.cells if _backbone(cell) == (model, blocks)]
            if not cells:
                continue
            counts = [[cell.result.heads[block] for block in blocks] for cell in cells]
            bands = tuple(Band.of_runs(each) for each in zip(*counts, strict=True))
            heads.append((group.name, bands))
            norms += [[c.result.block_squared_norms[b] for b in blocks] for c in cells]
            if any(band.low < band.high for band in bands):
                pooled.append(cells)
        means = tuple(float(value) for value in np.mean(norms, axis=0))
        panels.append(Heads(model, tuple(strip_common_parts(blocks)), means, tuple(heads)))
    if not panels:
        return None
    remarks = [_REMARK]
    if pooled:
        remarks += ["bars: mean ± standard deviation over runs", *selection.pooled(pooled)]
    if without := [cell for cell in selection.finished if not cell.result.heads]:
        remarks.append(f"without core heads: {'; '.join(selection.names(without))}")
    paper = []
    for group in groups:
        span = [selection.paper(each, group.cells) for each in ("fewest_heads", "most_heads")]
        if span := [value for value in span if math.isfinite(value)]:
            paper += [(group.name, value) for value in span]
            shown = " to ".join(f"{value:g}" for value in span)
            remarks.append(f"dashed: the paper's {shown} heads of {group.name}")
    names = tuple(group.name for group in groups)
    return HeadsData(tuple(panels), names, tuple(remarks), tuple(paper))


def heads_of_run(
    model: str, method: str, heads: Mapping[str, int], norms: Mapping[str, float]
) -> HeadsData:
    """Return the heads and squared norms of each block in one run."""
    bands = tuple(Band(count, count, count, 1) for count in heads.values())
    blocks, squares = tuple(strip_common_parts([*heads])), tuple(norms[block] for block in heads)
    panel = Heads(model, blocks, squares, ((method, bands),))
    return HeadsData((panel,), (method,), (_REMARK,))


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


def _backbone(cell: CellOutcome) -> tuple[str, tuple[str, ...]]:
    return cell.result.config["model"]["name"], tuple(cell.result.heads)


@dataclass(frozen=True)
class RoundHeads:
    """Heads on each matrix of each block in each round, [blocks, rounds]: means over runs."""

    title: str
    blocks: tuple[str, ...]
    rounds: tuple[int, ...]
    heads: np.ndarray


@dataclass(frozen=True)
class RoundHeadsData:
    """The content of a figure of heads over rounds."""

    panels: tuple[RoundHeads, ...]
    remarks: tuple[str, ...] = (_REMARK,)

    def rows(self) -> list[Row]:
        """Return one row for the heads of each block and round."""
        return [
            {"panel": panel.title, "block": block, "metric": "heads", "round": number}
            | {"value": float(count)}
            for panel in self.panels
            for block, counts in zip(panel.blocks, panel.heads, strict=True)
            for number, count in zip(panel.rounds, counts, strict=True)
        ]

    def describe(self) -> str:
        """Return the heads of every block in the first and the last round in words."""
        return "; ".join(
            f"{panel.title}: "
            + ", ".join(f"{counts[0]:g} to {counts[-1]:g}" for counts in panel.heads)
            for panel in self.panels
        )


def heads_by_round(selection: Selection) -> RoundHeadsData | None:
    """Collect the heads of each block in each round, a panel for each series and backbone."""
    panels, pooled = [], []
    for group in selection.groups(selection.axes("series")):
        with_heads = [cell for cell in group.cells if cell.result.heads]
        for model, blocks in dict.fromkeys(map(_backbone, with_heads)):
            cells = [cell for cell in with_heads if _backbone(cell) == (model, blocks)]
            runs = [_heads_over_rounds(c.result.heads, c.records) for c in cells]
            last = min(len(each.rounds) for each in runs)
            mean = np.mean([each.heads[:, :last] for each in runs], axis=0)
            if last:
                title = f"{group.name}, {model}"
                panels.append(RoundHeads(title, runs[0].blocks, runs[0].rounds[:last], mean))
                pooled.append(cells)
    remarks = (_REMARK, *(["means over runs"] if any(len(c) > 1 for c in pooled) else []))
    return RoundHeadsData(tuple(panels), (*remarks, *selection.pooled(pooled))) if panels else None


def rounds_of_run(
    method: str, heads: Mapping[str, int], records: Sequence[Mapping[str, Any]]
) -> RoundHeadsData:
    """Return the heads of each block in each round of one run."""
    return RoundHeadsData((replace(_heads_over_rounds(heads, records), title=method),))


def _heads_over_rounds(
    heads: Mapping[str, int], records: Sequence[Mapping[str, Any]]
) -> RoundHeads:
    """Return the heads of a run in each round from 1; those of round 1 where they do not move."""
    trained = [record for record in records if record["round"] > 0]
    counts = [[r.get(PREFIX + block, first) for r in trained] for block, first in heads.items()]
    rounds = tuple(int(record["round"]) for record in trained)
    return RoundHeads("", tuple(strip_common_parts([*heads])), rounds, np.array(counts, float))


def draw_rounds(data: RoundHeadsData, note: Sequence[str]) -> Figure:
    """Draw a field of blocks and rounds for each panel, coloured by the heads of the block."""
    figure, panels = new_panels(len(data.panels), note)
    top = max(float(panel.heads.max()) for panel in data.panels)
    for axes, panel in zip(panels, data.panels, strict=True):
        rounds = np.arange(panel.rounds[0], panel.rounds[-1] + 2) - 0.5
        blocks = np.arange(len(panel.blocks) + 1) - 0.5
        image = axes.pcolormesh(rounds, blocks, panel.heads, cmap=_SHADES, vmin=0, vmax=top)
        step = max(1, -(-len(panel.blocks) // 16))
        axes.set_yticks(range(0, len(panel.blocks), step), panel.blocks[::step])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False)
        set_labels(axes, panel.title, "communication round", "block, from input to output")
    bar = figure.colorbar(image, ax=panels, fraction=0.05, pad=0.02)
    bar.set_label("heads per matrix", fontsize=NORMAL)
    return figure


def draw_bars(data: HeadsData, note: Sequence[str]) -> Figure:
    """Draw bars of heads for each allocation, and the squared norms on a second axis."""
    figure, panels = new_panels(len(data.panels), note, columns=1)
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


def draw_layerwise(data: HeadsData, note: Sequence[str]) -> Figure:
    """Draw the heads of each block as points, with a line from the mean number of heads."""
    figure, panels = new_panels(len(data.panels), note, columns=1)
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


def _finish(
    axes: Axes,
    panel: Heads,
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
