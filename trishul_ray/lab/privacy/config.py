"""The section ``privacy`` of an experiment."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trishul_ray.config.section import Section, not_in_id

#: How the clients of a round are sampled, which determines the guarantee of its noise.
Sampling = Literal["poisson", "fixed"]

#: Name of the instruction with the clip norm.
CLIP_NORM = "privacy_clip_norm"
#: Columns of the record: fraction of clipped changes or examples, their mean norm before clipping,
#: and ε so far.
CLIPPED, NORM, EPSILON = "privacy_clipped", "privacy_norm", "privacy_epsilon"
#: Notice in the summary of every private run.
SIMULATION = "simulation: noise is reproducible from the seed"

#: Minimum noise multiplier that the accountants support.
SMALLEST_NOISE = 0.01


class PrivacyConfig(Section):
    """Differential privacy of clients or examples; disabled without ``epsilon`` and ``noise``."""

    unit: Literal["client", "example"] = Field(
        "client",
        description="client: clipped changes of clients, noise on their mean; example: DP-SGD in "
        "the local steps of each client",
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        le=100,
        description="ε of the whole run, which determines the noise; the id has ε, not the noise. "
        "unit=example: of the client with the largest ε",
    )
    noise: float | None = Field(
        None,
        ge=0,
        description="noise multiplier z instead of epsilon: standard deviation of the noise on the "
        "sum of a round, or of a local step, divided by the clip norm",
    )
    budget: float | None = not_in_id(
        None, "with noise: maximum ε; reduces federation.rounds to the rounds that it allows", gt=0
    )
    delta: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = Field(
        "auto",
        description="δ; auto: min(1e-5, N^-1.1) for N clients, or N rows of the largest client",
    )
    clip: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="clip norm S of a client's change; auto: optimizer.lr "
        "sqrt(federation.local_steps P) for P sent numbers, which reads no data. unit=example: of "
        "the gradient of an example; auto: 1",
    )
    sampling: Sampling = Field(
        "poisson",
        description="poisson: each client joins independently, federation.clients_per_round on "
        "average; fixed: exactly that many, accounted for replacing one client",
    )
    chunk: int = Field(
        64,
        ge=1,
        description="unit=example: maximum number of rows of a forward pass; their gradients take "
        "4 P bytes per row",
    )

    @model_validator(mode="after")
    def _check_fields(self) -> "PrivacyConfig":
        if self.epsilon is None and self.noise is None:
            fields = type(self).model_fields
            self.reject_unused(fields, "without privacy.epsilon or privacy.noise")
        unused = ("chunk",) if self.unit == "client" else ("sampling", "budget")
        self.reject_unused(unused, f"with privacy.unit={self.unit!r}")
        if self.epsilon is not None and self.noise is not None:
            raise ValueError(
                f"privacy.epsilon={self.epsilon:g} and privacy.noise={self.noise:g} exclude each "
                "other; set only one (privacy.budget is the maximum ε for a given noise)"
            )
        if self.noise is not None and 0 < self.noise < SMALLEST_NOISE:
            raise ValueError(
                f"privacy.noise={self.noise:g} is too small for an accountant; set 0 (no noise) "
                f"or at least {SMALLEST_NOISE:g}"
            )
        if self.budget is not None and not self.noise:
            raise ValueError(
                f"privacy.budget={self.budget:g} needs privacy.noise above 0; set privacy.noise "
                "or only privacy.epsilon"
            )
        return self

    def delta_for(self, members: int) -> float:
        """Return δ for a number of clients, or for a number of examples of a client."""
        return min(1e-5, math.pow(members, -1.1)) if self.delta == "auto" else self.delta
