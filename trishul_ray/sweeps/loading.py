"""Read sweeps from files, from the folders of sweeps, or from axes on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.ids import may_identify
from trishul_ray.report.outcomes import SEED, Profile, TableLayout
from trishul_ray.report.references import table_keys
from trishul_ray.sweeps.cells import CHOSEN_ON_TEST, Sweep, expand
from trishul_ray.sweeps.checks import (
    check_figures,
    check_metrics,
    check_tables,
    check_varied_rates,
    checked_search,
    checked_stopping,
)
from trishul_ray.sweeps.placed_yaml import Items, Pairs, Scalar, parse, plain
from trishul_ray.sweeps.search import EarlyStopping
from trishul_ray.sweeps.sweep_file import (
    Fields,
    SweepFile,
    folders,
    hint,
    read_axis,
    read_file,
    read_overrides,
    unknown_field,
)

_PROFILES: tuple[Profile, ...] = ("paper", "small", "smoke")


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


def _build(
    file: SweepFile, name: str, profile: Profile, path: Path | None, overrides: Fields
) -> Sweep:
    """Return the sweep of a file, with the name and profile that it has."""
    seeds = overrides.get("seed")
    if seeds is not None and "seed" in file.axes and (isinstance(seeds, Items) or ".." in seeds):
        # `seed=0..4` on the command line replaces the sweep's axis of seeds.
        axes = file.axes | {"seed": read_axis("seed", seeds)}
        file = file.model_copy(update={"axes": axes})
        overrides = {field: value for field, value in overrides.items() if field != "seed"}
    cells = expand(file, overrides)
    check_metrics(file)
    search = checked_search(file, cells, overrides)
    check_varied_rates(file, search, cells)
    stopping = checked_stopping(file, search, cells)
    check_tables(file, cells)
    check_figures(file, cells)
    title = file.title or name
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
        tables=_tables(file, name, title, stopping),
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


def _tables(
    file: SweepFile, name: str, title: str, stopping: EarlyStopping | None
) -> tuple[TableLayout, ...]:
    """Return how the cells form tables; by default, one table of all axes."""
    tables = file.tables or ()
    if file.tables is None and file.axes:
        shown = tuple(axis for axis in file.axes if axis != SEED) or tuple(file.axes)
        split = len(shown) - (len(shown) > 1)
        tables = (TableLayout(name=name, title=title, rows=shown[:split], columns=shown[split:]),)
    if len(tables) == 1 and "title" not in tables[0].model_fields_set:
        tables = (tables[0].model_copy(update={"title": title}),)
    if stopping is None or stopping.on != "test":
        return tables
    return tuple(
        table.model_copy(update={"title": f"{table.title}, {CHOSEN_ON_TEST}"}) for table in tables
    )


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
