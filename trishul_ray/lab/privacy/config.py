"""The section ``privacy`` of an experiment."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trishul_ray.config.section import Section, not_in_id

#: Draw of a round's clients, which decides the guarantee that its noise gives.
Sampling = Literal["poisson", "fixed", "none"]

#: The smallest noise multiplier that is tried, and that an accountant can compute with.
SMALLEST_NOISE = 0.01
#: The fewest canaries of an audit: with one round of all of them, each end of its interval lies a
#: third of the noise's deviation from the middle.
FEWEST_CANARIES = 30


class PrivacyConfig(Section):
    """Differential privacy of each client; off without ``epsilon`` and ``noise``."""

    epsilon: float | None = Field(
        None,
        gt=0,
        le=100,
        description="ε of the whole run, from which the noise follows; the id has ε, not the noise",
    )
    noise: float | None = Field(
        None,
        ge=0,
        description="noise multiplier z instead of epsilon: standard deviation of the noise on the "
        "sum of a round over the clip norm",
    )
    budget: float | None = not_in_id(
        None, "with noise: the largest ε; reduces federation.rounds to what it pays for", gt=0
    )
    delta: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = Field(
        "auto", description="δ; auto: min(1e-5, N^-1.1) for a population of N"
    )
    clip: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="clip norm S of a client's change, at the start if it is adaptive; auto: "
        "optimizer.lr sqrt(federation.local_steps P) for P sent numbers, which reads no data",
    )
    adaptive: bool = Field(
        False, description="let S follow a quantile of the norms (Andrew et al., 2021)"
    )
    quantile: float = Field(
        0.5, gt=0, lt=1, description="adaptive: target share of unclipped clients"
    )
    clip_lr: float = Field(0.2, gt=0, le=5, description="adaptive: learning rate of log S")
    bit_noise: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="adaptive: standard deviation of the noise on the count of unclipped clients; "
        "auto: a twentieth of the cohort",
    )
    sampling: Sampling = Field(
        "poisson",
        description="poisson: each client joins independently, federation.clients_per_round on "
        "average; fixed: exactly that many, accounted for replacing one client; none: exactly that "
        "many, accounted without amplification, by counting participations, for a client that is "
        "replaced by zeros",
    )
    population: int | None = Field(
        None,
        ge=1,
        description="account for a deployment with this many clients and cohorts of "
        "privacy.cohort, and scale the noise to it; default: the simulated ones",
    )
    cohort: int | None = Field(
        None, ge=1, description="clients of a round in this deployment, on average"
    )
    canaries: int = Field(
        0,
        ge=0,
        le=10_000,
        description=f"audit: add so many clients that send random directions, {FEWEST_CANARIES} or "
        "more, and bound ε from below by how far the model follows them; the model is of no other "
        "use",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_today(cls, fields: Any) -> Any:
        """Read a run of an earlier version: leave out fields that are gone and had no effect."""
        gone = {"denoise": "none", "scope": "increment"}
        if not isinstance(fields, dict):
            return fields
        for name, value in gone.items():
            if (set_ := fields.get(name, value)) != value:
                raise ValueError(f"privacy.{name}={set_!r} is gone; allowed: leave it out")
        return {name: value for name, value in fields.items() if name not in gone}

    @model_validator(mode="after")
    def _check_fields(self) -> "PrivacyConfig":
        if not self.on:
            fields = type(self).model_fields
            self.reject_unused(fields, "without privacy.epsilon or privacy.noise")
        if self.epsilon is not None and self.noise is not None:
            raise ValueError(
                f"privacy.epsilon={self.epsilon:g} and privacy.noise={self.noise:g} exclude each "
                "other; set only one (a largest ε beside noise is privacy.budget)"
            )
        if self.noise is not None and 0 < self.noise < SMALLEST_NOISE:
            raise ValueError(
                f"privacy.noise={self.noise:g} is too little for an accountant: allowed: 0 (none), "
                f"or at least {SMALLEST_NOISE:g}"
            )
        if self.budget is not None and not self.noise:
            raise ValueError(
                f"privacy.budget={self.budget:g} needs privacy.noise above 0: epsilon is a budget "
                "by itself"
            )
        if (self.population is None) != (self.cohort is None):
            raise ValueError(
                f"privacy.population={self.population} and privacy.cohort={self.cohort}: set both, "
                "or neither"
            )
        if self.population is not None and self.cohort is not None:
            if self.sampling == "none":
                raise ValueError(
                    f"privacy.population={self.population}: with privacy.sampling='none' the "
                    "simulated participations are counted; allowed: poisson, fixed"
                )
            if self.cohort > self.population:
                raise ValueError(
                    f"privacy.cohort={self.cohort} exceeds privacy.population={self.population}"
                )
            if self.canaries:
                raise ValueError(
                    f"privacy.canaries={self.canaries} audit the noise of the simulated cohort, "
                    "which privacy.cohort scales to another one; set only one"
                )
        if 0 < self.canaries < FEWEST_CANARIES:
            raise ValueError(
                f"privacy.canaries={self.canaries} are too few for an audit; allowed: 0 (none), or "
                f"{FEWEST_CANARIES} to 10000"
            )
        if self.canaries and self.sampling != "poisson":
            raise ValueError(
                f"privacy.canaries={self.canaries} are drawn one by one, unlike clients with "
                f"privacy.sampling={self.sampling!r}; allowed: poisson"
            )
        if not self.adaptive:
            adaptive = ["quantile", "clip_lr", "bit_noise"]
            self.reject_unused(adaptive, "without privacy.adaptive=true")
        return self

    @property
    def on(self) -> bool:
        """Whether changes are clipped and noise is added."""
        return self.epsilon is not None or self.noise is not None

    def delta_for(self, population: int) -> float:
        """Return δ for a population."""
        if self.delta != "auto":
            return self.delta
        return min(1e-5, math.pow(population, -1.1))
