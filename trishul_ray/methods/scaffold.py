"""SCAFFOLD+LoRA: averaged LoRA factors with control variates against client drift.

Karimireddy et al.: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
arXiv 1910.06378, on all trainables of the adapter, as the TRISHUL paper uses it.

The server keeps c, each client c_i, all zero at first. A client steps along ``g - c_i + c``; what
its variate is after K steps is ``method.option``:

- ``II``: ``c_i+ = c_i - c + (x - y) / (K eta)``, as published; with a learning-rate schedule the
  sum of the K rates stands for ``K eta``. Under plain SGD this is the mean of the K raw gradients,
  but for what float32 loses in ``x - y``; under Adam or with clipping it is no gradient.
- ``auto``: the mean of the K raw gradients itself, whatever the optimizer.
- ``I``: the mean gradient at x of the round's K mini-batches, read once more before the first step.

The client uploads its trainables and ``c_i+ - c_i``. The server averages the former (as FedIT:
inexact), ``x <- x + eta_g (mean - x)``, and adds ``(1/N) sum_i (c_i+ - c_i)`` to c, over all N
registered clients: a plain sum, also where ``federation.weighting`` weighs the trainables by size.
Traffic is twice LoRA's in both directions.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.adapters import LoRAMethod
from trishul_ray.methods.base import LocalRun, MethodConfig, Round, State, register


class ScaffoldConfig(MethodConfig):
    """SCAFFOLD's hyper-parameters."""

    name: Literal["scaffold"] = "scaffold"
    option: Literal["auto", "I", "II"] = Field(
        "auto",
        description="a client's control variate: mean raw gradient of its steps, gradient at the "
        "broadcast (I), or its movement over steps x learning rate (II)",
    )
    server_lr: float = Field(1.0, gt=0, description="η_g: the server's step; 1 takes the mean")


@register("scaffold")
class Scaffold(LoRAMethod):
    """FedIT with control variates."""

    Config = ScaffoldConfig
    summary = "LoRA averaged as FedIT, local steps corrected by control variates"
    reference = "Karimireddy et al., ICML 2020, arXiv 1910.06378"
    communication = "2 r (d_in + d_out) per matrix up and down"
    plain_mean = frozenset({"control"})
    rates_like = "fedit"

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Where the round began, and how far the cohort's direction is from this client's."""
        super().start(run, initial)
        if not run.training:
            return
        own = run.client_state.get("control", torch.zeros_like(run.vector))
        run.memory = {
            "start": run.vector.clone(),
            "own": own,
            "correction": run.broadcast["control"] - own,
            "gradients": torch.zeros_like(run.vector),
        }
        if self.config.option == "I":
            for step in range(1, run.steps + 1):
                run.gradient(step)
                run.memory["gradients"] += run.grad

    def before_step(self, run: LocalRun) -> None:
        """``g <- g - c_i + c``, before any optimizer; the raw gradient is remembered."""
        if self.config.option != "I":
            run.memory["gradients"] += run.grad
        run.grad += run.memory["correction"]

    def upload(self, run: LocalRun, steps: int) -> tuple[State, State]:
        """The trainables and the change of this client's variate, which it keeps."""
        memory = run.memory
        if self.config.option == "II":
            moved = (memory["start"].double() - run.vector) / run.summed_rate(steps, steps)
            control = (moved - memory["correction"]).float()
        else:
            control = memory["gradients"] / steps
        shared = self.pack(run.layout, run.vector)
        return {"shared": shared, "control": control - memory["own"]}, {"control": control}

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Both parts have the trainables' length."""
        return {"shared": layout.size, "control": layout.size}

    def initial_state(self, layout: Layout, initial: Tensor, survey: State) -> State:
        """C = 0."""
        start = super().initial_state(layout, initial, survey)
        return start | {"control": torch.zeros_like(initial)}

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """``x <- x + eta_g (mean - x)`` and ``c <- c + (m/N) mean(dc) = c + (1/N) sum dc``."""
        shared = mean["shared"]
        if self.config.server_lr != 1.0:
            shared = state["shared"] + self.config.server_lr * (shared - state["shared"])
        share = round_.accepted / round_.clients
        return {"shared": shared, "control": state["control"] + share * mean["control"]}
