"""Sweeps and their cells: the combinations of the labels of all axes.

The fields of a cell come from the dataset's preset, then the sweep's base, the overrides of the
command line, the values of the axes, and the adjustments of selected cells; later ones win. An
override that would reach only some cells is rejected.
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

#: The axis of learning rates.
RATE = "optimizer.lr"


@dataclass(frozen=True)
class Cell:
    """One combination of axis labels.

    Attributes:
        experiment: The run of the cell; cells may share one.
        labels: Label of each axis, in the order of the axes.
        metric: Name of its metric; None is the task's headline.
        rows: Rows of its metric.
        fields: The fields that the sweep sets, by dotted name.
    """

    experiment: Experiment
    labels: Mapping[str, str]
    metric: str | None = None
    rows: ScoredSplit = "test"
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def varied(self, values: Mapping[str, Any]) -> "Cell":
        """Return the cell with other fields; a learning rate that is not set is looked up again.

        Raises:
            InputError: The experiment is not valid.
        """
        fields = {**self.fields, **{field_of(name): value for name, value in values.items()}}
        return replace(self, experiment=_resolve(fields), fields=fields)


@dataclass(frozen=True)
class Sweep(SweepHead):
    """A validated sweep.

    Attributes:
        cells: Every combination of labels that ``except`` does not leave out.
        file: Its file, or None.
        search: A search by Optuna, which samples each cell; or None.
    """

    cells: tuple[Cell, ...]
    file: Path | None = None
    search: Search | None = None

    @property
    def made_by(self) -> str:
        """The command that makes its runs, without overrides."""
        if self.profile != "custom":
            return super().made_by
        if self.file is not None:
            return f"trishul sweep {self.file}"
        axes = (f"--axis {axis}={','.join(labels)}" for axis, labels in self.axes.items())
        return " ".join(["trishul sweep", *axes])

    def displayed_labels(self, cell: Cell) -> dict[str, str]:
        """Return the displayed labels of a cell, by axis."""
        return {axis: self.shown_label(axis, label) for axis, label in cell.labels.items()}

    def cell_name(self, cell: Cell) -> str:
        """Return the name of a cell in messages: ``vision: FedIT, CIFAR-100, seed=0``."""
        return ": ".join(filter(None, [self.name, joined(self.displayed_labels(cell))]))


def joined(labels: Mapping[str, str]) -> str:
    """Return labels as text; numbers have the name of their axis."""
    return ", ".join(
        f"{axis}={label}" if label.replace(".", "").isdigit() else label
        for axis, label in labels.items()
    )


def distinct(sweeps: Sequence[Sweep]) -> dict[str, Experiment]:
    """Return the experiments of all cells by id, in order, each once.

    A shared experiment is scored after every round that one of its cells requires.
    """
    found: dict[str, Experiment] = {}
    for sweep in sweeps:
        for cell in sweep.cells:
            id = cell.experiment.id
            found[id] = found[id].scored_as(cell.experiment) if id in found else cell.experiment
    return found


@dataclass(frozen=True)
class TuneOptions:
    """Options of running cells.

    Attributes:
        retries: Number of retries of a run that failed.
        stall_minutes: Minutes without a finished round after which a run is ended and retried.
        concurrency: Number of concurrent runs; None is what the cluster holds.
    """

    retries: int = 2
    stall_minutes: float = 30.0
    concurrency: int | None = None


@dataclass(frozen=True)
class CellRun:
    """The run of a trial.

    Attributes:
        experiment: The run.
        name: Its name in messages.
        tags: Tags of its MLflow run.
        replaces: Attempt of a stale run with the same id that the trial deletes first, as
            ``read_note`` returns it; None resumes an existing run.
    """

    experiment: Experiment
    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    replaces: str | None = None


#: Returns the run of a trial, given its Tune configuration.
FindRun = Callable[[Mapping[str, Any]], CellRun]


def expand(file: SweepFile, overrides: Fields) -> tuple[Cell, ...]:
    """Return the cells of all combinations but the excluded ones; the last axis varies fastest."""
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
        file.fail("no cell is left; shorten it", "except")
    for name, number in sorted(hidden.items()):
        raise InputError(
            f"override {name}={overrides[name]}: an axis or `adjust` sets {name} in {number:,} of "
            f"{len(cells):,} cells; set it in a file that extends this one"
        )
    return tuple(cells)


def _fields_of(file: SweepFile, labels: Mapping[str, str]) -> Fields:
    """Return the fields that the labels of a cell set together, and its adjustments."""
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
    """Return whether a cell has one of the selected labels on each axis."""
    return all(labels[axis] in some for axis, some in selection.items())


def _resolve(fields: Mapping[str, Any]) -> Experiment:
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        set_field(nested, name, value)
    return resolve_experiment(nested)
