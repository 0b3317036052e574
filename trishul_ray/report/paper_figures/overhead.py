"""The figure of seconds per round, and of the overhead over a baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trishul_ray.report.figures import GREY
from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.selection import Estimate, Selection
from trishul_ray.report.paper_figures.style import (
    INK,
    legend_above,
    new_panels,
    set_labels,
    styles_of,
)


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
    run_axes = selection.run_axes(series)
    for group in selection.groups(axes):
        by_name = {each.name: each.cells for each in selection.groups(series, group)}
        rounds = {name: _by_round(cells, run_axes) for name, cells in by_name.items()}
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
    cells: tuple[CellOutcome, ...], run_axes: tuple[str, ...]
) -> dict[tuple[tuple[str, ...], int], float]:
    """Return seconds by the labels of ``run_axes``, and the round."""
    found = {}
    for cell in cells:
        labels = tuple(cell.labels[axis] for axis in run_axes)
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


def draw_overhead(data: OverheadData, note: Sequence[str]) -> Figure:
    """Draw bars of seconds, and beside them the overheads as points."""
    count = 2 if data.overheads else 1
    figure, panels = new_panels(count, note, height=3.0)
    styles = styles_of(data.names)
    width = 0.8 / len(data.names)
    places = {name: width * (i - (len(data.names) - 1) / 2) for i, name in enumerate(data.names)}
    for axes, values in zip(panels, (data.seconds, data.overheads), strict=False):
        for (group, name), estimate in values.items():
            x, style = data.groups.index(group) + places[name], styles[name]
            if values is data.seconds:
                axes.bar(
                    x, estimate.centre, width=0.9 * width, color=style.colour, alpha=0.75,
                    hatch=style.hatch, edgecolor="white", label=name,
                )  # fmt: skip
                text, y, offset, side = f"{estimate.centre:.3g} s", estimate.high, (0, 3), "center"
            else:
                axes.plot(x, estimate.centre, color=style.colour, marker=style.marker)
                text, y, offset, side = f"{estimate.centre:+.1%}", estimate.centre, (6, -3), "left"
            axes.vlines(x, estimate.low, estimate.high, color=INK, linewidth=1.2)
            axes.annotate(
                text, (x, y), offset, textcoords="offset points", fontsize=8, color=INK, ha=side
            )
        axes.set_xticks(range(len(data.groups)), data.groups)
        axes.set_xlim(-0.6, len(data.groups) - 0.4)
        axes.grid(False, axis="x")
    set_labels(panels[0], "time of a round", "", "seconds")
    panels[0].set_ylim(0, 1.12 * max(estimate.high for estimate in data.seconds.values()))
    if data.overheads:
        panels[1].axhline(0, color=GREY, linewidth=1)
        panels[1].margins(y=0.15)
        panels[1].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        set_labels(panels[1], f"overhead over {data.baseline}", "", "share of a round")
    legend_above(figure)
    return figure
