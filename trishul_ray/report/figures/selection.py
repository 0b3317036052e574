"""The cells that a figure shows: their groups, their numbers, and which of them are missing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from trishul_ray.report.outcomes import SEED, CellOutcome, FigureLayout, SweepOutcome
from trishul_ray.report.references import of_figure

#: More names than these are counted instead of listed.
MOST_NAMES = 6


@dataclass(frozen=True)
class Group:
    """The finished cells of one combination of labels; ``name`` is how it is displayed."""

    name: str
    cells: tuple[CellOutcome, ...]


@dataclass(frozen=True)
class Selection:
    """The cells that one figure shows; ``options`` are all of its kind, with defaults."""

    figure: FigureLayout
    sweep: SweepOutcome
    options: Mapping[str, Any]

    @cached_property
    def cells(self) -> tuple[CellOutcome, ...]:
        """The cells within ``figure.where``, finished or not."""
        return self.sweep.within(self.figure.where)

    @cached_property
    def finished(self) -> tuple[CellOutcome, ...]:
        """The finished ones."""
        return tuple(cell for cell in self.cells if cell.status == "finished")

    def axes(self, option: str) -> tuple[str, ...]:
        """Return the axes that an option names: none, one or several."""
        value = self.options[option]
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else tuple(value)

    def groups(self, axes: Sequence[str], within: Group | None = None) -> list[Group]:
        """Return the cells by their labels of ``axes``, in the order of the sweep.

        Groups without a finished cell are listed, too, so that names and colours do not depend on
        what is missing. ``within`` limits the cells to those of another group.
        """
        members: dict[tuple[str, ...], list[CellOutcome]] = {}
        for cell in self.cells:
            members.setdefault(cell.labels_of(axes), [])
        for cell in self.finished if within is None else within.cells:
            members[cell.labels_of(axes)].append(cell)
        return [
            Group(", ".join(map(self.sweep.shown_label, axes, labels)), tuple(members[labels]))
            for labels in self.sweep.in_order(axes, members)
        ]

    def paper(self, metric: str, cells: Sequence[CellOutcome]) -> float:
        """Return what the paper prints of cells, by the labels they share; NaN if nothing.

        It is not asked where the cells may not be compared with it. Arguments as in
        :func:`~trishul_ray.report.references.Reference.figure_value`.
        """
        if self.figure.paper is None or not cells or not self.sweep.is_comparable(self.cells):
            return math.nan
        shared = set.intersection(*(set(cell.labels.items()) for cell in cells))
        value = of_figure(self.figure.paper).figure_value(self.figure.paper, metric, dict(shared))
        return math.nan if value is None else value

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """The axes in which the cells differ."""
        return tuple(
            axis
            for axis in self.sweep.axes
            if len({cell.labels[axis] for cell in self.cells if axis in cell.labels}) > 1
        )

    def run_axes(self, series: Sequence[str]) -> tuple[str, ...]:
        """Return the axes in which cells of one series differ, such as the seed.

        Cells of two series with the same labels of these axes are runs of the same setting.
        """
        found = []
        for axis in self.varying:
            pairs = {(cell.labels_of(series), cell.labels[axis]) for cell in self.cells}
            if axis not in series and len(pairs) > len({labels for labels, _ in pairs}):
                found.append(axis)
        return tuple(found)

    def footnote(self, remarks: Iterable[str]) -> list[str]:
        """Return the lines below the figure: profile, data, seeds, remarks, what is missing."""
        runs = [len(g.cells) for g in self.groups([a for a in self.varying if a != SEED])]
        runs = [count for count in runs if count]
        span = f"{min(runs)}" if min(runs) == max(runs) else f"{min(runs)}–{max(runs)}"
        seeds = f"{span} seed" + ("" if span == "1" else "s")
        conditions = [
            f"{axis}: {self.sweep.shown_label(axis, labels[0])}"
            for axis in self.sweep.axes
            if axis not in (*self.varying, "dataset", SEED)
            and (labels := [cell.labels[axis] for cell in self.cells if axis in cell.labels])
        ]
        lines = [
            f"Profile {self.sweep.profile} · {seeds} · {'; '.join(self._data())}",
            "; ".join([*conditions, *dict.fromkeys(remarks)]),
            *self._missing(),
        ]
        return [line for line in lines if line]

    def _data(self) -> list[str]:
        """Return each dataset as it is displayed, with its test rows."""
        found: dict[str, None] = {}
        for cell in self.finished:
            data = cell.result.data
            label = cell.labels.get("dataset")
            name = data.dataset if label is None else self.sweep.shown_label("dataset", label)
            found[f"{name}: {data.test} test rows"] = None
        return list(found)

    def _missing(self) -> list[str]:
        """Return a line for each way in which cells are not finished, such as ``failed: FedIT``."""
        unfinished = [cell for cell in self.cells if cell.status != "finished"]
        by_status = groupby(sorted(unfinished, key=lambda c: c.status), key=lambda c: c.status)
        return [f"{status}: {'; '.join(self.names(list(cells)))}" for status, cells in by_status]

    def names(self, cells: Sequence[CellOutcome]) -> list[str]:
        """Name cells by the labels in which the figure's cells differ, with their seeds last."""
        wanted = {id(cell) for cell in cells}
        everyone: dict[str, list[CellOutcome]] = {}
        for cell in self.cells:
            axes = [axis for axis in self.varying if axis != SEED and axis in cell.labels]
            name = ", ".join(map(self.sweep.shown_label, axes, cell.labels_of(axes)))
            everyone.setdefault(name, []).append(cell)
        found: dict[str, str] = {}
        for name, members in everyone.items():
            if seeds := [c.labels.get(SEED, "") for c in members if id(c) in wanted]:
                some = SEED in self.varying and len(seeds) < len(members)
                found[name] = f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if some else ""
        if found.keys() == everyone.keys() and len({*found.values()}) == 1:
            return [f"{found.popitem()[1]} of all".removeprefix(" of ")]
        parts = [", ".join(part for part in item if part) for item in found.items()]
        more = len(parts) - MOST_NAMES
        return parts if more <= 0 else [*parts[:MOST_NAMES], f"{more} more"]

    def pooled(self, points: Iterable[Sequence[CellOutcome]]) -> list[str]:
        """Return a remark on each axis other than the seed that points are averaged over."""
        pooled: dict[str, set[str]] = {}
        for cells in points:
            for axis in self.varying:
                labels = {cell.labels.get(axis, "") for cell in cells}
                if axis != SEED and len(labels) > 1:
                    pooled.setdefault(axis, set()).update(labels)
        return [
            f"averaged over {axis}: "
            + ", ".join(self.sweep.shown_label(axis, v) for v in self.sweep.axes[axis] if v in own)
            for axis, own in pooled.items()
        ]


def number_of(cell: CellOutcome, field: str) -> float | None:
    """Return a numeric field of a cell's experiment, such as ``method.lam``; None without it.

    ``partition.alpha`` is infinite for an IID partition, and None for natural clients.
    """
    value: Any = cell.result.config
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if field == "partition.alpha":
        kind = cell.result.config["partition"]["kind"]
        value = math.inf if kind == "iid" else value if kind == "dirichlet" else None
    return None if value is None or isinstance(value, str | bool) else float(value)
