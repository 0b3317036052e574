"""Sweep files: what YAML holds becomes the sections of a sweep; every mistake names file and line.

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

import itertools
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator
from pydantic import ValidationError as Invalid
from pydantic_core import ErrorDetails

from trishul_ray.config.section import Section
from trishul_ray.errors import InputError, did_you_mean
from trishul_ray.experiment.loading import (
    SHORT_FIELDS,
    describe_unknown_field,
    field_names,
    full_name,
    split_override,
)
from trishul_ray.methods.base import method_names
from trishul_ray.report.outcomes import (
    COLUMNS,
    FigureLayout,
    FileName,
    Labels,
    Names,
    Profile,
    TableLayout,
    Text,
)
from trishul_ray.sweeps.placed_yaml import (
    KINDS,
    Items,
    Pairs,
    Scalar,
    Value,
    describe,
    expect,
    fail,
    parse,
    place_of,
    plain,
)
from trishul_ray.sweeps.search import EarlyStopping, Search

#: More cells than this are refused: a range such as 0..1000000 is a mistake.
MAX_CELLS = 20_000
#: Sections that are not taken from the files that a file extends.
_OWN = ("extends", "name", "profile")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


#: Values by the dotted name of a field.
Fields = dict[str, Value]


def hint(name: str, known: Collection[str]) -> str:
    """Return what ``name`` may have meant: the nearest of ``known``, or all of them."""
    near = did_you_mean(name, known).removeprefix("; ")
    return near or f"known: {', '.join(known) or 'none'}"


@cache
def known_fields() -> frozenset[str]:
    """Return the dotted names of all fields, of every method, and the short names.

    Fields of older versions are among them: they are refused with their new spelling when the
    experiment is made.
    """
    names = itertools.chain.from_iterable(field_names(method) for method in method_names())
    return frozenset(names) | SHORT_FIELDS.keys()


def field_of(name: str) -> str:
    """Return the field that a short name, or the last part of only one field's name, means."""
    try:
        name = full_name(name, sorted(known_fields()))
    except InputError:  # none or several: the name is refused where the experiment is made
        return name
    return SHORT_FIELDS.get(name, name)


def unknown_field(name: str) -> str | None:
    """Return what is wrong with a name that is no field; None if it is one."""
    known = known_fields()
    return None if field_of(name) in known else describe_unknown_field(name, sorted(known))


def read_fields(fields: Any, what: str = "fields", prefix: str = "") -> Fields:
    """Return the values of nested fields by dotted name.

    Raises:
        InputError: a field is set twice, such as by its short name and by its full one.
    """
    flat: Fields = {}
    for key, value in expect(fields, Pairs, what).items():
        if isinstance(value, Pairs):
            inner = read_fields(value, what, f"{prefix}{key}.")
        else:
            inner = {prefix + key if prefix else field_of(key): value}
        for name in flat.keys() & inner.keys():
            fail(inner[name], f"{name} is set twice (first at {flat[name].place}); remove one")
        flat |= inner
    return flat


def read_overrides(overrides: Sequence[str]) -> Fields:
    """Return the values of ``key=value`` overrides by dotted field name."""
    flat: Fields = {}
    for text in overrides:
        key, _ = split_override(text)
        raw, place = text.partition("=")[2], f"override {text!r}"
        # An empty text parses as an empty mapping; it means nothing, as in YAML.
        value = parse(raw, "override", place) if raw.strip() else Scalar("", place, None)
        flat |= read_fields(Pairs(place, {key: value}))
    return flat


@dataclass(frozen=True)
class AxisValue:
    """Fields that one label of an axis sets."""

    place: str
    fields: Fields
    metric: str | None = None
    shown: str | None = None


#: Axis of a sweep: labels in order, each with the fields that it sets.
Axis = dict[str, AxisValue]


def read_axis(name: str, value: Value) -> Axis:
    """Read the labels of an axis: a list or range of values, or a mapping from label to fields.

    Raises:
        InputError: it is empty, repeats a label, or lists values although ``name`` is no field.
    """
    what = f"axis {name!r}"
    if isinstance(value, Pairs):
        labels = list(value.items())
    else:
        items = [value] if isinstance(value, Scalar) else value
        scalars = [expect(item, Scalar, what) for item in items]
        labels = [(str(one), one) for item in scalars for one in _range(what, item)]
    if not labels:
        fail(value, f"{what} is empty; give it at least one label, or remove it")
    axis: Axis = {}
    for label, given in labels:
        if label in axis:
            fail(given, f"{what}: two cells with one name, {label!r}; rename or remove one")
        axis[label] = _axis_value(name, label, given)
    return axis


