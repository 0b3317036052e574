"""Load and validate sweeps from files, profiles, or axes on the command line."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trishul_ray.data.dataset import score_name
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.report.layouts import FigureLayout, Profile, TableLayout
from trishul_ray.report.outcomes import REPETITIONS
from trishul_ray.report.references import figure_keys, table_keys
from trishul_ray.sweeps.cells import RATE, Cell, Sweep, expand, is_selected
from trishul_ray.sweeps.samples import with_random_samples
from trishul_ray.sweeps.search import Search
from trishul_ray.sweeps.sweep_file import (
    PROFILES,
    Fields,
    SweepFile,
    field_of,
    folders,
    hint,
    make_file,
    parse,
    read_file,
    read_overrides,
)


def load_sweep(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Sweep:
    """Load a sweep, and validate all of its cells.

    Args:
        source: Path of a sweep file, or its content.
        overrides: ``key=value`` strings that apply to all cells, and take precedence over ``base``.
            Overrides of fields that an axis or ``adjust`` sets are rejected. However, a range or
            list of seeds or draws, such as ``seed=0..4``, replaces the axis.

    Raises:
        InputError: The sweep is invalid. The message names the file and the path in it.
    """
    fields = read_overrides(overrides)
    if isinstance(source, Path):
        return _load(source, read_file(source), fields)
    return _build(make_file(dict(source), "sweep"), "sweep", "custom", None, fields)


def sweep_from_axes(axes: Sequence[str], overrides: Sequence[str] = ()) -> Sweep:
    """Create a sweep from axes on the command line, such as ``method.lam=0,0.01`` or ``seed=0..4``.

    Raises:
        InputError: As :func:`load_sweep`.
    """
    read: dict[str, Any] = {}
    for text in axes:
        name, equals, raw = text.partition("=")
        if not equals or not name.strip():
            raise InputError(f"--axis {text!r} must be of the form field=value,value or field=0..4")
        if "(" in raw:
            raise InputError(
                f"--axis {text!r} must list values; define a search in a sweep file (see "
                "docs/sweep-files.md)"
            )
        if name.strip() in read:
            raise InputError(f"--axis {text!r}: the axis appears twice; remove one")
        read[name.strip()] = parse(f"[{raw}]", f"--axis {text!r}")
    title = "Sweep over " + ", ".join(read) if read else "One run"
    file = make_file({"title": title, "axes": read}, "--axis")
    return _build(file, "sweep", "custom", None, read_overrides(overrides))


def find_sweeps(
    names: Sequence[str], profile: str, overrides: Sequence[str] = ()
) -> tuple[Sweep, ...]:
    """Load the sweeps of a profile from ``./sweeps`` or the package.

    The name ``all`` selects every sweep of the profile, in the paper's order, except files with
    ``in_all: false``.

    Raises:
        InputError: A sweep does not exist or is invalid.
    """
    files: dict[str, Path] = {}
    for folder in reversed(folders()):
        found = sorted((folder / profile).glob("*.yaml"))
        files |= {file.stem: file for file in found if not file.stem.startswith("_")}
    if not files:
        raise InputError(
            f"profile {profile!r} has no sweeps in {' or '.join(map(str, folders()))}; "
            f"known profiles: {', '.join(PROFILES[:-1])}"
        )
    selected: dict[str, SweepFile] = {}
    for name in names:
        if name != "all" and name not in files:
            raise InputError(f"profile {profile!r} has no sweep {name!r}; {hint(name, files)}")
        for each in sorted(files) if name == "all" else [name]:
            file = read_file(files[each])
            if file.in_all or name != "all":
                selected.setdefault(each, file)
    fields = read_overrides(overrides)
    sweeps = [_load(files[name], file, fields) for name, file in selected.items()]
    keys = [*table_keys()]

    def position(sweep: Sweep) -> int:
        return min((keys.index(t.paper) for t in sweep.tables if t.paper), default=len(keys))

    return tuple(sorted(sweeps, key=position) if "all" in names else sweeps)


def _load(path: Path, file: SweepFile, overrides: Fields) -> Sweep:
    name = file.name or make_file({"name": path.stem}, str(path)).name or ""
    folder = path.resolve().parent.name
    profile: Profile = next((each for each in PROFILES if each == folder), "custom")
    return _build(file, name, file.profile or profile, path, overrides)


def _build(
    file: SweepFile, name: str, profile: Profile, path: Path | None, overrides: Fields
) -> Sweep:
    """Build the sweep of a file, and validate the file against its cells."""
    for axis in file.labels.keys() & REPETITIONS:
        given = overrides.get(axis)
        if isinstance(given, list) or ".." in str(given):
            replaced = make_file({"axes": {axis: given}}, f"override {axis}").axes
            file = file.model_copy(update={"axes": file.axes | replaced})
            overrides = {field: value for field, value in overrides.items() if field != axis}
    title, search = file.title or name, file.search
    cells = expand(file, overrides)
    _check_axes(file, cells)
    _check_metrics(file)
    if search is not None:
        _check_search(file, search, cells, overrides)
    varies_rate = RATE in file.labels or (search is not None and RATE in search.space)
    if varies_rate and any(cell.fields.get("optimizer.rates") for cell in cells):
        file.fail(f"optimizer.rates would replace the rates of {RATE}; remove one of the two")
    tables = _tables(file, name, title)
    _check_layouts(file, "tables", tables, table_keys(), cells)
    _check_layouts(file, "figures", file.figures, figure_keys(), cells)
    sweep = Sweep(
        name=name,
        title=title,
        profile=profile,
        description=file.description,
        axes={axis: tuple(labels) for axis, labels in file.labels.items()},
        titles={
            axis: {label: each.title for label, each in labels.items() if each.title}
            for axis, labels in file.labels.items()
        },
        tables=tables,
        figures=file.figures,
        overrides=tuple(
            f"{field}={value}"
            for field, value in overrides.items()
            if Experiment.may_identify(field)
        ),
        mixed_stacks=file.mixed_stacks,
        cells=cells,
        file=path,
        search=search,
    )
    if search is not None and search.kind == "random":
        return with_random_samples(sweep, search)
    return sweep


def _tables(file: SweepFile, name: str, title: str) -> tuple[TableLayout, ...]:
    """Return the tables of a file, or one table of all axes if ``tables`` is not set."""
    if file.tables is None and file.labels:
        axes = [axis for axis in file.labels if axis not in REPETITIONS] or [*file.labels]
        split = len(axes) - (len(axes) > 1)
        rows, columns = tuple(axes[:split]), tuple(axes[split:])
        return (TableLayout(name=name, title=title, rows=rows, columns=columns),)
    tables = file.tables or ()
    if len(tables) == 1 and "title" not in tables[0].model_fields_set:
        return (tables[0].model_copy(update={"title": title}),)
    return tables


def _check_axes(file: SweepFile, cells: Sequence[Cell]) -> None:
    """Reject axes on which two labels report the same metric of the same runs."""
    for axis in file.labels:
        found: dict[str, list[object]] = {}
        for cell in cells:
            others = tuple(label for name, label in cell.labels.items() if name != axis)
            shown = others, cell.experiment.id, cell.metric
            found.setdefault(cell.labels[axis], []).append(shown)
        first: dict[tuple[object, ...], str] = {}
        for label, runs in found.items():
            if (same := first.setdefault(tuple(runs), label)) != label:
                file.fail(
                    f"has the same runs as {same!r}: no field that affects results differs; "
                    "remove one",
                    *("axes", axis, label),
                )


def _check_metrics(file: SweepFile) -> None:
    """Reject metrics of labels or a search that no task defines."""
    named: list[tuple[str, tuple[str, ...]]] = [
        (value.metric, ("axes", axis, label, "metric"))
        for axis, labels in file.labels.items()
        for label, value in labels.items()
        if value.metric
    ]
    if file.search is not None and file.search.metric is not None:
        named.append((file.search.metric, ("search", "metric")))
    if named:
        from trishul_ray.tasks.base import is_metric, metric_names  # imports torch

        for name, path in named:
            if not is_metric(name.removeprefix(score_name("", "validation"))):
                file.fail(f"unknown metric {name!r}; {hint(name, metric_names())}", *path)


def _check_search(
    file: SweepFile, search: Search, cells: Sequence[Cell], overrides: Fields
) -> None:
    """Validate the ends of every sampled range in each cell, and the split to compare on."""
    fixed = {*overrides, *(name for each in file.adjust for name in each.fields)}
    fixed |= {n for labels in file.labels.values() for v in labels.values() for n in v.fields}
    for name, space in search.space.items():
        path = "search", "space", name
        try:
            if field_of(name) in fixed:
                raise InputError("an axis, `adjust` or an override also sets this field")
            for cell, end in itertools.product(cells, space.values):
                cell.varied({name: end})
        except InputError as error:
            file.fail(str(error), *path)
    if search.rows == "validation" and not all(c.experiment.data.validation_share for c in cells):
        file.fail(
            "rows=validation requires validation rows in all cells; set data.validation_share, "
            "such as 0.1, or `rows: test`, which tables then report",
            "search",
        )


def _check_layouts(
    file: SweepFile,
    section: str,
    layouts: Sequence[TableLayout | FigureLayout],
    paper: Sequence[str],
    cells: Sequence[Cell],
) -> None:
    """Reject tables or figures with unknown axes, labels or cells."""
    for number, layout in enumerate(layouts):
        path = section, number
        if any(other.name == layout.name for other in layouts[:number]):
            file.fail(f"{layout.name!r} appears twice; rename one", *path, "name")
        if layout.paper is not None and layout.paper not in paper:
            near = hint(layout.paper, paper)
            file.fail(f"the paper has no {layout.paper!r}; {near}", *path, "paper")
        file.check_labels(layout.where, *path, "where")
        shown = [cell.labels for cell in cells if is_selected(cell.labels, layout.where)]
        if not shown:
            file.fail("selects no cell; add labels, or shorten `except`", *path, "where")
        if isinstance(layout, TableLayout):
            _check_table(file, layout, path, shown)
        else:
            for axis in (*(layout.series or ()), *(layout.panels or ())):
                file.check_axis(axis, *path)


def _check_table(
    file: SweepFile,
    table: TableLayout,
    path: tuple[str | int, ...],
    shown: Sequence[Mapping[str, str]],
) -> None:
    axes = [*table.rows, *table.columns]
    for axis in axes:
        file.check_axis(axis, *path)
    if not axes or len(axes) > len({*axes}):
        file.fail("must have rows or columns, and each axis only once", *path)
    if table.average and not table.columns:
        file.fail("requires columns", *path, "average")
    if target := table.target:
        file.check_labels({target.axis: (target.reference,)}, *path, "target")
        if target.reference not in table.where.get(target.axis, (target.reference,)):
            file.fail(f"where excludes {target.reference!r}, which target requires", *path, "where")
        if table.eval is not None:
            file.fail("eval and target are mutually exclusive; remove one", *path)
    # A number is a mean over repetitions, so its row and column must determine all other labels.
    hidden = [axis for axis in file.labels if axis not in (*axes, *REPETITIONS)]
    settings = {tuple(cell[axis] for axis in (*axes, *hidden)) for cell in shown}
    if len(settings) > len({setting[: len(axes)] for setting in settings}):
        file.fail(
            f"averages over different labels of {' and '.join(hidden)}; make the axis a row or "
            "column, or select one label with `where`",
            *path,
        )
