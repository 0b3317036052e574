"""Search spaces and early stopping of a user's own sweep, as read from its file."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trishul_ray.errors import InputError
from trishul_ray.tuning.cells import Cell, unknown_field, vary
from trishul_ray.tuning.located_yaml import Node

SearchKind = Literal["grid", "random", "optuna"]


@dataclass(frozen=True)
class Choice:
    """One of ``values``, all equally likely."""

    values: tuple[Any, ...]

    @property
    def corners(self) -> tuple[Any, ...]:
        """Values that are valid only if all are."""
        return self.values


@dataclass(frozen=True)
class Interval:
    """A number between ``low`` and ``high``, both included.

    Attributes:
        low: Smallest value.
        high: Largest value.
        scale: ``uniform``; ``log``, uniform in the logarithm; or ``int``, a whole number.
    """

    low: float
    high: float
    scale: Literal["uniform", "log", "int"]

    @property
    def corners(self) -> tuple[Any, ...]:
        """Values that are valid only if all are."""
        return self.low, self.high


@dataclass(frozen=True)
class Search:
    """How values are found that the axes do not set.

    Attributes:
        kind: ``grid`` runs the cells of the axes alone; ``random`` and ``optuna`` sample ``space``.
        samples: Number of samples for each cell.
        metric: Metric that is compared; None is the task's headline.
        mode: Whether a larger or a smaller metric is better.
        seed: Seed of the samples.
        space: What is sampled, by dotted field name.
    """

    kind: SearchKind = "grid"
    samples: int = 20
    metric: str | None = None
    mode: Literal["max", "min"] = "max"
    seed: int = 0
    space: Mapping[str, Choice | Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class EarlyStopping:
    """Stop runs that lag behind the others, by ASHA; one step is one round.

    Attributes:
        kind: The scheduler.
        grace: Rounds before a run may be stopped.
        reduction: A rung keeps the best ``1 / reduction`` of its runs.
    """

    kind: Literal["asha"] = "asha"
    grace: int = 1
    reduction: int = 3


def read_search(node: Node, cells: Sequence[Cell], varied: Collection[str]) -> Search:
    """Read the section ``search``.

    Args:
        node: the section.
        cells: the cells whose fields are varied; the ends of every range must be valid in each.
        varied: dotted names of the fields that axes and adjustments set.

    Raises:
        InputError: an unknown key, field or kind, an empty or invalid range, or a space that is not
            sampled.
    """
    keys = node.mapping("search", ("kind", "samples", "metric", "mode", "seed", "space"))
    kind = _one_of(keys, "kind", get_args(SearchKind), "grid")
    space: dict[str, Choice | Interval] = {}
    for name, value in keys["space"].mapping("space").items() if "space" in keys else ():
        if wrong := unknown_field(name):
            value.fail(f"search: {wrong}")
        if name in varied:
            value.fail(f"search: an axis or `adjust` sets {name}, too; remove one of the two")
        space[name] = _read_domain(name, value)
        for cell, corner in itertools.product(cells, space[name].corners):
            try:
                vary(cell, {name: corner})
            except InputError as error:
                value.fail(f"search: {error}")
    if kind == "grid" and len(keys.keys() - {"kind"}):
        node.fail("search: a grid is made by `axes`; remove the other keys, or set kind to random")
    if kind != "grid" and not space:
        node.fail(f"search: {kind} needs a space: {{optimizer.lr: {{log: [1e-4, 1e-1]}}}}")
    return Search(
        kind=kind,
        samples=_whole(keys, "samples", 20, 1),
        metric=keys["metric"].scalar("metric") if "metric" in keys else None,
        mode=_one_of(keys, "mode", ("max", "min"), "max"),
        seed=_whole(keys, "seed", 0, 0),
        space=space,
    )


def read_early_stopping(node: Node) -> EarlyStopping:
    """Read the section ``early_stopping``; raises an InputError as :func:`read_search`."""
    keys = node.mapping("early_stopping", ("kind", "grace", "reduction"))
    return EarlyStopping(
        kind=_one_of(keys, "kind", ("asha",), "asha"),
        grace=_whole(keys, "grace", 1, 1),
        reduction=_whole(keys, "reduction", 3, 2),
    )


def _read_domain(name: str, node: Node) -> Choice | Interval:
    kinds = ("choice", "uniform", "log", "int")
    keys = node.mapping(f"search: {name}", kinds)
    if len(keys) != 1:
        node.fail(f"search: {name} needs one of {', '.join(kinds)}, such as `{{choice: [0, 0.1]}}`")
    ((kind, bounds),) = keys.items()
    items = [item.plain() for item in bounds.items(f"search: {name}")]
    if kind == "choice":
        if not items or any(item in items[:place] for place, item in enumerate(items)):
            node.fail(f"search: {name}: choices must be one or more different values, not {items}")
        return Choice(tuple(items))
    numbers = [_number(item) for item in items]
    if len(numbers) != 2 or not numbers[0] < numbers[1] or (kind == "log" and numbers[0] <= 0):
        above = " above 0" if kind == "log" else ""
        node.fail(f"search: {name}: {kind} needs [low, high], two numbers{above}, not {items}")
    low, high = numbers
    if kind == "int":
        if not (low.is_integer() and high.is_integer()):
            node.fail(f"search: {name}: int needs whole numbers, not {items}")
        return Interval(int(low), int(high), "int")
    return Interval(low, high, "log" if kind == "log" else "uniform")


def _number(value: Any) -> float:
    """Return a finite number, or NaN; YAML reads ``1e-4`` as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _one_of(keys: Mapping[str, Node], key: str, allowed: tuple[str, ...], default: str) -> Any:
    if key not in keys:
        return default
    value = keys[key].scalar(key)
    if value not in allowed:
        keys[key].fail(f"{key}={value}: must be {' or '.join(allowed)}")
    return value


def _whole(keys: Mapping[str, Node], key: str, default: int, low: int) -> int:
    if key not in keys:
        return default
    value = keys[key].value
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        keys[key].fail(f"{key}={keys[key].describe()}: must be a whole number from {low}")
    return value
