"""The axes of a sweep, and the cells that they form.

A cell is one combination of axis labels. Its fields are those of the dataset's preset, then the
sweep's base, the overrides of the command line, the values of the axes, and the adjustments of
chosen cells; later ones win. An override that would reach only some cells is refused.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from trishul_ray.data.dataset import RowSet
from trishul_ray.data.prepare import find_source
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import (
    SHORT_FIELDS,
    describe_unknown_field,
    field_names,
    resolve_experiment,
    split_override,
)
from trishul_ray.methods.base import method_names
from trishul_ray.sweeps.located_yaml import Node, parse_located

#: More cells than this are refused: a range such as 0..1000000 is a mistake.
MAX_CELLS = 20_000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")

#: Values by dotted field name.
Fields = dict[str, Node]


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
    rows: RowSet = "test"
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class AxisValue:
    """One label of an axis, and what it sets."""

    label: str
    place: str
    fields: Fields
    metric: str | None = None
    shown: str | None = None


@dataclass(frozen=True)
class Axis:
    """What varies: labels, each with its fields."""

    name: str
    place: str
    values: tuple[AxisValue, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in order."""
        return tuple(value.label for value in self.values)

    @property
    def shown(self) -> dict[str, str]:
        """How labels are displayed, where that differs from the label."""
        return {value.label: value.shown for value in self.values if value.shown}


@dataclass(frozen=True)
class Adjustment:
    """Fields of chosen cells.

    Attributes:
        place: Where it stands, for errors.
        labels: The chosen labels by axis; all of an axis that is not named.
        fields: What it sets; wins over the axes and over earlier adjustments.
    """

    place: str
    labels: Mapping[str, tuple[str, ...]]
    fields: Fields


def vary(cell: Cell, values: Mapping[str, Any]) -> Cell:
    """Return ``cell`` with other fields, as a search samples them.

    A learning rate that is not set is looked up again, for the new fields.

    Args:
        cell: a cell of a sweep.
        values: values by dotted field name.

    Raises:
        InputError: the experiment is not valid.
    """
    fields = {**cell.fields, **{_full_name(name): value for name, value in values.items()}}
    labels = {**cell.labels, **{name: str(value) for name, value in values.items()}}
    return replace(cell, experiment=resolve_experiment(_nest(fields)), labels=labels, fields=fields)


def read_fields(fields: Mapping[str, Node], prefix: str = "") -> Fields:
    """Return the values of nested fields by dotted name.

    Raises:
        InputError: a field is set twice, such as by its short name and by its full one.
    """
    flat: Fields = {}
    for key, node in fields.items():
        if isinstance(node.value, dict):
            inner = read_fields(node.value, f"{prefix}{key}.")
        else:
            inner = {prefix + key if prefix else _full_name(key): node}
        for name in flat.keys() & inner.keys():
            inner[name].fail(f"{name} is set twice (first at {flat[name].place}); remove one")
        flat |= inner
    return flat


def read_overrides(overrides: Sequence[str]) -> Fields:
    """Return the values of ``key=value`` overrides by dotted field name."""
    flat: Fields = {}
    for text in overrides:
        key, _ = split_override(text)
        raw = text.partition("=")[2]
        value = parse_located(raw, "override", f"override {text!r}")
        # An empty text parses as an empty mapping; it means nothing, as in YAML.
        flat |= read_fields({key: value if raw.strip() else Node(None, value.place)})
    return flat


def read_axis(name: str, node: Node) -> Axis:
    """Read the labels of an axis: a list or range of values, or a mapping from label to fields.

    Raises:
        InputError: it is empty, repeats a label, or lists values although ``name`` is no field.
    """
    if isinstance(node.value, dict):
        values = [_axis_value(name, label, value) for label, value in node.value.items()]
    else:
        items = [node] if node.is_scalar else node.items(f"axis {name!r}")
        scalars = itertools.chain.from_iterable(_range(name, item) for item in items)
        values = [_axis_value(name, item.scalar(f"axis {name!r}"), item) for item in scalars]
    if not values:
        node.fail(f"axis {name!r} is empty; give it at least one label, or remove it")
    seen: dict[str, AxisValue] = {}
    for value in values:
        if value.label in seen:
            raise InputError(
                f"{value.place}: axis {name!r}: two cells with one name, {value.label!r}; "
                "rename or remove one"
            )
        seen[value.label] = value
    return Axis(name, node.place, tuple(values))


def expand(
    base: Fields,
    overrides: Fields,
    axes: Sequence[Axis],
    excluded: Sequence[Mapping[str, tuple[str, ...]]],
    adjustments: Sequence[Adjustment],
    place: str,
) -> tuple[Cell, ...]:
    """Return the cells of all combinations but the excluded ones; the last axis varies fastest.

    Args:
        base: fields of all cells.
        overrides: fields of all cells that win over ``base``; each must reach every cell.
        axes: what varies; their values win over both.
        excluded: combinations to leave out: labels by axis.
        adjustments: fields of chosen cells; later ones win, and all win over the axes.
        place: where the axes stand, for errors.

    Raises:
        InputError: a combination is no valid experiment, there is none, an adjustment chooses
            none, or an axis or adjustment sets what an override sets, to another value.
    """
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_CELLS:
        sizes = " x ".join(f"{len(axis.values)} {axis.name}" for axis in axes)
        raise InputError(
            f"{place}: {sizes} are {count:,} cells, and a sweep may have {MAX_CELLS:,}; "
            "shorten an axis or divide the sweep"
        )
    common = {**base, **overrides}
    hindered: dict[str, list[Node]] = {}
    unused = list(adjustments)
    cells = []
    for values in itertools.product(*(axis.values for axis in axes)):
        labels = {axis.name: value.label for axis, value in zip(axes, values, strict=True)}
        if any(_chosen(labels, each) for each in excluded):
            continue
        own, metric = _combine(axes, values, labels)
        for each in adjustments:
            if _chosen(labels, each.labels):
                own |= each.fields
                unused = [other for other in unused if other is not each]
        for name in overrides.keys() & own.keys():
            if own[name].plain() != overrides[name].plain():
                hindered.setdefault(name, []).append(own[name])
        cells.append(_make_cell({**common, **own}, labels, metric, place))
    if not cells:
        raise InputError(f"{place}: no cell is left; shorten `except`")
    if unused:
        raise InputError(
            f"{unused[0].place}: adjust: no cell has these labels; change or remove them"
        )
    for name, nodes in sorted(hindered.items()):
        overrides[name].fail(
            f"it does not reach {len(nodes):,} of {len(cells):,} cells, for which an axis or "
            f"`adjust` sets {name} (first at {nodes[0].place}: {nodes[0].plain()!r}); set it "
            "there, in a file of your own that extends this one"
        )
    return tuple(cells)


