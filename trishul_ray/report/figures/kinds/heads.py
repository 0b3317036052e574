"""Figures of core heads per block, by allocation and over rounds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trishul_ray.report.figures.chart import NUMBER, Axis, Band, Chart, Panel, Row
from trishul_ray.report.figures.kind import FIGURES, FigureKind
from trishul_ray.report.figures.selection import Selection
from trishul_ray.report.outcomes import CellOutcome

#: Columns of metrics.parquet with the heads of a block that clients trained in a round.
PREFIX = "heads/"
_REMARK = "heads on each adapted matrix of a block"
_NORM = "squared norm"
_OPTIONS = {"series": ("allocation", "method")}
_COLUMNS = {"panel": "panel", "block": "x", "metric": "metric", "series": "series"} | NUMBER
_ROUND_COLUMNS = {
    "panel": "panel",
    "block": "y",
    "metric": "metric",
    "round": "x",
    "value": "value",
}
_BLOCKS, _HEADS = Axis("block, from input to output", "names"), Axis("heads per matrix", "whole")

#: Heads of a series by block.
Heads = list[tuple[str, list[Band]]]


@FIGURES.register("waterfilling")
class WaterFilling(FigureKind):
    """Heads and squared norms of each block as bars, a panel for each backbone."""

    options = _OPTIONS

    def chart(self, selection: Selection) -> Chart | None:
        """Return bars of heads, and the norms on a second axis."""
        return _by_block(selection, dots=False)


@FIGURES.register("waterfilling_layerwise")
class WaterFillingLayerwise(FigureKind):
    """The same as points, with lines from the mean number of heads."""

    options = _OPTIONS

    def chart(self, selection: Selection) -> Chart | None:
        """Return the points."""
        return _by_block(selection, dots=True)


def _by_block(selection: Selection, *, dots: bool) -> Chart | None:
    groups = selection.groups(selection.axes("series"))
    found: list[tuple[str, Sequence[str], list[float], Heads]] = []
    pooled = []
    for model, blocks in dict.fromkeys(_backbone(c) for c in selection.finished if c.result.heads):
        norms: list[list[float]] = []
        heads: Heads = []
        for group in groups:
            cells = [cell for cell in group.cells if _backbone(cell) == (model, blocks)]
            if not cells:
                continue
            counts = [[cell.result.heads[block] for block in blocks] for cell in cells]
            heads.append((group.name, [Band.of_runs(each) for each in zip(*counts, strict=True)]))
            norms += [[c.result.block_squared_norms[b] for b in blocks] for c in cells]
            if any(band.low < band.high for band in heads[-1][1]):
                pooled.append(cells)
        means = np.mean(norms, axis=0).tolist()
        found.append((model, strip_common_parts(blocks), means, heads))
    if not found:
        return None
    remarks = [_REMARK]
    if pooled:
        remarks += ["bars: mean ± standard deviation over runs", *selection.pooled(pooled)]
    if without := [cell for cell in selection.finished if not cell.result.heads]:
        remarks.append(f"without core heads: {'; '.join(selection.names(without))}")
    printed: dict[str, list[float]] = {}
    for group in groups:
        span = [selection.paper(each, group.cells) for each in ("fewest_heads", "most_heads")]
        if span := [value for value in span if math.isfinite(value)]:
            printed[group.name] = span
            shown = " to ".join(f"{value:g}" for value in span)
            remarks.append(f"dashed: the paper's {shown} heads of {group.name}")
    panels = [_heads_panel(*each, printed, dots=dots) for each in found]
    return _heads_chart(panels, tuple(group.name for group in groups), tuple(remarks))


def heads_of_run(
    model: str, method: str, heads: Mapping[str, int], norms: Mapping[str, float]
) -> Chart:
    """Return the heads and squared norms of each block in one run."""
    bands = [Band(count, count, count, 1) for count in heads.values()]
    squares, blocks = [norms[block] for block in heads], strip_common_parts([*heads])
    panel = _heads_panel(model, blocks, squares, [(method, bands)], {}, dots=False)
    return _heads_chart([panel], (method,), (_REMARK,))


def _heads_panel(
    model: str,
    blocks: Sequence[str],
    norms: Sequence[float],
    heads: Heads,
    printed: Mapping[str, Sequence[float]],
    *,
    dots: bool,
) -> tuple[Panel, list[Row]]:
    """Return the panel of a backbone, and the norms, which points leave out."""
    rows = [
        Row.of(band, panel=model, x=block, metric="heads", series=name)
        for name, bands in heads
        for block, band in zip(blocks, bands, strict=True)
    ]
    squares = [
        Row(value=norm, panel=model, x=block, metric=_NORM)
        for block, norm in zip(blocks, norms, strict=True)
    ]
    panel = Panel(tuple(rows), "bar", model, _BLOCKS, _HEADS, printed=printed, dots=dots)
    if dots:
        mean = float(np.mean([row.value for row in rows]))
        return replace(panel, levels={"mean": mean}, base=mean), squares
    label = f"{_NORM} of a block's adapted matrices"
    return replace(panel, second=tuple(squares), second_label=label), squares


def _heads_chart(
    found: Sequence[tuple[Panel, list[Row]]], names: tuple[str, ...], remarks: tuple[str, ...]
) -> Chart:
    panels = tuple(panel for panel, _ in found)
    listed = [row for panel in panels for row in panel.rows]
    listed += [row for _, norms in found for row in norms]
    return Chart(panels, names, _COLUMNS, remarks, tuple(listed), legend=True, across=1)


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


@FIGURES.register("heads")
class HeadsByRound(FigureKind):
    """Heads of each block in each round, means over runs: a panel for each series and backbone."""

    options = _OPTIONS

    def chart(self, selection: Selection) -> Chart | None:
        """Return a heat map of blocks and rounds for each panel."""
        panels, pooled = [], []
        for group in selection.groups(selection.axes("series")):
            with_heads = [cell for cell in group.cells if cell.result.heads]
            for model, blocks in dict.fromkeys(map(_backbone, with_heads)):
                cells = [cell for cell in with_heads if _backbone(cell) == (model, blocks)]
                runs = [_heads_by_round(c.result.heads, c.records) for c in cells]
                last = min(counts.shape[1] for counts in runs)
                if last:
                    mean = np.mean([counts[:, :last] for counts in runs], axis=0)
                    panels.append(_rounds_panel(f"{group.name}, {model}", blocks, mean))
                    pooled.append(cells)
        if not panels:
            return None
        remarks = [_REMARK] + ["means over runs"] * any(len(cells) > 1 for cells in pooled)
        return Chart(tuple(panels), (), _ROUND_COLUMNS, (*remarks, *selection.pooled(pooled)))


def rounds_of_run(
    method: str, heads: Mapping[str, int], records: Sequence[Mapping[str, Any]]
) -> Chart:
    """Return the heads of each block in each round of one run."""
    panel = _rounds_panel(method, [*heads], _heads_by_round(heads, records))
    return Chart((panel,), (), _ROUND_COLUMNS, (_REMARK,))


def _heads_by_round(heads: Mapping[str, int], records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return heads [blocks, rounds] from round 1; those of round 1 where they do not move."""
    trained = [record for record in records if record["round"] > 0]
    counts = [[r.get(PREFIX + block, first) for r in trained] for block, first in heads.items()]
    return np.array(counts, dtype=float)


def _rounds_panel(title: str, blocks: Sequence[str], heads: np.ndarray) -> Panel:
    rows = [
        Row(value=count, panel=title, metric="heads", x=number, y=block)
        for block, counts in zip(strip_common_parts(blocks), heads.tolist(), strict=True)
        for number, count in enumerate(counts, 1)
    ]
    x = Axis("communication round", "whole")
    return Panel(tuple(rows), "heatmap", title, x, _BLOCKS, colours=_HEADS, palette="viridis")
