"""A custom method: FedIT with momentum on the server. Check it, then compare it with FedIT.

Run from the root of the repository::

    trishul check --plugin examples/own_method.py
    trishul sweep --plugin examples/own_method.py --axis method=fedit,fedit-momentum rounds=3
"""

from pydantic import Field

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.messages import Round, State
from trishul_ray.methods.fedit import FedIT


class MomentumConfig(MethodConfig):
    """Fields of the section `method`."""

    beta: float = Field(0.5, ge=0, lt=1, description="weight of the earlier changes")


@register("fedit-momentum")
class FedITMomentum(FedIT):
    """Add a decaying sum of earlier mean changes on the server."""

    Config = MomentumConfig
    summary = "LoRA averaged, with momentum on the server"
    reference = "Hsu et al., 2019, arXiv 1909.06335 (FedAvgM)"
    alters_mean = True  # one client is not central training

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the state after a step with momentum."""
        change = mean.shared - state.shared
        if "momentum" in state.extra:
            change = change + self.config.beta * state.extra["momentum"]
        return State(state.shared + change, {"momentum": change})

    def broadcast(self, state: State) -> State:
        """Send the trained parameters only; the momentum stays on the server."""
        return State(state.shared)
