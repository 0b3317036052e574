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
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, Field, PlainValidator
from pydantic import ValidationError as Invalid
from pydantic_core import ErrorDetails

from trishul_ray import plugins
from trishul_ray.config import Section
from trishul_ray.data.dataset import ScoredSplit, score_name
from trishul_ray.errors import InputError, did_you_mean
from trishul_ray.experiment.loading import (
    SHORT_FIELDS,
    describe_unknown_field,
    field_names,
    full_name,
    split_override,
)
from trishul_ray.experiment.yaml_files import TOO_DEEP
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
    is_loss,
    is_name,
)

#: Name of the task's main metric in a trial's results; see ``Task.headline``.
HEADLINE = "headline"
#: More cells than this are refused: a range such as 0..1000000 is a mistake.
MAX_CELLS = 20_000
#: Aliases may repeat parts of a file, but not without end.
_MAX_VALUES = 100_000
#: Sections that are not taken from the files that a file extends.
_OWN = ("extends", "name", "profile")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


class Scalar(str):
    """A scalar as written (``1.0``, ``on``).

    ``place`` is its ``file:line``, that of its key if it has one; ``value`` is what YAML makes of
    it.
    """

    place: str
    value: Any

    def __new__(cls, text: str, place: str, value: Any) -> "Scalar":
        """Return the text with its place and its value."""
        made = super().__new__(cls, text)
        made.place, made.value = place, value
        return made


class Pairs(dict[str, Any]):
    """A mapping, and the place where it stands."""

    def __init__(self, place: str, content: Mapping[str, Any] = {}) -> None:  # read
        super().__init__(content)
        self.place = place


class Items(list[Any]):
    """A list, and the place where it stands."""

    place: str


Value = Scalar | Pairs | Items
Kind = TypeVar("Kind", Scalar, Pairs, Items)
#: Values by the dotted name of a field.
Fields = dict[str, Value]

_KINDS: dict[type, str] = {
    Scalar: "a name or a number",
    Pairs: "key: value pairs",
    Items: "a list",
}


def plain(value: Value) -> Any:
    """Return a value without places, as ``yaml.safe_load`` does; keys are text."""
    if isinstance(value, Pairs):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(item) for item in value] if isinstance(value, Items) else value.value


def fail(value: Value, message: str) -> NoReturn:
    """Raise an InputError that starts with the place of a value."""
    raise InputError(f"{value.place}: {message}")


def hint(name: str, known: Collection[str]) -> str:
    """Return what ``name`` may have meant: the nearest of ``known``, or all of them."""
    near = did_you_mean(name, known).removeprefix("; ")
    return near or f"known: {', '.join(known) or 'none'}"