def unknown_field(name: str) -> str | None:
    """Return what is wrong with a name that is no field; None if it is one."""
    known = _known_fields()
    return None if _full_name(name) in known else describe_unknown_field(name, sorted(known))


@cache
def _known_fields() -> frozenset[str]:
    """Return the dotted names of all fields, of every method, and the short names."""
    names = itertools.chain.from_iterable(field_names(method) for method in method_names())
    return frozenset(names) | SHORT_FIELDS.keys()


def _chosen(labels: Mapping[str, str], choice: Mapping[str, tuple[str, ...]]) -> bool:
    return all(labels[axis] in some for axis, some in choice.items())


def _axis_value(axis: str, label: str, node: Node) -> AxisValue:
    if not isinstance(node.value, dict):
        if hint := unknown_field(axis):
            node.fail(
                f"axis {axis!r}: label {label!r} needs fields, as in `{label}: {{field: value}}`; "
                f"only an axis that is named after a field can have plain values ({hint})"
            )
        return AxisValue(label, node.place, read_fields({axis: node}))
    fields = dict(node.value)
    metric, shown = (
        fields.pop(key).scalar(f"{key} of {label!r}") if key in fields else None
        for key in ("metric", "shown")
    )
    return AxisValue(label, node.place, read_fields(fields), metric, shown)


def _range(axis: str, node: Node) -> Iterator[Node]:
    """Yield the numbers of a range such as ``0..4``, or ``node`` itself if it is none."""
    match = _RANGE.fullmatch(node.text)
    if not match:
        yield node
        return
    first, last = map(int, match.groups())
    if not 0 <= last - first < MAX_CELLS:
        node.fail(f"axis {axis!r}: range {node.text} must go up, by at most {MAX_CELLS:,}")
    for number in range(first, last + 1):
        yield Node(number, node.place, str(number))


def _combine(
    axes: Sequence[Axis], values: Sequence[AxisValue], labels: Mapping[str, str]
) -> tuple[Fields, str | None]:
    """Return the fields and the metric that the values of all axes set together."""
    fields: Fields = {}
    metric: str | None = None
    for axis, value in zip(axes, values, strict=True):
        for name, node in value.fields.items():
            if name in fields and fields[name].plain() != node.plain():
                node.fail(
                    f"axis {axis.name!r} sets {name}={node.plain()!r}, but another axis sets "
                    f"{fields[name].plain()!r} at {fields[name].place} (cell {_name(labels)}); "
                    "set it on one axis, or leave the combination out under `except`"
                )
            fields[name] = node
        if value.metric is not None:
            if metric not in (None, value.metric):
                raise InputError(
                    f"{value.place}: two axes name a metric, {metric!r} and {value.metric!r} "
                    f"(cell {_name(labels)}); name it on one axis"
                )
            metric = value.metric
    return fields, metric


def _make_cell(fields: Fields, labels: Mapping[str, str], metric: str | None, place: str) -> Cell:
    plain = {name: node.plain() for name, node in fields.items()}
    try:
        experiment = resolve_experiment(_nest(plain))
        find_source(experiment.data)
    except InputError as error:
        cell = f" (cell {_name(labels)})" if labels else ""
        raise InputError(f"{_blame(str(error), fields) or place}: {error}{cell}") from error
    return Cell(experiment, labels, metric, fields=plain)


def _nest(fields: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        *parents, last = name.split(".")
        section = nested
        for depth, parent in enumerate(parents, 1):
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise _not_a_value(".".join(parents[:depth]))
        if isinstance(section.get(last), dict):
            raise _not_a_value(name)
        section[last] = value
    return nested


def _not_a_value(section: str) -> InputError:
    return InputError(f"{section} is a section; name one of its fields")


def _blame(message: str, fields: Fields) -> str | None:
    """Return the place of the field that ``message`` is about: the first that it names."""
    found = []
    for name, node in fields.items():
        match = re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", message)
        if match:
            found.append((match.start(), node.place))
    return min(found)[1] if found else None


def _name(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{axis}={label}" for axis, label in labels.items())


def _full_name(name: str) -> str:
    """Return the field that a short name, or the last part of only one field's name, means."""
    if name in SHORT_FIELDS or name in _known_fields() or name in Experiment.model_fields:
        return SHORT_FIELDS.get(name, name)
    meant = [known for known in _known_fields() if known.rpartition(".")[2] == name]
    return meant[0] if len(meant) == 1 else name
