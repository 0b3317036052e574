"""The sections ``search`` and ``early_stopping`` of a sweep file."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from trishul_ray.config.section import Section
from trishul_ray.data.dataset import ScoredSplit, score_name
from trishul_ray.report.outcomes import Text, is_loss
from trishul_ray.sweeps.placed_yaml import Items, Pairs, plain

#: Name of the task's main metric in a trial's results; see ``Task.headline``.
HEADLINE = "headline"


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
