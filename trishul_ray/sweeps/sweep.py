"""A sweep: a base experiment, axes, and the tables and figures that its cells form.

One YAML file, such as ``sweeps/smoke/vision.yaml``::

    extends: ../paper/vision.yaml    # optional; a path or a list of them
    base: {federation.rounds: 2}     # fields of every run, as in a file of `trishul run`
    axes:
      method: [trishul, ravan]       # a list or range, if the axis has the name of a field
      data:                          # or labels with their fields
        easy: {dataset: digits, partition.kind: iid}
        hard: {dataset: digits, partition.alpha: 0.05, shown: very skewed}
      seed: 0..4
    except:                          # combinations that are left out
      - {method: ravan, data: easy}
    adjust:                          # fields of chosen combinations, which win over the axes
      - {where: {method: ravan, data: hard}, fields: {optimizer.lr: 1e-3}}
    tables:
      - {name: mine, title: My table, rows: [method], columns: [data]}

``metric`` in the fields of a label names the metric that its cells are read by, and ``shown`` how
the label is displayed. A file's ``base`` is merged field by field over that of the files it extends
and ``axes`` axis by axis (null removes one); its other sections replace theirs.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.report.outcomes import FigureLayout, TableLayout
from trishul_ray.report.paper import paper_keys
from trishul_ray.sweeps.cells import (
    Adjustment,
    Axis,
    Cell,
    Fields,
    expand,
    read_axis,
    read_fields,
    read_overrides,
    unknown_field,
)
from trishul_ray.sweeps.layouts import (
    default_table,
    read_figures,
    read_labels,
    read_name,
    read_tables,
)
from trishul_ray.sweeps.located_yaml import Node, hint, parse_located, read_located
from trishul_ray.sweeps.search import EarlyStopping, Search, read_early_stopping, read_search

#: What the numbers of a sweep may be compared with.
PROFILES = ("paper", "small", "smoke", "custom")
#: The sweep of a profile that chooses learning rates, and the axis that it chooses from.
RATES, RATE = "rates", "optimizer.lr"
_SECTIONS = (
    *("extends", "name", "title", "profile", "base", "axes", "except", "adjust", "tables"),
    *("figures", "search", "early_stopping"),
)
#: How a table says that its runs were chosen by the scores that it shows.
CHOSEN_ON_TEST = "chosen on the test rows"
#: Sections that are not taken from the files that a file extends.
_OWN = ("extends", "name", "profile", "base", "axes")


@dataclass(frozen=True)
class Sweep:
    """A sweep, read and validated.

    Attributes:
        name: Identifies the sweep, also as a file name; by default that of its file.
        title: One line.
        profile: ``paper``, ``small``, ``smoke`` or ``custom``; by default the name of the file's
            folder if it is one of these, else ``custom``.
        file: Where it was read from; None if it was given on the command line.
        description: The comment at the head of the file.
        axes: Labels of each axis, in order.
        shown: How labels are displayed, by axis and label, where that differs from the label.
        cells: Every combination of labels that is not left out.
        tables: Tables that the cells form.
        figures: Figures that the cells form.
        search: How values are found that no axis sets; None is the grid of the axes.
        early_stopping: How runs that lag behind are stopped; None is never.
        overrides: The fields that the command line sets and that can change a number, as
            ``field=value``.
    """

    name: str
    title: str
    profile: str
    file: Path | None
    description: str
    axes: Mapping[str, tuple[str, ...]]
    shown: Mapping[str, Mapping[str, str]]
    cells: tuple[Cell, ...]
    tables: tuple[TableLayout, ...] = ()
    figures: tuple[FigureLayout, ...] = ()
    search: Search | None = None
    early_stopping: EarlyStopping | None = None
    overrides: tuple[str, ...] = ()


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file and validate every cell.

    Args:
        path: the file.
        overrides: ``key=value`` strings for every cell; they win over ``base``. One that an axis or
            ``adjust`` sets, too, is refused, but a range or list of seeds, ``seed=0..4``, takes the
            place of the axis ``seed``.

    Raises:
        InputError: one line that names file, line, fault and remedy.
    """
    draft = _read_draft(path, ())
    own = draft.sections
    name = read_name(own.get("name", Node(path.stem, str(path), path.stem)), "name")
    folder = path.resolve().parent.name
    profile = folder if folder in PROFILES else "custom"
    if "profile" in own:
        profile = own["profile"].scalar("profile")
        if profile not in PROFILES:
            own["profile"].fail(f"profile={profile}: must be one of {', '.join(PROFILES)}")
    return _build(draft, name, profile, path, read_overrides(overrides))