def _axis_value(axis: str, label: str, value: Value) -> AxisValue:
    if not isinstance(value, Pairs):
        if wrong := unknown_field(axis):
            fail(
                value,
                f"axis {axis!r}: label {label!r} needs fields, as in `{label}: {{field: value}}`; "
                f"only an axis that is named after a field can have plain values ({wrong})",
            )
        return AxisValue(value.place, {field_of(axis): value})
    own = {
        key: str(expect(value[key], Scalar, f"{key} of {label!r}"))
        for key in ("metric", "shown")
        if key in value
    }
    rest = Pairs(value.place, {key: inner for key, inner in value.items() if key not in own})
    return AxisValue(value.place, read_fields(rest), own.get("metric"), own.get("shown"))


def _range(axis: str, item: Scalar) -> Iterator[Scalar]:
    """Yield the numbers of a range such as ``0..4``, or ``item`` itself if it is none."""
    match = _RANGE.fullmatch(item)
    if not match:
        yield item
        return
    first, last = map(int, match.groups())
    if not 0 <= last - first < MAX_CELLS:
        fail(item, f"{axis}: range {item} must go up, by at most {MAX_CELLS:,}")
    yield from (Scalar(str(number), item.place, number) for number in range(first, last + 1))


FieldValues = Annotated[Fields, PlainValidator(read_fields)]


class Adjustment(Section):
    """Fields of chosen cells; they win over the axes and over earlier adjustments."""

    where: Labels = Field(description="the chosen labels; all of an axis that is not named")
    fields: FieldValues


def _with_plain_options(figure: Any) -> Any:
    if isinstance(figure, Pairs) and isinstance(options := figure.get("options"), Pairs):
        return figure | {"options": plain(options)}
    return figure


def _read_axes(axes: Any) -> dict[str, Axis]:
    return {name: read_axis(name, value) for name, value in expect(axes, Pairs, "axes").items()}


class SweepFile(Section):
    """The sections of a file, over those of the files that it extends."""

    extends: Names = ()
    name: FileName | None = None
    title: Text | None = None
    profile: Profile | None = None
    in_all: bool = True
    base: FieldValues = Field(default_factory=dict)
    axes: Annotated[dict[str, Axis], PlainValidator(_read_axes)] = Field(default_factory=dict)
    excluded: tuple[Labels, ...] = Field((), alias="except")
    adjust: tuple[Adjustment, ...] = ()
    tables: tuple[TableLayout, ...] | None = None
    figures: tuple[Annotated[FigureLayout, BeforeValidator(_with_plain_options)], ...] = ()
    search: Search | None = None
    early_stopping: EarlyStopping | None = None

    _content: Pairs
    _description: str = ""

    @classmethod
    def of(cls, content: Pairs, description: str = "") -> "SweepFile":
        """Validate the content of a file.

        Raises:
            InputError: The first mistake, with its line.
        """
        try:
            made = cls.model_validate(content)
        except Invalid as error:
            raise _first_mistake(error.errors()[0], content) from error
        made._content, made._description = content, description
        return made

    @property
    def description(self) -> str:
        """The comment at the head of the file."""
        return self._description

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Labels of each axis."""
        return {name: tuple(axis) for name, axis in self.axes.items()}

    def place(self, *loc: str | int) -> str:
        """Return where a value stands, as ``file:line``."""
        return place_of(self._content, loc)

    def fail(self, message: str, *loc: str | int) -> NoReturn:
        """Raise an InputError that starts with the place of a value."""
        raise InputError(f"{self.place(*loc)}: {message}")

    def check_labels(self, labels: Labels, what: str, *loc: str | int) -> None:
        """Check that axes and labels exist.

        Raises:
            InputError: One does not.
        """
        axes = self.labels
        for axis, chosen in labels.items():
            if axis not in axes:
                self.fail(f"{what}: unknown axis {axis!r}; {hint(axis, axes)}", *loc, axis)
            for number, label in enumerate(chosen):
                if label not in axes[axis]:
                    near = hint(label, axes[axis])
                    why = f"{what}: axis {axis!r} has no label {label!r}; {near}"
                    self.fail(why, *loc, axis, number)


_MODELS: dict[str, type[BaseModel]] = {
    "adjust": Adjustment,
    "tables": TableLayout,
    "figures": FigureLayout,
    "search": Search,
    "early_stopping": EarlyStopping,
}
_EXPECTED: dict[str, type] = {
    "string_type": Scalar,
    "tuple_type": Items,
    "dict_type": Pairs,
    "model_type": Pairs,
}


def _first_mistake(error: ErrorDetails, content: Pairs) -> InputError:
    """Return a mistake that pydantic found, with its line."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, InputError):  # has its place
        return cause
    loc = error["loc"]
    *parents, last = [str(part) for part in loc if isinstance(part, str)] or [""]
    section, key = (parents or [last])[0], last if parents else ""
    what = section
    if section in ("tables", "figures") and len(loc) > 1:
        item = content[section][loc[1]]
        name = item.get("name", "") if isinstance(item, Pairs) else ""
        what = f"{section[:-1]} {name}" if name else f"a {section[:-1]}"
    named, given = f"{what}: {key}" if key else what, error["input"]
    if error["type"] == "extra_forbidden":
        fields = (_MODELS[section] if key else SweepFile).model_fields
        known = [field.alias or name for name, field in fields.items() if name != "column"]
        known += COLUMNS.names() if section == "tables" else []
        what = what if key else "a sweep file"
        text = f"{what}: unknown key {last!r}; {hint(last, known)}"
    elif error["type"] == "missing":
        text = f"{what} needs `{key}`"
    elif kind := _EXPECTED.get(error["type"]):
        text = f"{named} must be {KINDS[kind]}, not {describe(given)}"
    elif error["type"] == "value_error":
        text = f"{named} {cause}" if key == "name" or not key else f"{named}: {cause}"
    else:
        text = f"{section}: {key}={given}" if key else f"{section}={given}"
        text += f": {error['msg'][0].lower()}{error['msg'][1:]}"
    return InputError(f"{place_of(content, loc)}: {text}")


