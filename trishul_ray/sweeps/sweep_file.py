"""Parse and validate sweep files, and merge them over the files that they extend.

The ``base`` of a file replaces single fields of the extended files, and ``axes`` replaces single
axes (null removes an axis). Every other section replaces the whole section. See
docs/sweep-files.md.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from trishul_ray.config.section import Section
from trishul_ray.errors import InputError, did_you_mean, one_line
from trishul_ray.experiment.loading import SHORT_FIELDS, field_names, full_name, split_override
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

#: Maximum number of cells; a range such as 0..1000000 is a mistake.
MAX_CELLS = 20_000
PROFILES: tuple[Profile, ...] = get_args(Profile)
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")

#: Values, keyed by the dotted name of the field.
Fields = dict[str, Any]


def hint(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is closest to ``name``, or list all known names."""
    near = did_you_mean(name, known).removeprefix("; ")
    return near or f"known: {', '.join(known) or 'none'}"


@cache
def _known_fields() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for m in method_names() for name in field_names(m)))


def field_of(name: str) -> str:
    """Expand the short name or last part of a field's name to its dotted name.

    Raises:
        InputError: No field matches, or several fields match.
    """
    name = full_name(name, _known_fields())
    return SHORT_FIELDS.get(name, name)


def flat_fields(fields: Any, prefix: str = "") -> Fields:
    """Flatten nested fields to dotted names; raise ValueError if a field is set twice."""
    if not isinstance(fields, Mapping):
        raise ValueError("must be a mapping of fields, such as {optimizer.lr: 0.01}")
    flat: Fields = {}
    for key, value in fields.items():
        name = f"{prefix}{key}" if prefix else field_of(str(key))
        inner = flat_fields(value, f"{key}.") if isinstance(value, Mapping) else {name: value}
        for twice in flat.keys() & inner.keys():
            raise ValueError(f"{twice} is set twice; remove one")
        flat |= inner
    return flat


def parse(text: str, place: str) -> Any:
    """Parse YAML; raise InputError with ``place`` if it is invalid."""
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise InputError(f"{place}: not YAML: {one_line(error)}") from error


def read_overrides(overrides: Sequence[str]) -> Fields:
    """Parse ``key=value`` overrides into values, keyed by dotted name."""
    fields: Fields = {}
    for text in overrides:
        key, raw = split_override(text)
        fields |= flat_fields({key: parse(raw, f"override {text!r}") if raw.strip() else ""})
    return fields


FlatFields = Annotated[Fields, BeforeValidator(flat_fields)]


class AxisLabel(Section):
    """Fields that a label of an axis sets."""

    fields: FlatFields = Field(default_factory=dict)
    metric: Text | None = None
    title: Text | None = None


class Adjustment(Section):
    """Fields of selected cells, which override the axes and earlier adjustments."""

    where: Labels = Field(description="selected labels, keyed by axis; all labels of other axes")
    fields: FlatFields


def _labels_of(axis: str, given: Any) -> dict[str, Any]:
    """Parse the labels of an axis: values or ranges of its field, or labels with fields."""
    if isinstance(given, Mapping):
        pairs = [(str(label), value) for label, value in given.items()]
    else:
        values = given if isinstance(given, list) else [given]
        pairs = [(str(each), each) for value in values for each in _range(value)]
    labels: dict[str, Any] = {}
    for label, value in pairs:
        if label in labels:
            raise ValueError(f"axis {axis!r}: {label!r} appears twice; remove one")
        fields = dict(value) if isinstance(value, Mapping) else {axis: value}
        display = {key: fields.pop(key) for key in ("metric", "title") if key in fields}
        labels[label] = {**display, "fields": fields}
    if not labels:
        raise ValueError(f"axis {axis!r} is empty; add a label, or remove the axis")
    return labels


def _range(value: Any) -> Iterable[Any]:
    """Expand a range such as ``0..4``, or return the value itself."""
    if isinstance(value, list | dict) or value is None or value == "":
        raise ValueError("values of an axis must be names or numbers")
    if not (match := _RANGE.fullmatch(str(value))):
        return [value]
    first, last = map(int, match.groups())
    if not 0 <= last - first < MAX_CELLS:
        raise ValueError(f"range {value} must ascend, by at most {MAX_CELLS:,}")
    return range(first, last + 1)