def sweep_from_axes(axes: Sequence[str], overrides: Sequence[str] = ()) -> Sweep:
    """Make a sweep of ``field=value,value`` axes, as given on the command line.

    Args:
        axes: such as ``method.lam=0,0.01`` or ``seed=0..4``.
        overrides: ``key=value`` strings for all cells.

    Raises:
        InputError: as :func:`load_sweep`.
    """
    read: dict[str, Axis] = {}
    for text in axes:
        name, equals, raw = text.partition("=")
        name, place = name.strip(), f"--axis {text!r}"
        if not equals or not name:
            raise InputError(f"{place}: must be of the form field=value,value or field=0..4")
        if name in read:
            raise InputError(f"{place}: axis {name!r} is given twice; remove one")
        if wrong := unknown_field(name):
            raise InputError(f"{place}: {wrong}")
        read[name] = read_axis(name, parse_located(f"[{raw}]", place, place))
    title = "Sweep over " + ", ".join(read) if read else "One run"
    draft = _Draft({}, read, {}, title)
    return _build(draft, "sweep", "custom", None, read_overrides(overrides))


def find_sweeps(
    names: Sequence[str], profile: str, overrides: Sequence[str] = ()
) -> tuple[Sweep, ...]:
    """Load the sweeps of a profile, from ``./sweeps`` or those that come with the package.

    Args:
        names: their names; ``all`` stands for every sweep of the profile, in the paper's order, but
            ``rates``, which has no table of the paper.
        profile: ``paper``, ``small`` or ``smoke``.
        overrides: ``key=value`` strings for all of them.

    Raises:
        InputError: there is no such sweep, or as :func:`load_sweep`.
    """
    files: dict[str, Path] = {}
    for folder in reversed(_folders()):
        found = sorted((folder / profile).glob("*.yaml"))
        files |= {file.stem: file for file in found if not file.stem.startswith("_")}
    if not files:
        raise InputError(
            f"profile {profile!r} has no sweeps in {' or '.join(map(str, _folders()))}; "
            f"known profiles: {', '.join(PROFILES[:-1])}"
        )
    wanted: dict[str, None] = {}
    for name in names:
        if name != "all" and name not in files:
            near = hint(name, sorted(files))
            raise InputError(f"profile {profile!r} has no sweep {name!r}; {near}")
        every = sorted(files.keys() - {RATES})
        wanted |= dict.fromkeys(every if name == "all" else [name])
    sweeps = [load_sweep(files[name], overrides) for name in wanted]
    return tuple(sorted(sweeps, key=_position) if "all" in names else sweeps)


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


@dataclass(frozen=True)
class _Draft:
    """The content of a file and of those it extends, before its cells are made."""

    base: Fields
    axes: dict[str, Axis]
    sections: dict[str, Node]
    title: str = ""
    description: str = ""
    place: str = "--axis"

    def over(self, older: "_Draft") -> "_Draft":
        """Return this draft merged over ``older``."""
        inherited = {k: node for k, node in older.sections.items() if k not in _OWN}
        return replace(
            self,
            base={**older.base, **self.base},
            axes={**older.axes, **self.axes},
            sections={**inherited, **self.sections},
        )


def _position(sweep: Sweep) -> int:
    """Return the position of a sweep's first table in the paper."""
    keys = paper_keys()
    return min(
        (keys.index(table.paper) for table in sweep.tables if table.paper), default=len(keys)
    )


def _folders() -> tuple[Path, ...]:
    """Return the folders of sweeps: the user's, a checkout's, the installed ones."""
    checkout = Path(__file__).parents[2] / "sweeps"
    return Path("sweeps"), checkout, Path(sys.prefix) / "share" / "trishul-ray" / "sweeps"


def _read_draft(path: Path, children: tuple[Path, ...]) -> _Draft:
    shown = os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
    root, description = read_located(path, shown)
    sections = root.mapping("a sweep file", _SECTIONS)
    axes: dict[str, Axis] = {}
    removed = []
    for name, node in sections["axes"].mapping("axes").items() if "axes" in sections else ():
        if node.is_scalar and node.value is None:
            removed.append((name, node))
        else:
            axes[name] = read_axis(name, node)
    base = read_fields(sections["base"].mapping("base")) if "base" in sections else {}
    place = sections["axes"].place if "axes" in sections else root.place
    draft = _Draft(base, axes, sections, "", description, place)
    older: _Draft | None = None
    for other in _extended(sections, path, (*children, path.resolve())):
        read = _read_draft(other, (*children, path.resolve()))
        older = read.over(older) if older else read
    draft = draft.over(older) if older else draft
    for name, node in removed:
        if name not in draft.axes:
            node.fail(f"axis {name!r} is null, but no extended file has it; give it labels")
        del draft.axes[name]
    return draft