def folders() -> tuple[Path, ...]:
    """Return the folders of sweeps: the user's, a checkout's, the installed ones."""
    checkout = Path(__file__).parents[2] / "sweeps"
    return Path("sweeps"), checkout, Path(sys.prefix) / "share" / "trishul-ray" / "sweeps"


def read_file(path: Path) -> SweepFile:
    """Read a file and those that it extends.

    Raises:
        InputError: one line that names file, line, fault and remedy.
    """
    return SweepFile.of(*_read(path, ()))


def _read(path: Path, children: tuple[Path, ...]) -> tuple[Pairs, str]:
    """Return the content of a file over that of those it extends, and the comment at its head."""
    shown = os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"sweep file {shown} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"sweep file {shown} cannot be read: {error}") from error
    own = expect(parse(text, shown), Pairs, "a sweep file")
    if not own:
        raise InputError(f"sweep file {shown} is empty: it needs `base` or `axes`")
    merged = Pairs(own.place)
    base: Fields = {}
    axes = Pairs(own["axes"].place if "axes" in own else own.place)
    for other in _extended(own, path, (*children, path.resolve())):
        older, _ = _read(other, (*children, path.resolve()))
        merged |= {name: section for name, section in older.items() if name not in _OWN}
        base |= older["base"]
        axes |= older["axes"]
    merged |= own
    if "base" in own:
        base |= read_fields(own["base"], "base")
    for name, axis in expect(own["axes"], Pairs, "axes").items() if "axes" in own else ():
        if isinstance(axis, Scalar) and axis.value is None:
            if axes.pop(name, None) is None:
                fail(axis, f"axis {name!r} is null, but no extended file has it; give it labels")
        else:
            axes[name] = axis
    merged |= {"base": Pairs(own.place, base), "axes": axes}
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return merged, "\n".join(line[1:].removeprefix(" ").rstrip() for line in comment)


def _extended(own: Pairs, path: Path, children: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files that ``path`` extends: beside it, or in a folder of sweeps."""
    given = own.get("extends", ())
    for item in [given] if isinstance(given, Scalar) else given:
        name = expect(item, Scalar, "extends")
        candidates = [folder / name for folder in (path.parent, *folders())]
        found = next(filter(os.path.isfile, candidates), None)  # also for names that are too long
        if found is None:
            fail(name, f"extends: {name} does not exist; give its path from this file")
        if found.resolve() in children:
            fail(name, f"extends: {name} extends this file, too; remove one of the two")
        yield found
