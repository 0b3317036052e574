"""Sweeps: a base experiment, axes, and the tables and figures that the cells form.

A cell is one combination of axis labels. Its fields are those of the dataset's preset, then the
sweep's base, the overrides of the command line, the values of the axes, and the adjustments of
chosen cells; later ones win. An override that would reach only some cells is refused.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trishul_ray.data.dataset import ScoredSplit, score_name
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import check_found
from trishul_ray.experiment.ids import may_identify
from trishul_ray.experiment.loading import resolve_experiment, set_field
from trishul_ray.report.figures.kind import check_figure
from trishul_ray.report.outcomes import FigureLayout, Labels, Profile, SweepHead, TableLayout
from trishul_ray.report.references import figure_keys, table_keys
from trishul_ray.sweeps.placed_yaml import Items, Pairs, Scalar, Value, fail, parse, plain
from trishul_ray.sweeps.search import EarlyStopping, Search
from trishul_ray.sweeps.sweep_file import (
    MAX_CELLS,
    Fields,
    SweepFile,
    field_of,
    folders,
    hint,
    read_axis,
    read_file,
    read_overrides,
    unknown_field,
)

#: The sweep of a profile that chooses learning rates, and the axis that it chooses from.
RATES, RATE = "rates", "optimizer.lr"
#: Caveat of a table whose runs were chosen by the scores that it shows.
CHOSEN_ON_TEST = "chosen on the test rows"
_PROFILES: tuple[Profile, ...] = ("paper", "small", "smoke")


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


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file and validate every cell.

    ``overrides`` are ``key=value`` strings for every cell, which win over ``base``. One that an
    axis or ``adjust`` sets, too, is refused, but a range or list of seeds, ``seed=0..4``, takes the
    place of the axis ``seed``.

    Raises:
        InputError: One line that names file, line, fault and remedy.
    """
    return _load(path, read_file(path), overrides)


def _load(path: Path, file: SweepFile, overrides: Sequence[str]) -> Sweep:
    """Return the sweep of a file, given what it holds."""
    name = file.name
    if name is None:  # that of the file must be one, too
        name = SweepFile.of(Pairs(str(path), {"name": Scalar(path.stem, str(path), "")})).name
    folder = path.resolve().parent.name
    profile: Profile = next((each for each in _PROFILES if each == folder), "custom")
    return _build(file, name or "", file.profile or profile, path, read_overrides(overrides))


def sweep_from_axes(axes: Sequence[str], overrides: Sequence[str] = ()) -> Sweep:
    """Make a sweep of axes as given on the command line: ``method.lam=0,0.01``, ``seed=0..4``.

    Raises:
        InputError: As :func:`load_sweep`.
    """
    read = Pairs("--axis")
    for text in axes:
        name, equals, raw = text.partition("=")
        name, place = name.strip(), f"--axis {text!r}"
        if not equals or not name:
            raise InputError(f"{place}: must be of the form field=value,value or field=0..4")
        if name in read:
            raise InputError(f"{place}: axis {name!r} is given twice; remove one")
        if wrong := unknown_field(name):
            raise InputError(f"{place}: {wrong}")
        read[name] = parse(f"[{raw}]", place, place)
    content = Pairs("--axis", {"axes": read})
    title = "Sweep over " + ", ".join(read) if read else "One run"
    content["title"] = Scalar(title, "--axis", title)
    return _build(SweepFile.of(content), "sweep", "custom", None, read_overrides(overrides))


def find_sweeps(
    names: Sequence[str], profile: str, overrides: Sequence[str] = ()
) -> tuple[Sweep, ...]:
    """Load the sweeps of a profile, from ``./sweeps`` or those that come with the package.

    The name ``all`` stands for every sweep of the profile, in the paper's order, but those whose
    file says ``in_all: false``, as those beyond the paper do.

    Raises:
        InputError: There is no such sweep, or as :func:`load_sweep`.
    """
    files: dict[str, Path] = {}
    for folder in reversed(folders()):
        found = sorted((folder / profile).glob("*.yaml"))
        files |= {file.stem: file for file in found if not file.stem.startswith("_")}
    if not files:
        raise InputError(
            f"profile {profile!r} has no sweeps in {' or '.join(map(str, folders()))}; "
            f"known profiles: {', '.join(_PROFILES)}"
        )
    wanted: dict[str, SweepFile] = {}
    for name in names:
        if name != "all" and name not in files:
            near = hint(name, sorted(files))
            if name.endswith((".yaml", ".yml")):
                near = f"for a sweep file of your own: trishul sweep {name}"
            raise InputError(f"profile {profile!r} has no sweep {name!r}; {near}")
        for each in sorted(files) if name == "all" else [name]:
            file = read_file(files[each])
            if file.in_all or name != "all":
                wanted.setdefault(each, file)
    sweeps = [_load(files[name], file, overrides) for name, file in wanted.items()]
    return tuple(sorted(sweeps, key=_position) if "all" in names else sweeps)


