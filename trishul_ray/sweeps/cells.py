"""Sweeps and their cells, which are the combinations of the labels of all axes.

The fields of a cell are those of the dataset's preset, then the sweep's base, the overrides of the
command line, the values of the axes, and the adjustments of chosen cells; later ones win. An
override that would reach only some cells is refused.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trishul_ray.data.dataset import ScoredSplit
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import check_found
from trishul_ray.experiment.loading import resolve_experiment, set_field
from trishul_ray.report.outcomes import Labels, SweepHead
from trishul_ray.sweeps.placed_yaml import Value, fail, plain
from trishul_ray.sweeps.search import EarlyStopping, Search
from trishul_ray.sweeps.sweep_file import MAX_CELLS, Fields, SweepFile, field_of

#: The axis of learning rates.
RATE = "optimizer.lr"
#: Caveat of a table whose runs were chosen by the scores that it shows.
CHOSEN_ON_TEST = "chosen on the test rows"


@dataclass(frozen=True)
class Cell:
    """One combination of axis labels.

    Attributes:
        experiment: The run that it is read from; cells may share one.
        labels: Label of each axis, in the order of the axes.
        metric: Name of the metric that it is read by; None is the task's headline.
        rows: Rows whose metric it is read by.
        fields: The fields that the sweep sets, by dotted name, for :func:`vary`.
    """

    experiment: Experiment
    labels: Mapping[str, str]
    metric: str | None = None
    rows: ScoredSplit = "test"
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Sweep(SweepHead):
    """A sweep, read and validated.

    Attributes:
        cells: Every combination of labels that is not left out.
        file: Where it was read from; None if it was given on the command line.
        search: How values are found that no axis sets; None is the grid of the axes.
        early_stopping: How runs that lag behind are stopped; None is never.
        search_place: Where the search stands, for errors.
    """

    cells: tuple[Cell, ...]
    file: Path | None = None
    search: Search | None = None
    early_stopping: EarlyStopping | None = None
    search_place: str = field(default="search", compare=False)

    @property
    def is_adaptive(self) -> bool:
        """Whether its cells are only known once others have finished."""
        return self.search is not None and self.search.kind == "optuna"

    @property
    def compared(self) -> Search | None:
        """Comparison of its runs with each other while they run; None if there is none."""
        if self.search is None and self.early_stopping is not None:
            return Search(on=self.early_stopping.on)
        return self.search


@dataclass(frozen=True)
class TuneOptions:
    """Options of running cells.

    Attributes:
        retries: How often a cell that failed is tried again.
        stall_minutes: Minutes without a finished round after which a cell is ended and tried again.
        concurrency: Number of cells at a time; None is what the cluster holds, with the nodes that
            its autoscaler may add. Cells beyond that wait.
    """

    retries: int = 2
    stall_minutes: float = 30.0
    concurrency: int | None = None


@dataclass(frozen=True)
class CellRun:
    """Runs of a trial.

    Attributes:
        experiment: The run.
        name: How it is called in messages.
        tags: Tags of its MLflow run.
        replaces: Attempt of an earlier run with the same id that is deleted first, as
            ``attempt_of`` returns it; None keeps what there is and continues it.
        stays_stopped: Whether a run that early stopping has ended answers with its last round,
            instead of going on.
    """

    experiment: Experiment
    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    replaces: str | None = None
    stays_stopped: bool = False


#: Returns what a trial runs, given its Tune configuration.
FindRun = Callable[[Mapping[str, Any]], CellRun]


def distinct(sweeps: Sequence[Sweep]) -> dict[str, Experiment]:
    """Return the experiments of all cells by id, in order, each once.

    One that several cells share is scored after every round that one of them asks for.
    """
    found: dict[str, Experiment] = {}
    for sweep in sweeps:
        for cell in sweep.cells:
            id = cell.experiment.id
            found[id] = found[id].scored_as(cell.experiment) if id in found else cell.experiment
    return found


def vary(cell: Cell, values: Mapping[str, Any]) -> Cell:
    """Return a cell with other fields, by dotted name, as a search samples them.

    A learning rate that is not set is looked up again, for the new fields.

    Raises:
        InputError: The experiment is not valid.
    """
    fields = {**cell.fields, **{field_of(name): value for name, value in values.items()}}
    labels = {**cell.labels, **{name: str(value) for name, value in values.items()}}
    return replace(cell, experiment=_resolve(fields), labels=labels, fields=fields)


def expand(file: SweepFile, overrides: Fields) -> tuple[Cell, ...]:
    """Return the cells of all combinations but the excluded ones; the last axis varies fastest."""
    place = file.place("axes")
    for number, excluded in enumerate(file.excluded):
        file.check_labels(excluded, "except", "except", number)
    for number, adjustment in enumerate(file.adjust):
        file.check_labels(adjustment.where, "where", "adjust", number, "where")
    count = math.prod(len(axis) for axis in file.axes.values())
    if count > MAX_CELLS:
        sizes = " x ".join(f"{len(axis)} {name}" for name, axis in file.axes.items())
        raise InputError(
            f"{place}: {sizes} are {count:,} cells, and a sweep may have {MAX_CELLS:,}; "
            "shorten an axis or divide the sweep"
        )
    common = {**file.base, **overrides}
    hindered: dict[str, list[Value]] = {}
    used: set[int] = set()
    cells = []
    for labels, fields, metric in _combinations(file):
        if any(is_chosen(labels, each) for each in file.excluded):
            continue
        for number, adjustment in enumerate(file.adjust):
            if is_chosen(labels, adjustment.where):
                fields |= adjustment.fields
                used.add(number)
        for name in overrides.keys() & fields.keys():
            if plain(fields[name]) != plain(overrides[name]):
                hindered.setdefault(name, []).append(fields[name])
        cells.append(_make_cell({**common, **fields}, labels, metric, place))
    if not cells:
        raise InputError(f"{place}: no cell is left; shorten `except`")
    for number in range(len(file.adjust)):
        if number not in used:
            file.fail("adjust: no cell has these labels; change or remove them", "adjust", number)
    for name, values in sorted(hindered.items()):
        fail(
            overrides[name],
            f"it does not reach {len(values):,} of {len(cells):,} cells, for which an axis or "
            f"`adjust` sets {name} (first at {values[0].place}: {plain(values[0])!r}); set it "
            "there, in a file of your own that extends this one",
        )
    return tuple(cells)


def _combinations(file: SweepFile) -> Iterator[tuple[dict[str, str], Fields, str | None]]:
    """Yield the labels of all axes, and the fields and the metric that they set together."""
    for chosen in itertools.product(*(axis.items() for axis in file.axes.values())):
        labels = dict(zip(file.axes, (label for label, _ in chosen), strict=True))
        fields: Fields = {}
        metric: str | None = None
        for axis, (_, value) in zip(file.axes, chosen, strict=True):
            for name, given in value.fields.items():
                if name in fields and plain(fields[name]) != plain(given):
                    fail(
                        given,
                        f"axis {axis!r} sets {name}={plain(given)!r}, but another axis sets "
                        f"{plain(fields[name])!r} at {fields[name].place} (cell {_name(labels)}); "
                        "set it on one axis, or leave the combination out under `except`",
                    )
                fields[name] = given
            if value.metric is not None and metric not in (None, value.metric):
                raise InputError(
                    f"{value.place}: two axes name a metric, {metric!r} and {value.metric!r} "
                    f"(cell {_name(labels)}); name it on one axis"
                )
            metric = value.metric or metric
        yield labels, fields, metric


def is_chosen(labels: Mapping[str, str], choice: Labels) -> bool:
    """Return whether a cell has one of the chosen labels on each axis."""
    return all(labels[axis] in some for axis, some in choice.items())


def _make_cell(fields: Fields, labels: Mapping[str, str], metric: str | None, place: str) -> Cell:
    values = {name: plain(value) for name, value in fields.items()}
    try:
        experiment = _resolve(values)
        check_found(experiment)
    except InputError as error:
        cell = f" (cell {_name(labels)})" if labels else ""
        raise InputError(f"{_blame(str(error), fields) or place}: {error}{cell}") from error
    return Cell(experiment, labels, metric, fields=values)


def _resolve(fields: Mapping[str, Any]) -> Experiment:
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        set_field(nested, name, value)
    return resolve_experiment(nested)


def _blame(message: str, fields: Fields) -> str | None:
    """Return the place of the field that ``message`` is about: the first that it names."""
    found = []
    for name, value in fields.items():
        match = re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", message)
        if match:
            found.append((match.start(), value.place))
    return min(found)[1] if found else None


def _name(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{axis}={label}" for axis, label in labels.items())
