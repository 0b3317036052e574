"""Sweeps with the outcomes of their cells.

A cell is one combination of axis labels, such as ``{"method": "FedIT", "seed": "0"}``. A table that
reproduces a table of the paper uses the labels of the paper's records.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from trishul_ray.report.layouts import FigureLayout, Profile, TableLayout
from trishul_ray.report.summary import RunSummary, read_arrays, read_metrics
from trishul_ray.storage.store import Store

#: The axes whose labels are repetitions.
SEED, DRAW = REPETITIONS = ("seed", "draw")

#: Whether a cell has a result that can be used; see ``CellState``.
CellStatus = Literal["finished", "missing", "failed", "stale", "corrupt"]
STATUSES: tuple[CellStatus, ...] = get_args(CellStatus)

#: Metrics that are not percentages and better if lower, by full name: groups of rows have any name.
_LOSSES = ("loss", "validation_loss", "train_loss")
#: Metrics over clients that are fractions and better if lower; see ``client_metrics``.
_UNEVEN = ("per_client_sd", "per_client_gini", "personal_sd", "personal_gini", "personal_hurt")
#: Metrics that are best at 0, so that no value is better than another.
_UNORDERED = ("participation_gap", "participation_correlation")


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as SVG and PDF, its numbers as CSV, and the lines below it."""

    svg: bytes
    pdf: bytes
    csv: str
    note: str


@dataclass(frozen=True)
class CellOutcome:
    """The outcome of one cell, with the id of its experiment; other cells may share the run.

    Attributes:
        reason: One line on a cell that is not finished, or an empty string.
        metric: Name of the metric of the cell in tables.
        summary: Content of ``result.json``; None unless finished.
        home: Folder of the run.
        scored: The rounds whose scores its sweep requires, ascending; None: all. A shared run may
            have scores of more rounds than the runs that it is compared with.
    """

    labels: Mapping[str, str]
    id: str
    status: CellStatus
    reason: str
    metric: str
    summary: RunSummary | None
    home: Store
    scored: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def value(self) -> float | None:
        """The metric after the last round, as a fraction unless a loss; None if not finished."""
        return None if self.summary is None else self.summary.last_scores.get(self.metric)

    @property
    def result(self) -> RunSummary:
        """The content of ``result.json`` of a finished cell."""
        assert self.summary is not None, f"cell {self.id} is {self.status}"
        return self.summary

    @property
    def method(self) -> str:
        """The method of a finished cell."""
        return str(self.result.config["method"]["name"])

    @property
    def part(self) -> str:
        """The part of its dataset that the run used, in a line; empty if all, or not finished."""
        data = None if self.summary is None else self.summary.data
        return data.sentence.partition(";")[0] if data is not None and data.part else ""

    def labels_of(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the labels of some axes."""
        return tuple(self.labels[axis] for axis in axes)

    @cached_property
    def records(self) -> list[dict[str, float]]:
        """The rows of ``metrics.parquet``, one per round, with the scores of scored rounds only."""
        rows = read_metrics(self.home)
        if self.scored is not None:
            scores = self.result.last_scores.keys() - {"round"}
            for row in rows:
                for name in scores & row.keys() if row["round"] not in self.scored else ():
                    del row[name]
        return rows

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of ``diagnostics.npz``; empty for methods without diagnostics."""
        name = "diagnostics.npz"
        return read_arrays(self.home, name) if self.home.exists(name) else {}


@dataclass(frozen=True)
class SweepHead:
    """Name of a sweep, and the tables and figures of its cells.

    Attributes:
        name: Identifies the sweep, also as a file name.
        description: The experiment that it reproduces, and the expected result.
        axes: Labels of each axis, in order.
        shown: Displayed labels by axis and label, if the displayed text differs.
        overrides: Fields that the command line set and that can change a number: ``field=value``.
        mixed_stacks: Whether tables compare cells of different stacks.
    """

    name: str
    title: str
    profile: Profile
    description: str
    axes: Mapping[str, tuple[str, ...]]
    shown: Mapping[str, Mapping[str, str]]
    tables: tuple[TableLayout, ...]
    figures: tuple[FigureLayout, ...]
    overrides: tuple[str, ...] = field(default=(), kw_only=True)
    mixed_stacks: bool = field(default=False, kw_only=True)

    @property
    def made_by(self) -> str:
        """The command that makes its runs, without overrides."""
        return f"trishul sweep {self.name} --profile {self.profile}"

    def repetitions(self, axes: Sequence[str]) -> str:
        """Return the axis over which the numbers of a table with some axes are means.

        If there are several draws, seeds are averaged within a draw, because they share its rows.
        """
        return DRAW if DRAW not in axes and len(self.axes.get(DRAW, ())) > 1 else SEED

    def shown_label(self, axis: str, label: str) -> str:
        """Return the displayed text of a label."""
        return self.shown.get(axis, {}).get(label, label)

    def with_outcomes(self, cells: Iterable[CellOutcome]) -> "SweepOutcome":
        """Return the sweep with the outcomes of its cells."""
        head = {each.name: getattr(self, each.name) for each in fields(SweepHead)}
        return SweepOutcome(**head, cells=tuple(cells), command=self.made_by)


@dataclass(frozen=True)
class SweepOutcome(SweepHead):
    """A sweep with the outcomes of all its cells, and the command that makes its runs."""

    cells: tuple[CellOutcome, ...]
    command: str = field(default="", kw_only=True)

    def within(self, where: Mapping[str, tuple[str, ...]]) -> tuple[CellOutcome, ...]:
        """Return the cells with one of these labels on each axis."""
        return tuple(
            cell
            for cell in self.cells
            if all(cell.labels.get(axis) in labels for axis, labels in where.items())
        )

    def in_order(
        self, axes: Sequence[str], found: Iterable[tuple[str, ...]]
    ) -> list[tuple[str, ...]]:
        """Return combinations of labels of some axes in the order of the axes' labels."""
        orders = [list(self.axes[axis]) for axis in axes]
        return sorted(
            set(found),
            key=lambda labels: [o.index(label) for o, label in zip(orders, labels, strict=True)],
        )

    def departures(self, cells: Iterable[CellOutcome]) -> tuple[str, ...]:
        """Return the deviations of cells from the profile: overrides, and parts of datasets."""
        parts = dict.fromkeys(cell.part for cell in cells if cell.part)
        overridden = f"overridden: {', '.join(self.overrides)}"
        return (*[overridden] * bool(self.overrides), *parts)

    def is_comparable(self, cells: Iterable[CellOutcome]) -> bool:
        """Return whether the numbers of cells may be compared with the paper's."""
        return self.profile == "paper" and not self.departures(cells)


def is_loss(metric: str) -> bool:
    """Return whether a metric is a loss: not a percentage, and better if lower."""
    return metric in _LOSSES


def unit_of(metric: str) -> str:
    """Return the unit of a metric in a table: ``%``, ``loss`` or ``fraction``."""
    if is_loss(metric):
        return "loss"
    return "fraction" if metric in (*_UNEVEN, *_UNORDERED) else "%"


def has_order(metric: str) -> bool:
    """Return whether one value of a metric can be better than another."""
    return metric not in _UNORDERED
