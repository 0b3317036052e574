"""The section ``search`` of a sweep file."""

from typing import Any, Literal

from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.data.dataset import ScoredSplit, score_name
from trishul_ray.report.layouts import Text
from trishul_ray.report.outcomes import is_loss
from trishul_ray.runtime.lazy import ray

#: Key of the primary metric in the results of a trial; see ``Task.primary_metric``.
PRIMARY_METRIC = "primary_metric"


class Space(Section):
    """Search space of a field: a choice, or a range of numbers that includes both ends."""

    choice: tuple[Any, ...] = ()
    uniform: tuple[float, float] | None = None
    log: tuple[float, float] | None = None
    integer: tuple[int, int] | None = Field(None, alias="int")

    @model_validator(mode="after")
    def _is_one(self) -> "Space":
        if len(self.model_fields_set) != 1:
            raise ValueError("must set one of choice, uniform, log and int: {choice: [0, 0.1]}")
        values = self.values
        if not values or (not self.choice and not values[0] < values[1]):
            raise ValueError("must be [low, high], or a choice with at least one value")
        if self.log is not None and self.log[0] <= 0:
            raise ValueError(f"log={[*self.log]} must be above 0")
        return self

    @property
    def values(self) -> tuple[Any, ...]:
        """The choices, or both ends of the range."""
        return self.choice or self.uniform or self.log or self.integer or ()

    def domain(self) -> Any:
        if self.choice:
            return ray.tune.choice([*self.choice])
        if self.integer is not None:
            return ray.tune.randint(self.integer[0], self.integer[1] + 1)
        return (ray.tune.loguniform if self.log else ray.tune.uniform)(*self.values)


class Search(Section):
    """Random or Optuna search over fields that the axes do not set."""

    kind: Literal["random", "optuna"] = Field(description="sampling of `space`: random or optuna")
    samples: int = Field(20, ge=1, description="number of samples per cell of the axes")
    metric: Text | None = Field(
        None, description="metric to compare; by default the task's primary metric"
    )
    mode: Literal["max", "min"] = Field(
        default_factory=lambda read: "min" if is_loss(read.get("metric") or "") else "max",
        description="whether a higher (max) or lower (min) metric is better",
    )
    seed: int = Field(0, ge=0, description="random seed of the samples")
    space: dict[str, Space] = Field(
        min_length=1, description="search spaces, keyed by dotted field name"
    )
    rows: ScoredSplit = Field("validation", description="rows that the metric is computed on")

    @property
    def compared(self) -> str:
        """Key of the compared metric in the results of a trial."""
        return score_name(self.metric or PRIMARY_METRIC, self.rows)

    def domains(self) -> dict[str, Any]:
        return {name: space.domain() for name, space in self.space.items()}