def parse(text: str, shown: str, place: str | None = None) -> Value:
    """Parse YAML text; ``place`` is where all of it stands, by default ``<shown>:<line>``.

    Raises:
        InputError: It is not YAML, or repeats a key.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return Pairs(place or f"{shown}:1")
        return _Parser(loader, shown, place).read(root, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place or (f"{shown}:{mark.line + 1}" if mark else shown)
        raise InputError(f"{where}: not YAML: {error.problem or error.context}") from error
    except RecursionError:
        raise InputError(f"{place or shown}: not YAML: {TOO_DEEP}") from None
    except yaml.reader.ReaderError as error:
        where = place or f"{shown}:{text.count(chr(10), 0, error.position) + 1}"
        raise InputError(f"{where}: not YAML: {error.reason}") from error


class _Parser:
    def __init__(self, loader: yaml.SafeLoader, shown: str, place: str | None) -> None:
        self.loader, self.shown, self.place = loader, shown, place
        self.values = 0
        self.parents: list[yaml.Node] = []

    def at(self, node: yaml.Node) -> str:
        return self.place or f"{self.shown}:{node.start_mark.line + 1}"

    def read(self, node: yaml.Node, named: yaml.Node) -> Value:
        """Return the value of a node; ``named`` is its key, or itself."""
        place = self.at(named)
        self.values += 1
        if any(node is parent for parent in self.parents) or self.values > _MAX_VALUES:
            raise InputError(f"{self.at(node)}: an alias that contains itself, or too many of them")
        if isinstance(node, yaml.ScalarNode):
            try:
                return Scalar(node.value, place, self.loader.construct_object(node))
            except ValueError as error:  # an impossible date
                raise InputError(f"{place}: {node.value!r}: {error}; put it in quotes") from error
        self.parents.append(node)
        content: Value
        if isinstance(node, yaml.MappingNode):
            content = Pairs(place)
            for key, value in node.value:
                content[self.key(key, content)] = self.read(value, key)
        else:
            content = Items(self.read(item, item) for item in node.value)
            content.place = place
        self.parents.pop()
        return content

    def key(self, node: yaml.Node, known: Pairs) -> str:
        if not isinstance(node, yaml.ScalarNode) or not is_name(node.value):
            raise InputError(f"{self.at(node)}: a key must be a name or a number, in one line")
        if node.tag.endswith(":merge"):
            raise InputError(f"{self.at(node)}: `<<` is not supported; use `extends: FILE`")
        if node.value in known:
            raise InputError(
                f"{self.at(node)}: {node.value!r} appears twice (first at "
                f"{known[node.value].place}); rename or remove one"
            )
        return str(node.value)


def _expect(value: Value, kind: type[Kind], what: str) -> Kind:
    """Return a value that must be of a kind; a scalar must be a name or a number."""
    if isinstance(value, kind) and not (isinstance(value, Scalar) and not is_name(value)):
        return value
    fail(value, f"{what} must be {_KINDS[kind]}, not {_describe(value)}")


def _describe(value: Value) -> str:
    if isinstance(value, Scalar):
        return repr(str(value)) if value else "nothing"
    return _KINDS[type(value)] if value else f"empty {'{}' if isinstance(value, Pairs) else '[]'}"


@cache
def known_fields() -> frozenset[str]:
    """Return the dotted names of all fields, of every method, and the short names.

    Fields of older versions are among them: they are refused with their new spelling when the
    experiment is made.
    """
    names = itertools.chain.from_iterable(field_names(method) for method in method_names())
    return frozenset([*names, *plugins.older_fields()]) | SHORT_FIELDS.keys()


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
    for key, value in _expect(fields, Pairs, what).items():
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
        scalars = [_expect(item, Scalar, what) for item in items]
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
        key: str(_expect(value[key], Scalar, f"{key} of {label!r}"))
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


@dataclass(frozen=True)
class Domain:
    """Space of a sample: the values of a ``choice``, or numbers between two, both included.

    A number is ``uniform``; ``log``, uniform in the logarithm; or ``int``, a whole number. All are
    valid if ``values`` are.
    """

    kind: str
    values: tuple[Any, ...]


#: Names of kinds of a space in other libraries.
_OTHER_NAMES = {
    "loguniform": "log",
    "log_uniform": "log",
    "randint": "int",
    "categorical": "choice",
}


def _read_domain(value: Any) -> Domain:
    if isinstance(value, Domain):
        return value
    kinds = ("choice", "uniform", "log", "int")
    kind, given = next(iter(value.items())) if isinstance(value, Pairs) and value else ("", None)
    if kind in _OTHER_NAMES:
        raise ValueError(f"unknown key {kind!r}; here it is {_OTHER_NAMES[kind]!r}")
    if kind not in kinds or len(value) != 1 or not isinstance(given, Items):
        raise ValueError(f"needs one of {', '.join(kinds)}, such as `{{choice: [0, 0.1]}}`")
    items = plain(given)
    if kind == "choice":
        if not items or any(item in items[:place] for place, item in enumerate(items)):
            raise ValueError(f"choices must be one or more different values, not {items}")
        return Domain(kind, tuple(items))
    numbers = [_number(item) for item in items]
    if len(numbers) != 2 or not numbers[0] < numbers[1] or (kind == "log" and numbers[0] <= 0):
        above = " above 0" if kind == "log" else ""
        raise ValueError(f"{kind} needs [low, high], two numbers{above}, not {items}")
    if kind == "int":
        if not all(number.is_integer() for number in numbers):
            raise ValueError(f"int needs whole numbers, not {items}")
        return Domain(kind, tuple(map(int, numbers)))
    return Domain(kind, tuple(numbers))


def _number(value: Any) -> float:
    """Return a finite number, or NaN; YAML reads ``1e-4`` as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