def _extended(
    sections: Mapping[str, Node], path: Path, children: tuple[Path, ...]
) -> Iterator[Path]:
    """Yield the files that ``path`` extends: beside it, or in a folder of sweeps."""
    if "extends" not in sections:
        return
    node = sections["extends"]
    for item in [node] if node.is_scalar else node.items("extends"):
        name = item.scalar("extends")
        candidates = [folder / name for folder in (path.parent, *_folders())]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            item.fail(f"extends: {name} does not exist; give its path from this file")
        if found.resolve() in children:
            item.fail(f"extends: {name} extends this file, too; remove one of the two")
        yield found


def _read_adjustment(item: Node, axes: Mapping[str, tuple[str, ...]]) -> Adjustment:
    keys = item.mapping("adjust", ("where", "fields"))
    for key in ("where", "fields"):
        if key not in keys:
            item.fail(f"adjust: give `where`, labels by axis, and `fields`; {key} is missing")
    labels = read_labels(keys["where"], "where", axes)
    return Adjustment(item.place, labels, read_fields(keys["fields"].mapping("fields")))


def _build(draft: _Draft, name: str, profile: str, file: Path | None, overrides: Fields) -> Sweep:
    draft, overrides = _with_seeds(draft, overrides)
    sections = draft.sections
    axes = {axis.name: axis.labels for axis in draft.axes.values()}
    excluded = [
        read_labels(item, "except", axes)
        for item in (sections["except"].items("except") if "except" in sections else ())
    ]
    adjustments = [
        _read_adjustment(item, axes)
        for item in (sections["adjust"].items("adjust") if "adjust" in sections else ())
    ]
    cells = expand(
        draft.base, overrides, tuple(draft.axes.values()), excluded, adjustments, draft.place
    )
    title = sections["title"].scalar("title") if "title" in sections else draft.title or name
    if "tables" in sections:
        tables = read_tables(sections["tables"], axes, cells)
    else:
        tables = (default_table(name, title, tuple(axes)),) if axes else ()
    search = early_stopping = None
    if "search" in sections:
        varied = {f for axis in draft.axes.values() for v in axis.values for f in v.fields}
        varied |= {f for adjustment in adjustments for f in adjustment.fields}
        search = read_search(sections["search"], cells, varied)
        for field in overrides.keys() & search.space.keys():
            overrides[field].fail(f"`search` samples {field}, so it reaches no run; leave it out")
    varies_rate = RATE in axes or (search is not None and RATE in search.space)
    if varies_rate and any(cell.fields.get("optimizer.rates") for cell in cells):
        raise InputError(
            f"{draft.place}: optimizer.rates replaces the learning rates that {RATE} varies; "
            "remove one of them"
        )
    if "early_stopping" in sections:
        early_stopping = read_early_stopping(sections["early_stopping"], cells, search)
        if any(table.paper for table in tables):
            sections["early_stopping"].fail(
                "early_stopping: a table with `paper` shows finished runs only; remove one of them"
            )
        if early_stopping.on == "test":
            tables = tuple(replace(t, title=f"{t.title}, {CHOSEN_ON_TEST}") for t in tables)
    return Sweep(
        name=name,
        title=title,
        profile=profile,
        file=file,
        description=draft.description,
        axes=axes,
        shown={axis.name: axis.shown for axis in draft.axes.values()},
        cells=cells,
        tables=tables,
        figures=read_figures(sections["figures"], axes, cells) if "figures" in sections else (),
        search=search,
        early_stopping=early_stopping,
        overrides=tuple(
            f"{field}={node.plain()}"
            for field, node in overrides.items()
            if any(_in_id(field, cell.experiment) for cell in cells)
        ),
    )


def _with_seeds(draft: _Draft, overrides: Fields) -> tuple[_Draft, Fields]:
    """Let an override such as ``seed=0..4`` say how often a sweep over seeds repeats its cells."""
    seeds = overrides.get("seed")
    if seeds is None or "seed" not in draft.axes:
        return draft, overrides
    if seeds.is_scalar and ".." not in seeds.scalar("seed"):
        return draft, overrides
    rest = {field: node for field, node in overrides.items() if field != "seed"}
    return replace(draft, axes={**draft.axes, "seed": read_axis("seed", seeds)}), rest


def _in_id(field: str, experiment: Experiment) -> bool:
    """Return whether a field is part of an experiment's id, with the value that is set."""
    fields: Any = experiment
    found: Any = experiment.identity()
    for name in field.split("."):
        if not isinstance(found, dict) or name not in found:
            return False
        info = type(fields).model_fields.get(name)
        extra = info.json_schema_extra if info is not None else None
        if isinstance(extra, dict) and extra.get("identity") == "default":
            return False
        found, fields = found[name], getattr(fields, name, None)
    return True
