"""The figure of the time of a client's local steps, and of the overhead over a baseline."""

import math
from collections.abc import Sequence
from dataclasses import replace

from trishul_ray.report.figures.chart import Axis, Band, Chart, Panel, Row
from trishul_ray.report.figures.kind import BY_METHOD, FIGURES, FigureKind
from trishul_ray.report.figures.selection import Selection
from trishul_ray.report.outcomes import CellOutcome

_COLUMNS = {"group": "x"} | {
    name: name for name in ("series", "metric", "value", "low", "high", "n", "paper")
}


@FIGURES.register("overhead")
class Overhead(FigureKind):
    """The seconds of the local steps in each round but the first, which warms up.

    Seconds are the mean over the round's clients, and do not contain evaluation, aggregation or
    diagnostics. The overhead is the paper's: the median of a series over that of the baseline.
    """

    options = BY_METHOD | {"groups": ("model", "dataset")}
    timed = True

    def chart(self, selection: Selection) -> Chart | None:
        """Return bars of seconds, and beside them the overheads as points."""
        series = selection.axes("series")
        run_axes = selection.run_axes(series)
        baselines: list[str] = []
        seconds: list[Row] = []
        overheads: list[Row] = []
        for group in selection.groups(selection.axes("groups")):
            by_name = {each.name: each.cells for each in selection.groups(series, group)}
            rounds = {name: _by_round(cells, run_axes) for name, cells in by_name.items()}
            rounds = {name: found for name, found in rounds.items() if found}
            baseline = _baseline(by_name)
            baselines += [baseline] * (baseline in rounds)
            for name, found in rounds.items():
                place = {"x": group.name, "series": name}
                printed = selection.paper("seconds_per_round", by_name[name])
                seconds.append(_seconds(Band.of_rounds([*found.values()]), printed, **place))
                theirs = rounds.get(baseline, {})
                common = sorted(found.keys() & theirs.keys())
                if name != baseline and common:
                    printed = selection.paper("overhead", by_name[name]) / 100
                    pairs = [(found[key], theirs[key]) for key in common]
                    overheads.append(_overhead(pairs, printed, **place))
        if not seconds:
            return None
        panels = [
            Panel(tuple(seconds), "bar", "local steps of a client in a round", y=Axis("seconds"))
        ]
        if overheads:
            title, share = f"overhead over {baselines[0]}", Axis("share of its time", percent=True)
            dots = Panel(tuple(overheads), "bar", title, y=share, dots=True, from_zero=False)
            panels.append(replace(dots, levels={"": 0.0}))
        names = tuple(each.name for each in selection.groups(series))
        remarks = _remarks(selection, seconds, overheads)
        return Chart(tuple(panels), names, _COLUMNS, remarks, legend=True, height=3.6)


def _seconds(band: Band, printed: float, **place: str) -> Row:
    text = f"{band.centre:.3g} s" + f"\npaper {printed:g} s" * math.isfinite(printed)
    return Row.of(band, metric="seconds of local steps", paper=printed, text=text, **place)


def _overhead(pairs: Sequence[tuple[float, float]], printed: float, **place: str) -> Row:
    """Return the ratio of two medians of the same rounds, with quantiles of their ratios."""
    ratios = Band.of_rounds([ours / theirs - 1 for ours, theirs in pairs])
    ours, theirs = (Band.of_rounds(values).centre for values in zip(*pairs, strict=True))
    band = Band(ours / theirs - 1, ratios.low, ratios.high, len(pairs))
    text = f"{band.centre:+.1%}, n = {band.count}" + f"\npaper {printed:+.2%}" * math.isfinite(
        printed
    )
    return Row.of(band, metric="overhead", paper=printed, text=text, **place)


def _remarks(
    selection: Selection, seconds: Sequence[Row], overheads: Sequence[Row]
) -> tuple[str, ...]:
    machines = {_machine(cell): None for cell in selection.finished}
    counts = sorted({row.n or 0 for row in seconds})
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
    if any(math.isfinite(row.paper) for row in seconds):
        remarks.append("hollow: the paper's training time of a round, on machines it does not name")
    return tuple(remarks)


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


def _baseline(by_name: dict[str, tuple[CellOutcome, ...]]) -> str:
    """Return the series of RAVAN; empty without one."""
    has = (name for name, cells in by_name.items() if any(c.method == "ravan" for c in cells))
    return next(has, "")


def _machine(cell: CellOutcome) -> str:
    hardware = cell.result.hardware
    return ", ".join(hardware.gpus) or f"{hardware.processor}, {hardware.cpus} CPUs"
