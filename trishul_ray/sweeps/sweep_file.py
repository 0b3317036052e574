"""Sweep files: YAML that pydantic validates, over the files that it extends.

See docs/sweep-files.md. A file's ``base`` is merged field by field over that of the files it
extends and ``axes`` axis by axis (null removes one); its other sections replace theirs.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from trishul_ray.config.section import Section
from trishul_ray.errors import InputError, did_you_mean, one_line
from trishul_ray.experiment.loading import (
    SHORT_FIELDS,
    describe_unknown_field,
    field_names,
    full_name,
    split_override,
)
from trishul_ray.experiment.yaml_files import parse_yaml
from trishul_ray.methods.base import method_names
from trishul_ray.report.layouts import (
    FigureLayout,
    FileName,
    Labels,
    Names,
    Profile,
    TableLayout,
    Text,
)
from trishul_ray.sweeps.search import Search

#: A range such as 0..1000000 is a mistake.
MAX_CELLS = 20_000
PROFILES: tuple[Profile, ...] = get_args(Profile)
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")

#: Values by the dotted name of a field.
Fields = dict[str, Any]


def hint(name: str, known: Iterable[str]) -> str:
    """Return the known name that is nearest to ``name``, or all known names."""
    near = did_you_mean(name, known).removeprefix("; ")
    return near or f"known: {', '.join(known) or 'none'}"


@cache
def known_fields() -> frozenset[str]:
    """Return the dotted names of the fields of all methods, and the short names."""
    names = itertools.chain.from_iterable(field_names(method) for method in method_names())
    return frozenset(names) | SHORT_FIELDS.keys()


def field_of(name: str) -> str:
    """Return the dotted name of a field, which may be given by its short name or last part."""
    try:
        name = full_name(name, sorted(known_fields()))
    except InputError:  # reported when the experiment is validated
        return name
    return SHORT_FIELDS.get(name, name)


def unknown_field(name: str) -> str:
    """Return the fault of a name that is not a field, or an empty string."""
    known = known_fields()
    return "" if field_of(name) in known else describe_unknown_field(name, sorted(known))


def flat_fields(fields: Any, prefix: str = "") -> Fields:
    """Return the values of nested fields by dotted name; raise a ValueError if one is set twice."""
    if not isinstance(fields, Mapping):
        raise ValueError("must be fields, such as {optimizer.lr: 0.01}")
    flat: Fields = {}
    for key, value in fields.items():
        name = f"{prefix}{key}" if prefix else field_of(str(key))
        inner = flat_fields(value, f"{key}.") if isinstance(value, Mapping) else {name: value}
        for twice in flat.keys() & inner.keys():
            raise ValueError(f"{twice} is set twice; remove one")
        flat |= inner
    return flat


def read_overrides(overrides: Sequence[str]) -> Fields:
    """Return the values of ``key=value`` overrides by dotted field name."""
    fields: Fields = {}
    for text in overrides:
        key, raw = split_override(text)
        try:
            value = parse_yaml(raw)
        except yaml.YAMLError as error:
            raise InputError(f"override {text!r}: not YAML: {one_line(error)}") from error
        fields |= flat_fields({key: "" if value is None and not raw.strip() else value})
    return fields


FlatFields = Annotated[Fields, BeforeValidator(flat_fields)]


class AxisLabel(Section):
    """The fields that one label of an axis sets."""

    fields: Fields = Field(default_factory=dict)
    metric: Text | None = None
    shown: Text | None = None


class Adjustment(Section):
    """Fields of selected cells; they win over the axes and over earlier adjustments."""

    where: Labels = Field(description="the selected labels; all labels of an axis that is missing")
    fields: FlatFields


def _labels_of(axis: str, given: Any) -> dict[str, Any]:
    """Return the labels of an axis: values or ranges of its field, or labels with fields."""
    labels: dict[str, Any] = {}
    wrong = unknown_field(axis)
    if isinstance(given, Mapping):
        for label, fields in given.items():
            own = {}
            if isinstance(fields, Mapping):
                own = {key: fields[key] for key in ("metric", "shown") if key in fields}
                fields = {key: value for key, value in fields.items() if key not in own}
            elif wrong or fields is None:
                example = f"`{label}: {{field: value}}`"
                raise ValueError(f"axis {axis!r}: label {label!r} needs fields, as in {example}")
            else:
                fields = {axis: fields}
            labels[str(label)] = {**own, "fields": flat_fields(fields)}
    elif wrong:
        raise ValueError(f"axis {axis!r} is not a field, and needs labels with fields ({wrong})")
    else:
        for value in given if isinstance(given, list) else [given]:
            for each in _range(value):
                if str(each) in labels:
                    raise ValueError(f"axis {axis!r}: {str(each)!r} appears twice; remove one")
                labels[str(each)] = {"fields": {field_of(axis): each}}
    if not labels:
        raise ValueError(f"axis {axis!r} is empty; give it at least one label, or remove it")
    return labels


def _range(value: Any) -> Iterable[Any]:
    """Return the numbers of a range such as ``0..4``, or the value itself."""
    if isinstance(value, list | dict) or value is None or value == "":
        raise ValueError("the values of an axis must be names or numbers")
    if not (match := _RANGE.fullmatch(str(value))):
        return [value]
    first, last = map(int, match.groups())
    if not 0 <= last - first < MAX_CELLS:
        raise ValueError(f"range {value} must ascend, by at most {MAX_CELLS:,}")
    return range(first, last + 1)


class SweepFile(Section):
    """The sections of a sweep file."""

    extends: Names = ()
    name: FileName | None = None
    title: Text | None = None
    profile: Profile | None = None
    in_all: bool = True
    base: FlatFields = Field(default_factory=dict)
    axes: dict[str, dict[str, AxisLabel] | None] = Field(default_factory=dict)
    excluded: tuple[Labels, ...] = Field((), alias="except")
    adjust: tuple[Adjustment, ...] = ()
    tables: tuple[TableLayout, ...] | None = None
    figures: tuple[FigureLayout, ...] = ()
    search: Search | None = None

    _place: str = "sweep"
    _description: str = ""

    @field_validator("axes", mode="before")
    @classmethod
    def _read_axes(cls, axes: Any) -> Any:
        if not isinstance(axes, Mapping):
            return axes
        return {
            str(name): None if given is None else _labels_of(str(name), given)
            for name, given in axes.items()
        }

    @property
    def description(self) -> str:
        """The comment at the head of the file."""
        return self._description

    @property
    def labels(self) -> dict[str, dict[str, AxisLabel]]:
        """The labels of each axis."""
        return {name: labels for name, labels in self.axes.items() if labels is not None}

    def fail(self, message: str, *path: str | int) -> NoReturn:
        """Raise an InputError that names the file and the path of a value."""
        raise InputError(f"{_place(self._place, path)}: {message}")

    def check_labels(self, selected: Labels, *path: str | int) -> None:
        """Raise an InputError unless the axes and labels of a selection exist."""
        for axis, labels in selected.items():
            if axis not in self.labels:
                self.fail(f"unknown axis {axis!r}; {hint(axis, self.labels)}", *path, axis)
            for label in labels:
                if label not in self.labels[axis]:
                    near = hint(label, self.labels[axis])
                    self.fail(f"axis {axis!r} has no label {label!r}; {near}", *path, axis)


def _place(file: str, path: Sequence[str | int]) -> str:
    return ": ".join(filter(None, [file, " -> ".join(map(str, path))]))


def make_file(content: Any, place: str, description: str = "") -> SweepFile:
    """Validate the content of a sweep file, which messages name ``place``.

    Raises:
        InputError: One line that names the place, the path in it, and the fault.
    """
    try:
        made = SweepFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{_place(place, first['loc'])}: {_describe(first)}") from error
    made._place, made._description = place, description
    return made


def _describe(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        models: dict[str, type[Section]] = {
            **{"tables": TableLayout, "figures": FigureLayout},
            **{"search": Search, "adjust": Adjustment},
        }
        section = str(error["loc"][0]) if len(error["loc"]) > 1 else ""
        fields = models.get(section, SweepFile).model_fields
        known = [field.alias or name for name, field in fields.items()]
        return f"unknown key; {hint(str(error['loc'][-1]), known)}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    given = "" if error["type"] == "missing" else f", got {error['input']!r:.60}"
    return f"{error['msg'][0].lower()}{error['msg'][1:]}{given}"


def folders() -> tuple[Path, ...]:
    """Return the folders of sweeps: the user's, a checkout's, the installed ones."""
    checkout = Path(__file__).parents[2] / "sweeps"
    return Path("sweeps"), checkout, Path(sys.prefix) / "share" / "trishul-ray" / "sweeps"


def read_file(path: Path, children: tuple[Path, ...] = ()) -> SweepFile:
    """Read a file over the files that it extends.

    Raises:
        InputError: One line that names the file, the path in it, and the fault.
    """
    place = os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = parse_yaml(text)
    except FileNotFoundError:
        raise InputError(f"sweep file {place} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"sweep file {place} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{place}: not YAML: {one_line(error)}") from error
    if not content:
        raise InputError(f"{place}: the sweep file is empty; add `base` or `axes`")
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line[1:].removeprefix(" ").rstrip() for line in comment]
    own = make_file(content, place, "\n".join(lines))
    sections: dict[str, Any] = {}
    base: Fields = {}
    axes: dict[str, Any] = {}
    for other in _extended(own, path, (*children, path.resolve())):
        older = read_file(other, (*children, path.resolve()))
        kept = older.model_fields_set - {"extends", "name", "profile"}
        sections |= {name: getattr(older, name) for name in kept}
        base |= older.base
        axes |= older.axes
    for name, labels in own.axes.items():
        if labels is None and name not in axes:
            own.fail("is null, but no extended file has this axis", "axes", name)
        axes |= {name: labels}
    own_sections = {name: getattr(own, name) for name in own.model_fields_set}
    axes = {name: labels for name, labels in axes.items() if labels is not None}
    merged = sections | own_sections | {"base": base | own.base, "axes": axes}
    return own.model_copy(update=merged)


def _extended(own: SweepFile, path: Path, children: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files that ``path`` extends: next to it, or in a folder of sweeps."""
    for name in own.extends:
        candidates = [folder / name for folder in (path.parent, *folders())]
        found = next(filter(os.path.isfile, candidates), None)  # also for names that are too long
        if found is None:
            own.fail(f"{name} does not exist; give its path from this file", "extends")
        if found.resolve() in children:
            own.fail(f"{name} also extends this file; remove one of the two", "extends")
        yield found
