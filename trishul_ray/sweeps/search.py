"""How the cells of a sweep are run: search spaces and early stopping of its file, and retries."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trishul_ray.data.dataset import RowSet, score_name
from trishul_ray.errors import InputError
from trishul_ray.report.outcomes import is_loss
from trishul_ray.sweeps.cells import Cell, unknown_field, vary
from trishul_ray.sweeps.located_yaml import Node

SearchKind = Literal["grid", "random", "optuna"]

#: Name of the task's main metric in a trial's results; see ``Task.headline``.
HEADLINE = "headline"

#: Names of kinds of a space in other libraries.
_OTHER_NAMES = {
    "loguniform": "log", "log_uniform": "log", "randint": "int", "categorical": "choice",
}  # fmt: skip


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
class TuneOptions:
    """How cells are run.

    Attributes:
        retries: How often a cell that failed is tried again.
        stall_minutes: Minutes without a finished round after which a cell is ended and tried again;
            see ``Watchdog``.
        concurrency: Number of cells at a time; None is what the cluster holds, with the nodes that
            its autoscaler may add. Cells beyond that wait.
    """

    retries: int = 2
    stall_minutes: float = 30.0
    concurrency: int | None = None


@dataclass(frozen=True)
class Search:
    """How values are found that the axes do not set.

    Attributes:
        kind: ``grid`` runs the cells of the axes alone; ``random`` and ``optuna`` sample ``space``.
        samples: Number of samples for each cell.
        metric: Metric that is compared; None is the task's headline.
        mode: Whether a larger or a smaller metric is better; by default a loss is minimized.
        seed: Seed of the samples.
        space: What is sampled, by dotted field name.
        on: Rows whose metric is compared.
        place: Where it stands, for errors.
    """

    kind: SearchKind = "grid"
    samples: int = 20
    metric: str | None = None
    mode: Literal["max", "min"] = "max"
    seed: int = 0
    space: Mapping[str, Choice | Interval] = field(default_factory=dict)
    on: RowSet = "validation"
    place: str = field(default="search", compare=False)

    @property
    def compared(self) -> str:
        """Name of what is compared in a trial's results."""
        return score_name(self.metric or HEADLINE, self.on)


@dataclass(frozen=True)
class EarlyStopping:
    """Stop runs that lag behind the others, by ASHA; one step is one round.

    Attributes:
        kind: The scheduler.
        grace: Rounds before a run may be stopped.
        reduction: A rung keeps the best ``1 / reduction`` of its runs.
        on: Rows whose metric is compared; the same as those of the search, if there is one.
    """

    kind: Literal["asha"] = "asha"
    grace: int = 1
    reduction: int = 3
    on: RowSet = "validation"


def read_search(node: Node, cells: Sequence[Cell], varied: Collection[str]) -> Search:
    """Read the section ``search``.

    Args:
        node: the section.
        cells: the cells whose fields are varied; the ends of every range must be valid in each.
        varied: dotted names of the fields that axes and adjustments set.

    Raises:
        InputError: an unknown key, field or kind, an empty or invalid range, a space that is not
            sampled, or no rows to choose on.
    """
    keys = node.mapping("search", ("kind", "samples", "metric", "mode", "seed", "space", "on"))
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
    metric = keys["metric"].scalar("metric") if "metric" in keys else None
    return Search(
        kind=kind,
        samples=_whole(keys, "samples", 20, 1),
        metric=metric,
        mode=_one_of(keys, "mode", ("max", "min"), "min" if is_loss(metric or "") else "max"),
        seed=_whole(keys, "seed", 0, 0),
        space=space,
        on=_read_rows("search", node, keys, cells) if kind != "grid" else "test",
        place=keys["kind"].place if "kind" in keys else node.place,
    )


def read_early_stopping(
    node: Node, cells: Sequence[Cell], search: Search | None = None
) -> EarlyStopping:
    """Read the section ``early_stopping``; ``search`` is that of the same file.

    Raises:
        InputError: as :func:`read_search`.
    """
    keys = node.mapping("early_stopping", ("kind", "grace", "reduction", "on"))
    kind = _one_of(keys, "kind", ("asha",), "asha")
    grace, reduction = _whole(keys, "grace", 1, 1), _whole(keys, "reduction", 3, 2)
    if not all(cell.experiment.evaluation.every for cell in cells):
        node.fail(
            "early_stopping: it compares scores between the first round and the last, and "
            "evaluation.every=0 makes none; set evaluation.every, such as 1"
        )
    if search is None or search.kind == "grid":
        return EarlyStopping(
            kind, grace, reduction, _read_rows("early_stopping", node, keys, cells)
        )
    if "on" in keys:
        keys["on"].fail("early_stopping: it compares by the search; write `on` there")
    return EarlyStopping(kind, grace, reduction, search.on)


def _read_rows(section: str, node: Node, keys: Mapping[str, Node], cells: Sequence[Cell]) -> RowSet:
    """Return the rows that a section chooses on, or raise an InputError if they do not exist."""
    on: RowSet = _one_of(keys, "on", get_args(RowSet), "validation")
    if on == "validation" and any(not c.experiment.data.validation_share for c in cells):
        node.fail(
            f"{section}: without data.validation_share it would choose on the test rows, whose "
            f"scores then say too much: set data.validation_share, such as 0.1, or `on: test` in "
            f"`{section}`, which every table then says"
        )
    return on


def _read_domain(name: str, node: Node) -> Choice | Interval:
    kinds = ("choice", "uniform", "log", "int")
    for other, kind in _OTHER_NAMES.items():
        if isinstance(node.value, dict) and other in node.value:
            node.value[other].fail(f"search: {name}: unknown key {other!r}; here it is {kind!r}")
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