def _position(sweep: Sweep) -> int:
    """Return the position of a sweep's first table in the paper."""
    keys = table_keys()
    return min(
        (keys.index(table.paper) for table in sweep.tables if table.paper), default=len(keys)
    )


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


def _build(
    file: SweepFile, name: str, profile: Profile, path: Path | None, overrides: Fields
) -> Sweep:
    seeds = overrides.get("seed")
    if seeds is not None and "seed" in file.axes and (isinstance(seeds, Items) or ".." in seeds):
        # `seed=0..4` on the command line replaces the sweep's axis of seeds.
        file = file.with_axis("seed", read_axis("seed", seeds))
        overrides = {field: value for field, value in overrides.items() if field != "seed"}
    cells = _expand(file, overrides)
    title = file.title or name
    search = file.search
    _check_metrics(file)
    if search is not None:
        _check_search(file, search, cells)
        for field in overrides.keys() & search.space.keys():
            fail(
                overrides[field],
                f"`search` samples {field}, so it reaches no run; leave it out",
            )
    search = None if search is not None and search.kind == "grid" else search
    varies_rate = RATE in file.axes or (search is not None and RATE in search.space)
    if varies_rate and any(cell.fields.get("optimizer.rates") for cell in cells):
        file.fail(
            f"optimizer.rates replaces the learning rates that {RATE} varies; remove one of them",
            "axes",
        )
    stopping = file.early_stopping and _checked_stopping(file, search, cells)
    tables = _checked_tables(file, name, title, cells)
    if len(tables) == 1 and "title" not in tables[0].model_fields_set:
        tables = [tables[0].model_copy(update={"title": title})]
    if stopping is not None and stopping.on == "test":
        tables = [
            table.model_copy(update={"title": f"{table.title}, {CHOSEN_ON_TEST}"})
            for table in tables
        ]
    _check_figures(file, cells)
    return Sweep(
        name=name,
        title=title,
        profile=profile,
        file=path,
        description=file.description,
        axes=file.labels,
        shown={
            name: {label: value.shown for label, value in axis.items() if value.shown}
            for name, axis in file.axes.items()
        },
        cells=cells,
        tables=tuple(tables),
        figures=file.figures,
        search=search,
        early_stopping=stopping,
        overrides=tuple(
            f"{field}={plain(value)}"
            for field, value in overrides.items()
            if may_identify(Experiment, field)
            and any(_in_id(field, cell.experiment) for cell in cells)
        ),
        search_place=file.place("search", "kind"),
    )


def _expand(file: SweepFile, overrides: Fields) -> tuple[Cell, ...]:
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
        if any(_chosen(labels, each) for each in file.excluded):
            continue
        for number, adjustment in enumerate(file.adjust):
            if _chosen(labels, adjustment.where):
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


def _chosen(labels: Mapping[str, str], choice: Labels) -> bool:
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


def _check_search(file: SweepFile, search: Search, cells: Sequence[Cell]) -> None:
    """Check what a search samples: the ends of every range must be valid in each cell."""
    varied = {name for axis in file.axes.values() for v in axis.values() for name in v.fields}
    varied |= {name for adjustment in file.adjust for name in adjustment.fields}
    for name, domain in search.space.items():
        loc = "search", "space", name
        if wrong := unknown_field(name):
            file.fail(f"search: {wrong}", *loc)
        if name in varied:
            file.fail(f"search: an axis or `adjust` sets {name}, too; remove one of the two", *loc)
        for cell, corner in itertools.product(cells, domain.values):
            try:
                vary(cell, {name: corner})
            except InputError as error:
                file.fail(f"search: {error}", *loc)
    if search.kind == "grid":
        if search.model_fields_set - {"kind"}:
            file.fail(
                "search: a grid is made by `axes`; remove the other keys, or set kind to random",
                "search",
            )
        return
    if not search.space:
        example = "{optimizer.lr: {log: [1e-4, 1e-1]}}"
        file.fail(f"search: {search.kind} needs a space: {example}", "search")
    _check_rows(file, "search", search.on, cells)


def _check_metrics(file: SweepFile) -> None:
    """Check that the metrics that labels and a search name are some task's."""
    named = [(v.metric, v.place) for axis in file.axes.values() for v in axis.values() if v.metric]
    if file.search is not None and file.search.metric is not None:
        named.append((file.search.metric, file.place("search", "metric")))
    if not named:
        return
    from trishul_ray.tasks.base import is_metric, metric_names  # they compute with tensors

    for name, place in named:
        if not is_metric(name.removeprefix(score_name("", "validation"))):
            raise InputError(
                f"{place}: metric={name}: no task has it; {hint(name, metric_names())}"
            )


def _check_rows(file: SweepFile, section: str, on: ScoredSplit, cells: Sequence[Cell]) -> None:
    """Check that the rows exist that a section chooses on."""
    if on == "validation" and any(not cell.experiment.data.validation_share for cell in cells):
        file.fail(
            f"{section}: without data.validation_share it would choose on the test rows, whose "
            f"scores then say too much: set data.validation_share, such as 0.1, or `on: test` in "
            f"`{section}`, which every table then says",
            section,
        )