class SweepFile(Section):
    """Content of a sweep file."""

    extends: Names = ()
    name: FileName | None = None
    title: Text | None = None
    profile: Profile | None = None
    in_all: bool = True
    mixed_stacks: bool = False
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
        """The leading comment of the file."""
        return self._description

    @property
    def labels(self) -> dict[str, dict[str, AxisLabel]]:
        """Labels of each axis, without removed axes."""
        return {name: labels for name, labels in self.axes.items() if labels is not None}

    def fail(self, message: str, *path: str | int) -> NoReturn:
        """Raise InputError with the file and the path of a value."""
        raise InputError(f"{_place(self._place, path)}: {message}")

    def check_labels(self, selected: Labels, *path: str | int) -> None:
        """Raise InputError if an axis or label of a selection does not exist."""
        for axis, labels in selected.items():
            self.check_axis(axis, *path)
            for label in labels:
                if label not in self.labels[axis]:
                    near = hint(label, self.labels[axis])
                    self.fail(f"axis {axis!r} has no label {label!r}; {near}", *path, axis)

    def check_axis(self, axis: str, *path: str | int) -> None:
        if axis not in self.labels:
            self.fail(f"unknown axis {axis!r}; {hint(axis, self.labels)}", *path)


_KEYS = [
    field.alias or name
    for section in (SweepFile, TableLayout, FigureLayout, Search, Adjustment)
    for name, field in section.model_fields.items()
]


def _place(file: str, path: Sequence[str | int]) -> str:
    return ": ".join(filter(None, [file, " -> ".join(map(str, path))]))


def make_file(content: Any, place: str, description: str = "") -> SweepFile:
    """Validate the content of a sweep file.

    Raises:
        InputError: The content is invalid. The message names ``place`` and the path in it.
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
        return f"unknown key{did_you_mean(str(error['loc'][-1]), _KEYS)}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    given = "" if error["type"] == "missing" else f", got {error['input']!r:.60}"
    return f"{error['msg'][0].lower()}{error['msg'][1:]}{given}"


def folders() -> tuple[Path, ...]:
    """Return the folders of sweep files: user, checkout and installed package."""
    checkout = Path(__file__).parents[2] / "sweeps"
    return Path("sweeps"), checkout, Path(sys.prefix) / "share" / "trishul-ray" / "sweeps"


def read_file(path: Path, children: tuple[Path, ...] = ()) -> SweepFile:
    """Load a sweep file, and merge it over the files that it extends.

    Raises:
        InputError: The file is invalid. The message names the file and the path in it.
    """
    place = os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"sweep file {place} cannot be read: {error}") from error
    if not (content := parse(text, place)):
        raise InputError(f"{place}: the sweep file is empty; add `base` or `axes`")
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line[1:].removeprefix(" ").rstrip() for line in comment]
    file = make_file(content, place, "\n".join(lines))
    sections: dict[str, Any] = {}
    base: Fields = {}
    axes: dict[str, Any] = {}
    for name in file.extends:
        candidates = [folder / name for folder in (path.parent, *folders())]
        found = next(filter(os.path.isfile, candidates), None)  # False if a name is too long
        if found is None:
            file.fail(f"{name} does not exist; set its path relative to this file", "extends")
        if found.resolve() in (*children, path.resolve()):
            file.fail(f"{name} also extends this file; remove one of the two", "extends")
        extended = read_file(found, (*children, path.resolve()))
        set_fields = extended.model_fields_set - {"extends", "name", "profile"}
        sections |= {section: getattr(extended, section) for section in set_fields}
        base |= extended.base
        axes |= extended.axes
    sections |= {section: getattr(file, section) for section in file.model_fields_set}
    axes = {name: labels for name, labels in (axes | file.axes).items() if labels is not None}
    return file.model_copy(update=sections | {"base": base | file.base, "axes": axes})
