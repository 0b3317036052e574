"""FedProx: FedAvg with a proximal term that pulls clients toward the broadcast.

Li et al.: "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv 1812.06127. A
client minimizes ``L_c(w) + (mu/2) ||w - w_t||^2`` over its trainables. The server averages as in
FedAvg, and mu = 0 is FedAvg. No mu is published for this setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from trishul_ray.methods.base import register
from trishul_ray.methods.base.adapters import AnyAdapterConfig
from trishul_ray.methods.base.messages import LocalRun
from trishul_ray.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor


class FedProxConfig(AnyAdapterConfig):
    """Hyper-parameters of FedProx."""

    mu: float = Field(0.01, ge=0, description="μ: weight of the proximal term; 0 is FedAvg")


@dataclass(frozen=True)
class Anchor:
    """The vector [P] in the proximal term."""

    vector: Tensor


@register("fedprox")
class FedProx(FedAvg):
    """Add the gradient of the proximal term to every local step."""

    Config = FedProxConfig
    summary = "FedAvg with a quadratic pull toward the broadcast on the client"
    reference = "Li et al., MLSys 2020, arXiv 1812.06127"

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Store a copy of the broadcast."""
        super().start(run, initial)
        run.set_state(Anchor(run.vector.clone()))

    def before_step(self, run: LocalRun) -> None:
        """Add ``mu (w - w_t)``."""
        if self.config.mu:
            run.grad.add_(run.vector - run.state_of(Anchor).vector, alpha=self.config.mu)
