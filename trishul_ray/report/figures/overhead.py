"""The figure of the time of a client's local steps, and of the overhead over a baseline."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trishul_ray.report.figures.selection import Band, Selection
from trishul_ray.report.figures.style import (
    GREY,
    INK,
    SMALL,
    legend_above,
    new_panels,
    set_labels,
    styles_of,
)
from trishul_ray.report.outcomes import CellOutcome, Row


@dataclass(frozen=True)
class Bar:
    """One series within a group: what was measured, and what the paper prints, or NaN."""

    group: str
    series: str
    measured: Band
    paper: float


@dataclass(frozen=True)
class OverheadData:
    """Seconds of the local steps of a client in a round, and overheads over a baseline.

    ``groups`` are what is beside each other, such as models; ``names`` are the series in each.
    """

    groups: tuple[str, ...]
    names: tuple[str, ...]
    seconds: tuple[Bar, ...]
    overheads: tuple[Bar, ...]
    baseline: str | None
    remarks: tuple[str, ...]

    def describe(self) -> str:
        """Return seconds and overheads in words."""
        parts = []
        for bars, unit in ((self.seconds, "s"), (self.overheads, f"over {self.baseline}")):
            form = ".3g" if bars is self.seconds else "+.2%"
            parts += [
                f"{bar.group}, {bar.series}: {bar.measured.centre:{form}} {unit}"
                + f" (paper {bar.paper:{form}})" * math.isfinite(bar.paper)
                for bar in bars
            ]
        return f"{'; '.join(parts)}."

    def rows(self) -> list[Row]:
        """Return one row for the seconds of each bar, and one for each overhead."""
        kinds = (("seconds of local steps", self.seconds), ("overhead", self.overheads))
        return [
            {"group": bar.group, "series": bar.series, "metric": metric}
            | bar.measured.row()
            | {"paper": bar.paper}
            for metric, bars in kinds
            for bar in bars
        ]


def overhead(selection: Selection) -> OverheadData | None:
    """Collect the seconds of the local steps in each round but the first, which warms up.

    Seconds are the mean over the round's clients, and do not contain evaluation, aggregation or
    diagnostics. The overhead is the paper's: the median of a series over that of the baseline.
    """
    series = selection.axes("series")
    run_axes = selection.run_axes(series)
    groups, baselines = [], []
    seconds: list[Bar] = []
    overheads: list[Bar] = []
    for group in selection.groups(selection.axes("groups")):
        by_name = {each.name: each.cells for each in selection.groups(series, group)}
        rounds = {name: _by_round(cells, run_axes) for name, cells in by_name.items()}
        rounds = {name: found for name, found in rounds.items() if found}
        baseline = _baseline(by_name)
        groups += [group.name] * bool(rounds)
        baselines += [baseline] * (baseline in rounds)
        for name, found in rounds.items():
            printed = selection.paper("seconds_per_round", by_name[name])
            seconds.append(Bar(group.name, name, Band.of_rounds([*found.values()]), printed))
            theirs = rounds.get(baseline or "", {})
            common = sorted(found.keys() & theirs.keys())
            if name != baseline and common:
                ratios = Band.of_rounds([found[key] / theirs[key] - 1 for key in common])
                ours, base = (Band.of_rounds([r[k] for k in common]) for r in (found, theirs))
                ratio = ours.centre / base.centre - 1
                printed = selection.paper("overhead", by_name[name]) / 100
                measured = Band(ratio, ratios.low, ratios.high, len(common))
                overheads.append(Bar(group.name, name, measured, printed))
    if not seconds:
        return None
    machines = {_machine(cell): None for cell in selection.finished}
    counts = sorted({bar.measured.count for bar in seconds})
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    span += " round" if counts == [1] else " rounds"
    remarks = [
        "the clock alone: a repetition gives other numbers",
        "local steps alone, without evaluation, aggregation and diagnostics; mean over the clients "
        "of a round",
        f"bars: median of {span}, without the first of each run, and 10–90 % of them",
        f"measured on {'; '.join(machines)}",
    ]
    if overheads:
        remarks.append(
            "overhead: the ratio of two medians of the same rounds, and 10–90 % of their ratios"
        )
    if any(math.isfinite(bar.paper) for bar in seconds):
        remarks.append("hollow: the paper's training time of a round, on machines it does not name")
    names = tuple(each.name for each in selection.groups(series))
    return OverheadData(
        groups=tuple(groups),
        names=names,
        seconds=tuple(seconds),
        overheads=tuple(overheads),
        baseline=baselines[0] if baselines else None,
        remarks=tuple(remarks),
    )


def _by_round(
    cells: tuple[CellOutcome, ...], run_axes: tuple[str, ...]
) -> dict[tuple[tuple[str, ...], int], float]:
    """Return seconds by the labels of ``run_axes``, and the round."""
    found = {}
    for cell in cells:
        timed = [record for record in cell.records if "client_seconds" in record]
        for record in timed[1:] or timed:
            found[cell.labels_of(run_axes), int(record["round"])] = record["client_seconds"]
    return found


def _baseline(by_name: dict[str, tuple[CellOutcome, ...]]) -> str | None:
    """Return the series of RAVAN."""
    for name, cells in by_name.items():
        if any(cell.method == "ravan" for cell in cells):
            return name
    return None


def _machine(cell: CellOutcome) -> str:
    hardware = cell.result.hardware
    return ", ".join(hardware.gpus) or f"{hardware.processor}, {hardware.cpus} CPUs"


def draw_overhead(data: OverheadData, note: Sequence[str]) -> Figure:
    """Draw bars of seconds, and beside them the overheads as points."""
    count = 2 if data.overheads else 1
    figure, panels = new_panels(count, note, height=3.6)
    for axes, bars in zip(panels, (data.seconds, data.overheads), strict=False):
        _draw(axes, data, bars, is_share=bars is not data.seconds)
    set_labels(panels[0], "local steps of a client in a round", "", "seconds")
    panels[0].set_ylim(bottom=0)
    if data.overheads:
        panels[1].axhline(0, color=GREY, linewidth=1)
        panels[1].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        set_labels(panels[1], f"overhead over {data.baseline}", "", "share of its time")
    legend_above(figure)
    return figure


def _draw(axes: Axes, data: OverheadData, bars: Sequence[Bar], *, is_share: bool) -> None:
    styles, width = styles_of(data.names), 0.8 / len(data.names)
    for bar in bars:
        style, middle = styles[bar.series], (len(data.names) - 1) / 2
        x = data.groups.index(bar.group) + width * (data.names.index(bar.series) - middle)
        centre, low, high = bar.measured.centre, bar.measured.low, bar.measured.high
        if is_share:
            axes.plot(x, centre, color=style.colour, marker=style.marker)
            text = f"{centre:+.1%}, n = {bar.measured.count}"
            y, offset, side = centre, (7.0, 0.0), "left"
        else:
            axes.bar(
                x, centre, width=0.9 * width, color=style.colour, alpha=0.75, hatch=style.hatch,
                edgecolor="white", label=bar.series,
            )  # fmt: skip
            text, y, offset, side = f"{centre:.3g} s", max(high, centre), (0.0, 4.0), "center"
        axes.vlines(x, low, high, color=INK, linewidth=1.2)
        if math.isfinite(bar.paper):
            axes.plot(
                x, bar.paper, color=INK, marker=style.marker, markersize=8, markerfacecolor="none"
            )
            if is_share:
                text += f"\npaper {bar.paper:+.2%}"
            else:  # ours at the foot of its bar, where the paper's is not
                y = 0.0
                axes.annotate(
                    f"{bar.paper:g}", (x, max(bar.paper, high)), (0.0, 7.0), fontsize=SMALL,
                    textcoords="offset points", color=INK, ha="center", va="bottom",
                )  # fmt: skip
        axes.annotate(
            text, (x, y), offset, textcoords="offset points", fontsize=SMALL, color=INK, ha=side,
            va="center" if is_share else "bottom",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8},
        )  # fmt: skip
    axes.margins(y=0.18)
    letters = max(8, 44 // len(data.groups))
    labels = ["\n".join(textwrap.wrap(group, letters)) for group in data.groups]
    axes.set_xticks(range(len(data.groups)), labels)
    axes.set_xlim(-0.6, len(data.groups) - 0.4 + 0.2 * is_share)
    axes.grid(False, axis="x")