def _checked_stopping(
    file: SweepFile, search: Search | None, cells: Sequence[Cell]
) -> EarlyStopping | None:
    """Return how runs are stopped early, which compares by the search if there is one."""
    stopping = file.early_stopping
    if stopping is None:
        return None
    if not all(cell.experiment.evaluation.every for cell in cells):
        file.fail(
            "early_stopping: it compares scores between the first round and the last, and "
            "evaluation.every=0 makes none; set evaluation.every, such as 1",
            "early_stopping",
        )
    if any(table.paper for table in file.tables or ()):
        file.fail(
            "early_stopping: a table with `paper` shows finished runs only; remove one of them",
            "early_stopping",
        )
    if search is None:
        _check_rows(file, "early_stopping", stopping.on, cells)
        return stopping
    if "on" in stopping.model_fields_set:
        why = "early_stopping: it compares by the search; write `on` there"
        file.fail(why, "early_stopping", "on")
    return stopping.model_copy(update={"on": search.on})


def _checked_tables(
    file: SweepFile, name: str, title: str, cells: Sequence[Cell]
) -> Sequence[TableLayout]:
    """Return how the cells form tables; by default, one table of all axes."""
    axes = tuple(file.axes)
    if file.tables is None and axes:
        shown = tuple(axis for axis in axes if axis != "seed") or axes
        split = len(shown) - (len(shown) > 1)
        return [TableLayout(name=name, title=title, rows=shown[:split], columns=shown[split:])]
    for number, table in enumerate(file.tables or ()):
        what, loc = f"table {table.name}", ("tables", number)
        for key, names in (("rows", table.rows), ("columns", table.columns)):
            for item, axis in enumerate(names):
                if axis not in axes:
                    why = f"{what}: {key}: unknown axis {axis!r}; {hint(axis, axes)}"
                    file.fail(why, *loc, key, item)
                if axis in names[:item]:
                    why = f"{what}: {key}: {axis!r} appears twice; remove one"
                    file.fail(why, *loc, key, item)
        if both := set(table.rows) & set(table.columns):
            file.fail(f"{what}: {min(both)!r} is in rows and in columns; remove one", *loc)
        if not table.rows and not table.columns:
            example = f"`rows: [{next(iter(axes), '')}]`"
            file.fail(f"{what} needs rows or columns, such as {example}", *loc)
        if table.average and not table.columns:
            file.fail(f"{what}: average needs columns", *loc, "average")
        _check_shown(file, "table", number, table, table_keys(), cells)
        if table.column is not None:
            key = table.column.key
            file.check_labels(table.column.needs, f"{what}: {key}", *loc, key)
            for axis, labels in table.column.needs.items():
                if left_out := set(labels) - {*table.where.get(axis, labels)}:
                    why = f"where leaves out {min(left_out)!r}, which {key} needs"
                    file.fail(f"{what}: {why}", *loc, key)
    return file.tables or ()


def _check_figures(file: SweepFile, cells: Sequence[Cell]) -> None:
    for number, figure in enumerate(file.figures):
        _check_shown(file, "figure", number, figure, figure_keys(), cells)
        try:
            check_figure(figure, tuple(file.axes))
        except InputError as error:
            key = "options" if "options" in figure.model_fields_set else "kind"
            file.fail(str(error), "figures", number, key)


def _check_shown(
    file: SweepFile,
    kind: str,
    number: int,
    shown: TableLayout | FigureLayout,
    paper: Sequence[str],
    cells: Sequence[Cell],
) -> None:
    """Check what tables and figures have in common: name, cells, and their key in the paper."""
    what, loc = f"{kind} {shown.name}", (f"{kind}s", number)
    others = (file.tables if kind == "table" else file.figures) or ()
    if any(other.name == shown.name for other in others[:number]):
        file.fail(f"two {kind}s with one name, {shown.name!r}; rename one", *loc, "name")
    if shown.paper is not None and shown.paper not in paper:
        near = hint(shown.paper, paper)
        file.fail(f"{what}: paper has no {shown.paper!r}; {near}", *loc, "paper")
    file.check_labels(shown.where, f"{what}: where", *loc, "where")
    if not any(_chosen(cell.labels, shown.where) for cell in cells):
        why = f"{what}: where leaves no cell; add labels, or shorten `except`"
        file.fail(why, *loc, "where")


def _in_id(field: str, experiment: Experiment) -> bool:
    """Return whether a field is part of an experiment's id, with the value that is set."""
    fields: Any = experiment
    found: Any = experiment.identity()
    first, _, inner = field.partition(".")
    if first in experiment.stages:
        fields, found, field = experiment.stages[first], found.get(first), inner
    for name in field.split("."):
        if not isinstance(found, dict) or name not in found:
            return False
        info = type(fields).model_fields.get(name)
        extra = info.json_schema_extra if info is not None else None
        if isinstance(extra, dict) and extra.get("identity") == "default":
            return False
        found, fields = found[name], getattr(fields, name, None)
    return True
