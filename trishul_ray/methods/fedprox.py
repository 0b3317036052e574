"""FedProx: FedAvg with a pull towards the broadcast.

Li et al.: "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv 1812.06127. A
client minimizes ``L_c(w) + (mu/2) ||w - w_t||^2`` over its trainables; the server averages as
FedAvg does, and mu = 0 is FedAvg. No mu is published for this setting.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from trishul_ray.methods.adapters import AnyAdapterConfig, AnyAdapterMethod
from trishul_ray.methods.base import LocalRun, register


class FedProxConfig(AnyAdapterConfig):
    """FedProx's hyper-parameters."""

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0, description="μ: weight of the proximal term; 0 is FedAvg")


@register("fedprox")
class FedProx(AnyAdapterMethod):
    """The mean of clients that were held back."""

    Config = FedProxConfig
    summary = "FedAvg with a quadratic pull towards the broadcast on the client"
    reference = "Li et al., MLSys 2020, arXiv 1812.06127"
    communication = "the adapter's parameters up and down"
    rates_like = "fedit"

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Remember where the round began."""
        super().start(run, initial)
        run.memory["anchor"] = run.vector.clone()

    def before_step(self, run: LocalRun) -> None:
        """Add the gradient of the proximal term, ``mu (w - w_t)``."""
        if self.config.mu:
            run.grad.add_(run.vector - run.memory["anchor"], alpha=self.config.mu)
