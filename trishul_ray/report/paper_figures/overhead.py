"""The figure of seconds per round, and of the overhead over a baseline."""

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.selection import Estimate, Selection
from trishul_ray.report.paper_figures.style import INK, new_panels, styles_of


@dataclass(frozen=True)
class OverheadData:
    """The content of the figure.

    Attributes:
        groups: What is beside each other, such as models.
        names: The series within a group.
        seconds: Seconds per round by group and series.
        overheads: Relative overhead over the baseline by group and series.
        baseline: The series that overheads are relative to; None if it is missing.
        remarks: Lines for the note.
    """

    groups: tuple[str, ...]
    names: tuple[str, ...]
    seconds: dict[tuple[str, str], Estimate]
    overheads: dict[tuple[str, str], Estimate]
    baseline: str | None
    remarks: tuple[str, ...]

    def describe(self) -> str:
        """Return seconds and overheads in words."""
        parts = [f"{g}, {s}: {e.centre:.3g} s per round" for (g, s), e in self.seconds.items()]
        parts += [
            f"{g}, {s}: overhead {e.centre:+.1%} over {self.baseline}"
            for (g, s), e in self.overheads.items()
        ]
        return f"{'; '.join(parts)}."


def overhead(selection: Selection) -> OverheadData | None:
    """Collect the seconds of each round but the first, which also starts the clients.

    Overheads compare the same rounds of cells that differ in the series alone: these train the
    same clients on the same data.
    """
    axes, series = selection.axes("groups"), selection.axes("series")
    names = tuple(group.name for group in selection.groups(series))
    groups, seconds, overheads, baselines = [], {}, {}, []
    for group in selection.groups(axes):
        by_name = {each.name: each.cells for each in selection.groups(series, group)}
        rounds = {name: _by_round(cells, series) for name, cells in by_name.items()}
        rounds = {name: found for name, found in rounds.items() if found}
        baseline = _baseline(by_name)
        if rounds:
            groups.append(group.name)
        if baseline in rounds:
            baselines.append(baseline)
        for name, found in rounds.items():
            seconds[group.name, name] = Estimate.of_rounds(list(found.values()))
            common = found.keys() & rounds.get(baseline or "", {}).keys()
            if name != baseline and baseline is not None and common:
                ratios = [found[key] / rounds[baseline][key] - 1 for key in sorted(common)]
                overheads[group.name, name] = Estimate.of_rounds(ratios)
    if not seconds:
        return None
    machines = {_machine(cell): None for cell in selection.finished}
    remarks = [
        "depends on the clock: a repetition gives other numbers",
        "bars: median over rounds from the second on, with 10–90 % of the rounds",
        f"measured on {'; '.join(machines)}",
    ]
    if overheads:
        remarks.append("overhead: median of the ratios of the same rounds")
    return OverheadData(
        tuple(groups),
        names,
        seconds,
        overheads,
        baselines[0] if baselines else None,
        tuple(remarks),
    )


def _by_round(
    cells: tuple[CellOutcome, ...], series: tuple[str, ...]
) -> dict[tuple[tuple[str, ...], int], float]:
    """Return seconds by the labels other than the series', and the round."""
    found = {}
    for cell in cells:
        labels = tuple(label for axis, label in cell.labels.items() if axis not in series)
        seconds = cell.summary["round_seconds"]
        for number in range(1 if len(seconds) > 1 else 0, len(seconds)):
            found[labels, number] = float(seconds[number])
    return found


def _baseline(by_name: dict[str, tuple[CellOutcome, ...]]) -> str | None:
    """Return the series of RAVAN."""
    for name, cells in by_name.items():
        if any(cell.summary["config"]["method"]["name"] == "ravan" for cell in cells):
            return name
    return None


def _machine(cell: CellOutcome) -> str:
    hardware = cell.summary["hardware"]
    gpus = ", ".join(hardware["gpus"])
    return gpus or f"{hardware['processor']}, {hardware['cpus']} CPUs"


def draw_overhead(data: OverheadData) -> Figure:
    """Draw bars of seconds, and the overheads as points on a second axis."""
    figure, (axes,) = new_panels(1, 1, width=max(5.5, 1.6 * len(data.groups) + 3), height=3.4)
    styles = styles_of(data.names)
    width = 0.8 / len(data.names)
    places = {name: width * (i - (len(data.names) - 1) / 2) for i, name in enumerate(data.names)}
    for name in data.names:
        bars = [(i, data.seconds.get((group, name))) for i, group in enumerate(data.groups)]
        known = [(i + places[name], e) for i, e in bars if e is not None]
        x, heights = [place for place, _ in known], [e.centre for _, e in known]
        axes.bar(
            x, heights, width=0.9 * width, label=name, color=styles[name].colour, alpha=0.75,
            hatch=styles[name].hatch, edgecolor="white", zorder=2,
        )  # fmt: skip
        axes.vlines(x, [e.low for _, e in known], [e.high for _, e in known], color=INK, zorder=3)
        for place, estimate in known:
            axes.annotate(
                f"{estimate.centre:.3g}", (place, estimate.high), (0, 2), ha="center", fontsize=8,
                textcoords="offset points", color=INK,
            )  # fmt: skip
    axes.set_xticks(range(len(data.groups)), data.groups, fontsize=9)
    axes.set_xlim(-0.6, len(data.groups) - 0.4)
    axes.set_ylim(0, 1.15 * max(estimate.high for estimate in data.seconds.values()))
    axes.set_ylabel("seconds per round", fontsize=9)
    axes.grid(False, axis="x")
    if data.overheads:
        second = axes.twinx()
        second.spines["top"].set_visible(False)
        second.tick_params(labelsize=8)
        for (group, name), estimate in data.overheads.items():
            place = data.groups.index(group) + places[name]
            second.errorbar(
                place, estimate.centre, [[estimate.centre - estimate.low],
                [estimate.high - estimate.centre]], color=INK, marker=styles[name].marker,
                markerfacecolor="white", capsize=3, linewidth=1.2, zorder=4,
            )  # fmt: skip
            second.annotate(
                f"{estimate.centre:+.1%}", (place, estimate.centre), (7, 0), va="center",
                textcoords="offset points", fontsize=8, color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
            )  # fmt: skip
        values = [v for e in data.overheads.values() for v in (e.low, e.high, 0.0)]
        margin = float(np.ptp(values)) * 0.15 or 0.1
        second.set_ylim(min(values) - margin, max(values) + margin)
        second.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        second.set_ylabel(f"overhead over {data.baseline} (points)", fontsize=9)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure
