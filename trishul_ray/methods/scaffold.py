"""SCAFFOLD+LoRA: averaged LoRA factors with control variates against client drift.

Karimireddy et al.: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
arXiv 1910.06378, on all trainables of the adapter, as in the TRISHUL paper.

The server stores a control variate c and each client its own c_i, all initially zero. A client
steps along ``g - c_i + c``. ``method.option`` selects its new variate after K steps:

- ``II``: ``c_i+ = c_i - c + (x - y) / (K eta)``, as published; with a learning-rate schedule the
  sum of the K rates replaces ``K eta``. Under plain SGD this is the mean of the K raw gradients, up
  to rounding of ``x - y`` in float32; under Adam or with clipping it is not a gradient.
- ``auto``: the mean of the K raw gradients itself, with any optimizer.
- ``I``: the mean gradient at x of the round's K mini-batches, in an extra pass before the first
  step.

The client uploads its trainables and ``c_i+ - c_i``. The server averages the trainables (inexactly,
like FedIT), ``x <- x + eta_g (mean - x)``, and adds ``(1/N) sum_i (c_i+ - c_i)`` to c, where N
counts all registered clients. This sum is unweighted regardless of ``federation.weighting``.
Traffic is twice that of LoRA in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.messages import LocalRun, Round, State, Tensors
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class ScaffoldConfig(MethodConfig):
    """Hyper-parameters of SCAFFOLD."""

    option: Literal["auto", "I", "II"] = Field(
        "auto",
        description="control variate of a client: mean raw gradient of its steps, gradient at the "
        "broadcast (I), or its movement over steps x learning rate (II)",
    )
    server_lr: float = Field(1.0, gt=0, description="η_g: step size of the server; 1 is the mean")
    corrects: Literal["all", "adapter"] = Field(
        "all",
        description="scope of the control variates: all trainables, or all except the "
        "classification head",
    )


@dataclass(frozen=True)
class Drift:
    """Corrections of a client's steps, [P] each.

    Attributes:
        start: x, the broadcast.
        control: c_i, the client's variate.
        correction: c - c_i, added to every gradient.
        gradients: Sum of the raw gradients so far.
    """

    start: Tensor
    control: Tensor
    correction: Tensor
    gradients: Tensor


@register("scaffold")
class Scaffold(FedIT):
    """FedIT with control variates."""

    Config = ScaffoldConfig
    summary = "LoRA averaged as FedIT, local steps corrected by control variates"
    reference = "Karimireddy et al., ICML 2020, arXiv 1910.06378"
    communication = "2 r (d_in + d_out) per matrix up and down"
    plain_mean = frozenset({"control"})
    # c is the mean of all c_i, even if a stage alters the changes
    mirrored = frozenset({"control"})

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Store the broadcast, and the correction ``c - c_i`` of this client's gradients."""
        super().start(run, initial)
        if not run.training:
            return
        control = run.client_state.get("control", torch.zeros_like(run.vector))
        correction = run.broadcast.extra["control"] - control
        drift = Drift(run.vector.clone(), control, correction, torch.zeros_like(run.vector))
        run.set_state(drift)
        if self.config.option == "I":
            for step in range(1, run.steps + 1):
                run.gradient(step)
                drift.gradients.add_(run.grad)

    def before_step(self, run: LocalRun) -> None:
        """Sum the raw gradients, then correct: ``g <- g - c_i + c``."""
        drift = run.state_of(Drift)
        if self.config.option != "I":
            drift.gradients.add_(run.grad)
        run.grad += drift.correction

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the trainables and the change of this client's variate; keep the variate."""
        drift = run.state_of(Drift)
        if self.config.option == "II":
            moved = (drift.start.double() - run.vector) / run.summed_rate(steps, steps)
            control = (moved - drift.correction).float()
        else:
            control = drift.gradients / steps
        if self.config.corrects == "adapter":
            for entry in run.layout.entries:
                if entry.kind == "classifier":
                    control.narrow(0, entry.offset, entry.numel).zero_()
        change = {"control": control - drift.control}
        return State(self.pack(run.layout, run.vector), change), {"control": control}

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Return the number of trainables for both arrays."""
        return {"shared": layout.size, "control": layout.size}

    def initial_state(self, layout: Layout, initial: Tensor, survey: Tensors) -> State:
        """Start with c = 0."""
        start = super().initial_state(layout, initial, survey)
        return replace(start, extra={"control": torch.zeros_like(initial)})

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Apply ``x <- x + eta_g (mean - x)`` and ``c <- c + (m/N) mean(dc)``, dc = c_i+ - c_i."""
        shared = mean.shared
        if self.config.server_lr != 1.0:
            shared = state.shared + self.config.server_lr * (shared - state.shared)
        share = round_.accepted / round_.clients
        control = state.extra["control"] + share * mean.extra["control"]
        return State(shared, {"control": control})