class Search(Section):
    """Search for values that the axes do not set."""

    kind: Literal["grid", "random", "optuna"] = Field(
        "grid", description="grid runs the cells of the axes alone; the others sample `space`"
    )
    samples: int = Field(20, ge=1, description="number of samples for each cell")
    metric: Text | None = Field(
        None, description="metric that is compared; None is the task's headline"
    )
    mode: Literal["max", "min"] = Field(
        default_factory=lambda read: "min" if is_loss(read.get("metric") or "") else "max",
        description="whether a larger or a smaller metric is better",
    )
    seed: int = Field(0, ge=0, description="seed of the samples")
    space: dict[str, Annotated[Domain, PlainValidator(_read_domain)]] = Field(
        default_factory=dict, description="space of each sampled field, by dotted name"
    )
    on: ScoredSplit = Field("validation", description="rows whose metric is compared")

    @property
    def compared(self) -> str:
        """Name of what is compared in a trial's results."""
        return score_name(self.metric or HEADLINE, self.on)


class EarlyStopping(Section):
    """Stop runs that lag behind the others, by ASHA; one step is one round."""

    kind: Literal["asha"] = "asha"
    grace: int = Field(1, ge=1, description="rounds before a run may be stopped")
    reduction: int = Field(3, ge=2, description="a rung keeps the best 1 / reduction of its runs")
    on: ScoredSplit = Field(
        "validation", description="rows whose metric is compared; those of the search if it has one"
    )


class Adjustment(Section):
    """Fields of chosen cells; they win over the axes and over earlier adjustments."""

    where: Labels = Field(description="the chosen labels; all of an axis that is not named")
    fields: FieldValues


def _with_plain_options(figure: Any) -> Any:
    if isinstance(figure, Pairs) and isinstance(options := figure.get("options"), Pairs):
        return figure | {"options": plain(options)}
    return figure


def _read_axes(axes: Any) -> dict[str, Axis]:
    return {name: read_axis(name, value) for name, value in _expect(axes, Pairs, "axes").items()}


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
        return _place(self._content, loc)

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

    def with_axis(self, name: str, axis: Axis) -> "SweepFile":
        """Return the file with another axis of a name that it has."""
        made = self.model_copy(update={"axes": {**self.axes, name: axis}})
        made._content, made._description = self._content, self._description
        return made


def _place(content: Value, loc: Sequence[str | int]) -> str:
    """Return the place of the value that pydantic's ``loc`` leads to, as far as it does."""
    place = content.place
    for part in loc:
        try:
            content = content[part]  # type: ignore[index,assignment]  # it may not be there
            place = content.place
        except (LookupError, TypeError, AttributeError):
            break
    return place


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
        text = f"{named} must be {_KINDS[kind]}, not {_describe(given)}"
    elif error["type"] == "value_error":
        text = f"{named} {cause}" if key == "name" or not key else f"{named}: {cause}"
    else:
        text = f"{section}: {key}={given}" if key else f"{section}={given}"
        text += f": {error['msg'][0].lower()}{error['msg'][1:]}"
    return InputError(f"{_place(content, loc)}: {text}")


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
    own = _expect(parse(text, shown), Pairs, "a sweep file")
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
    for name, axis in _expect(own["axes"], Pairs, "axes").items() if "axes" in own else ():
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
        name = _expect(item, Scalar, "extends")
        candidates = [folder / name for folder in (path.parent, *folders())]
        found = next(filter(os.path.isfile, candidates), None)  # also for names that are too long
        if found is None:
            fail(name, f"extends: {name} does not exist; give its path from this file")
        if found.resolve() in children:
            fail(name, f"extends: {name} extends this file, too; remove one of the two")
        yield found
