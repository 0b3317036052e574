"""Expand a sweep into cells, the combinations of the labels of all axes.

The fields of a cell are merged in this order, where later values take precedence: the preset of the
dataset, ``base`` of the sweep, overrides on the command line, values of the axes, and adjustments
of selected cells. Overrides that would affect only some cells are rejected.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trishul_ray.data.dataset import ScoredSplit
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import check_found
from trishul_ray.experiment.loading import resolve_experiment, set_field
from trishul_ray.report.layouts import Labels
from trishul_ray.report.outcomes import SweepHead
from trishul_ray.sweeps.search import Search
from trishul_ray.sweeps.sweep_file import MAX_CELLS, Fields, SweepFile, field_of

#: Name of the axis of learning rates.
RATE = "optimizer.lr"


@dataclass(frozen=True)
class Cell:
    """One combination of axis labels.

    Attributes:
        experiment: The experiment; cells with equal ids share a run.
        labels: Label on each axis, in the order of the axes.
        metric: Name of the reported metric, or None for the primary metric of the task.
        rows: Split that the metric is computed on.
        fields: Fields that the sweep sets, keyed by dotted name.
    """

    experiment: Experiment
    labels: Mapping[str, str]
    metric: str | None = None
    rows: ScoredSplit = "test"
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def varied(self, values: Mapping[str, Any]) -> "Cell":
        """Return a copy with other fields. A learning rate that is not set is looked up again.

        Raises:
            InputError: The experiment is not valid.
        """
        fields = {**self.fields, **{field_of(name): value for name, value in values.items()}}
        return replace(self, experiment=_resolve(fields), fields=fields)


@dataclass(frozen=True)
class Sweep(SweepHead):
    """A validated sweep.

    Attributes:
        cells: All combinations of labels that ``except`` does not exclude.
        file: The sweep file, or None.
        search: An Optuna search that samples each cell, or None.
    """

    cells: tuple[Cell, ...]
    file: Path | None = None
    search: Search | None = None

    @property
    def made_by(self) -> str:
        """The command that starts the runs, without overrides."""
        if self.profile != "custom":
            return super().made_by
        if self.file is not None:
            return f"trishul sweep {self.file}"
        axes = (f"--axis {axis}={','.join(labels)}" for axis, labels in self.axes.items())
        return " ".join(["trishul sweep", *axes])

    def displayed_labels(self, cell: Cell) -> dict[str, str]:
        return {axis: self.title_of(axis, label) for axis, label in cell.labels.items()}

    def cell_name(self, cell: Cell) -> str:
        """Return the name of a cell for messages, such as ``vision: FedIT, CIFAR-100, seed=0``."""
        return ": ".join(filter(None, [self.name, joined(self.displayed_labels(cell))]))


def joined(labels: Mapping[str, str]) -> str:
    """Join labels, prefixing numbers with the name of their axis."""
    return ", ".join(
        f"{axis}={label}" if label.replace(".", "").isdigit() else label
        for axis, label in labels.items()
    )


def distinct(sweeps: Sequence[Sweep]) -> dict[str, Experiment]:
    """Return the distinct experiments of all cells, keyed by id, in order.

    A shared experiment scores every round that any of its cells requires.
    """
    found: dict[str, Experiment] = {}
    for sweep in sweeps:
        for cell in sweep.cells:
            id = cell.experiment.id
            found[id] = (
                found[id].with_all_scores_of(cell.experiment) if id in found else cell.experiment
            )
    return found


@dataclass(frozen=True)
class TuneOptions:
    """Options for running cells.

    Attributes:
        retries: Maximum number of retries of a failed run.
        stall_minutes: Minutes without a finished round after which a run is stopped and retried.
        concurrency: Maximum number of concurrent runs, or None for the capacity of the cluster.
    """

    retries: int = 2
    stall_minutes: float = 30.0
    concurrency: int | None = None


@dataclass(frozen=True)
class CellRun:
    """The run that a Ray Tune trial executes.

    Attributes:
        experiment: The experiment to run.
        name: Name for messages.
        tags: Tags of the MLflow run.
        replaces: Name of the attempt of a stale run with the same id, which the trial deletes
            first (see ``read_note``). If None, the trial resumes an existing run.
    """

    experiment: Experiment
    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    replaces: str | None = None


#: Function that returns the run for the configuration of a Tune trial.
FindRun = Callable[[Mapping[str, Any]], CellRun]


def expand(file: SweepFile, overrides: Fields) -> tuple[Cell, ...]:
    """Build the cells of all combinations that are not excluded; the last axis varies fastest."""
    for number, excluded in enumerate(file.excluded):
        file.check_labels(excluded, "except", number)
    for number, adjustment in enumerate(file.adjust):
        file.check_labels(adjustment.where, "adjust", number, "where")
    if (count := math.prod(len(labels) for labels in file.labels.values())) > MAX_CELLS:
        sizes = " x ".join(f"{len(labels)} {name}" for name, labels in file.labels.items())
        file.fail(f"{sizes} are {count:,} cells, more than {MAX_CELLS:,}; shorten an axis", "axes")
    hidden: Counter[str] = Counter()
    cells = []
    for chosen in itertools.product(*file.labels.values()):
        labels = dict(zip(file.labels, chosen, strict=True))
        if any(is_selected(labels, each) for each in file.excluded):
            continue
        fields = _fields_of(file, labels)
        hidden.update(n for n in overrides.keys() & fields.keys() if fields[n] != overrides[n])
        metrics = [file.labels[axis][label].metric for axis, label in labels.items()]
        metric = next(filter(None, reversed(metrics)), None)
        fields = {**file.base, **overrides, **fields}
        try:
            experiment = _resolve(fields)
            check_found(experiment)
        except InputError as error:
            file.fail(str(error), joined(labels))
        cells.append(Cell(experiment, labels, metric, fields=fields))
    if not cells:
        file.fail("excludes all cells; shorten it", "except")
    for name, number in sorted(hidden.items()):
        raise InputError(
            f"override {name}={overrides[name]}: an axis or `adjust` sets {name} in {number:,} of "
            f"{len(cells):,} cells; set it in a file that extends this one"
        )
    return tuple(cells)


def _fields_of(file: SweepFile, labels: Mapping[str, str]) -> Fields:
    """Merge the fields that the labels of a cell set, and its adjustments."""
    fields: Fields = {}
    for axis, label in labels.items():
        for name, value in file.labels[axis][label].fields.items():
            if fields.setdefault(name, value) != value:
                path = "axes", axis, label, name
                file.fail(f"{value!r}, but another axis sets {fields[name]!r}", *path)
    for adjustment in file.adjust:
        if is_selected(labels, adjustment.where):
            fields |= adjustment.fields
    return fields


def is_selected(labels: Mapping[str, str], selection: Labels) -> bool:
    return all(labels[axis] in some for axis, some in selection.items())


def _resolve(fields: Mapping[str, Any]) -> Experiment:
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        set_field(nested, name, value)
    return resolve_experiment(nested)
