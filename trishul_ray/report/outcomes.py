"""Outcomes of the cells of a sweep, from which reports build tables and figures.

A cell is one combination of axis labels, such as ``{"method": "FedIT", "seed": "0"}``. Tables that
reproduce a table of the paper use the labels of the paper's records.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from trishul_ray.report.layouts import FigureLayout, Profile, TableLayout
from trishul_ray.report.summary import RunSummary, read_arrays, read_metrics
from trishul_ray.storage.store import Store

#: Axes whose labels are repetitions of an experiment.
SEED, DRAW = REPETITIONS = ("seed", "draw")

#: Status of a cell; see ``CellState``.
CellStatus = Literal["finished", "missing", "failed", "stale", "corrupt"]
STATUSES: tuple[CellStatus, ...] = get_args(CellStatus)

#: Loss metrics. Match full names only, because names of row groups are arbitrary.
_LOSSES = ("loss", "validation_loss", "train_loss")
#: Metrics over clients that are fractions for which lower is better; see ``client_metrics``.
_UNEVEN = ("per_client_sd", "per_client_gini", "personal_sd", "personal_gini", "personal_hurt")
#: Metrics whose best value is 0; they are not ranked.
_UNORDERED = ("participation_gap", "participation_correlation")


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as SVG and PDF, its numbers as CSV, and the note below it."""

    svg: bytes
    pdf: bytes
    csv: str
    note: str


@dataclass(frozen=True)
class CellOutcome:
    """The outcome of one cell. Cells with the same experiment ``id`` share a run.

    Attributes:
        reason: Why the cell is not finished, in one line, or an empty string.
        metric: Name of the metric that tables show.
        summary: Content of ``result.json``, or None if the cell is not finished.
        home: Folder of the run.
        scored: Rounds whose scores the sweep requires, ascending, or None for all. A shared run may
            have scored more rounds than the runs that it is compared with.
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
        """The metric after the last round, or None if the cell is not finished or lacks it."""
        return None if self.summary is None else self.summary.last_scores.get(self.metric)

    @property
    def result(self) -> RunSummary:
        """Content of ``result.json``; the cell must be finished."""
        assert self.summary is not None, f"cell {self.id} is {self.status}"
        return self.summary

    @property
    def method(self) -> str:
        """Name of the method; the cell must be finished."""
        return str(self.result.config["method"]["name"])

    @property
    def part(self) -> str:
        """The part of the dataset that a finished run used, or an empty string if complete."""
        data = None if self.summary is None else self.summary.data
        return data.sentence.partition(";")[0] if data is not None and data.part else ""

    def labels_of(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(self.labels[axis] for axis in axes)

    @cached_property
    def records(self) -> list[dict[str, float]]:
        """Rows of ``metrics.parquet``, one per round, with scores only for rounds in ``scored``."""
        rows = read_metrics(self.home)
        if self.scored is not None:
            scores = self.result.last_scores.keys() - {"round"}
            for row in rows:
                for name in scores & row.keys() if row["round"] not in self.scored else ():
                    del row[name]
        return rows

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of ``diagnostics.npz``; empty for methods without diagnostics."""
        name = "diagnostics.npz"
        return read_arrays(self.home, name) if self.home.exists(name) else {}


@dataclass(frozen=True)
class SweepHead:
    """A sweep without its cells: name, axes, and the layouts of its tables and figures.

    Attributes:
        name: Name of the sweep and of its files.
        description: The experiment that the sweep reproduces, and the expected result.
        axes: Labels of each axis, in order.
        titles: Displayed labels, keyed by axis and label, if they differ from the labels.
        overrides: Fields set on the command line that can change a number, as ``field=value``.
        mixed_stacks: Whether tables compare cells of different stacks.
    """

    name: str
    title: str
    profile: Profile
    description: str
    axes: Mapping[str, tuple[str, ...]]
    titles: Mapping[str, Mapping[str, str]]
    tables: tuple[TableLayout, ...]
    figures: tuple[FigureLayout, ...]
    overrides: tuple[str, ...] = field(default=(), kw_only=True)
    mixed_stacks: bool = field(default=False, kw_only=True)

    @property
    def made_by(self) -> str:
        """The command that starts the runs, without overrides."""
        return f"trishul sweep {self.name} --profile {self.profile}"

    def repetitions(self, axes: Sequence[str]) -> str:
        """Return the axis over which a table with these axes reports mean and deviation.

        With several draws, seeds are averaged within each draw, because they share its rows.
        """
        return DRAW if DRAW not in axes and len(self.axes.get(DRAW, ())) > 1 else SEED

    def title_of(self, axis: str, label: str) -> str:
        return self.titles.get(axis, {}).get(label, label)

    def with_outcomes(self, cells: Iterable[CellOutcome]) -> "SweepOutcome":
        """Combine the sweep with the outcomes of its cells."""
        head = {each.name: getattr(self, each.name) for each in fields(SweepHead)}
        return SweepOutcome(**head, cells=tuple(cells), command=self.made_by)


@dataclass(frozen=True)
class SweepOutcome(SweepHead):
    """A sweep with the outcomes of all its cells, and the command that starts its runs."""

    cells: tuple[CellOutcome, ...]
    command: str = field(default="", kw_only=True)

    def within(self, where: Mapping[str, tuple[str, ...]]) -> tuple[CellOutcome, ...]:
        """Select the cells that have one of the given labels on each axis."""
        return tuple(
            cell
            for cell in self.cells
            if all(cell.labels.get(axis) in labels for axis, labels in where.items())
        )

    def in_order(
        self, axes: Sequence[str], found: Iterable[tuple[str, ...]]
    ) -> list[tuple[str, ...]]:
        """Sort and deduplicate combinations of labels by the order of the axes' labels."""
        orders = [list(self.axes[axis]) for axis in axes]
        return sorted(
            set(found),
            key=lambda labels: [o.index(label) for o, label in zip(orders, labels, strict=True)],
        )

    def deviations(self, cells: Iterable[CellOutcome]) -> tuple[str, ...]:
        """List the deviations of cells from the profile: overrides and incomplete datasets."""
        parts = dict.fromkeys(cell.part for cell in cells if cell.part)
        overridden = f"overridden: {', '.join(self.overrides)}"
        return (*[overridden] * bool(self.overrides), *parts)

    def is_comparable(self, cells: Iterable[CellOutcome]) -> bool:
        return self.profile == "paper" and not self.deviations(cells)


def is_loss(metric: str) -> bool:
    """Return whether a metric is a loss: lower is better, and it is not a percentage."""
    return metric in _LOSSES


def unit_of(metric: str) -> str:
    """Return the unit of a metric in a table: ``%``, ``loss`` or ``fraction``."""
    if is_loss(metric):
        return "loss"
    return "fraction" if metric in (*_UNEVEN, *_UNORDERED) else "%"


def has_order(metric: str) -> bool:
    """Return whether the values of a metric can be ranked."""
    return metric not in _UNORDERED
