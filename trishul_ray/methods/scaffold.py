"""SCAFFOLD+LoRA: averaged LoRA factors with control variates against client drift.

Karimireddy et al.: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
arXiv 1910.06378, on all trainables of the adapter, as the TRISHUL paper uses it.

The server keeps c, each client c_i, all zero at first. A client steps along ``g - c_i + c``; after
K steps its new variate is, by option II, ``c_i+ = c_i - c + (x - y) / (K eta)``, or with a schedule
divided by the sum of its K rates, which for plain SGD equals the mean of its K raw gradients. Under
Adam (x - y) / (K eta) is no gradient, and neither is it with clipping, so there the mean raw
gradient is taken itself. The client uploads its trainables and ``c_i+ - c_i``; the
server averages the former (as FedIT: inexact) and adds ``(1/N) sum_i (c_i+ - c_i)`` to c, over all
N registered clients. Traffic is twice LoRA's in both directions.
"""

from typing import Literal

import torch
from torch import Tensor

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import LocalRun, MethodConfig, Round, State
from trishul_ray.methods.kinds import LoRAMethod
from trishul_ray.methods.registry import register


class ScaffoldConfig(MethodConfig):
    """SCAFFOLD's hyper-parameters; the server's step is 1."""

    name: Literal["scaffold"] = "scaffold"


@register("scaffold")
class Scaffold(LoRAMethod):
    """FedIT with control variates."""

    Config = ScaffoldConfig
    summary = "LoRA averaged as FedIT, local steps corrected by control variates"
    reference = "Karimireddy et al., ICML 2020, arXiv 1910.06378"
    communication = "2 r (d_in + d_out) per matrix up and down"
    rates_like = "fedit"

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Where the round began, and how far the cohort's direction is from this client's."""
        super().start(run, initial)
        own = run.client_state.get("control", torch.zeros_like(run.vector))
        run.memory = {
            "start": run.vector.clone(),
            "own": own,
            "correction": run.broadcast["control"] - own,
            "gradients": torch.zeros_like(run.vector),
        }

    def before_step(self, run: LocalRun) -> None:
        """``g <- g - c_i + c``, before any optimizer; the raw gradient is remembered."""
        run.memory["gradients"] += run.grad
        run.grad += run.memory["correction"]

    def upload(self, run: LocalRun, steps: int) -> tuple[State, State]:
        """The trainables and the change of this client's variate, which it keeps."""
        memory, options = run.memory, run.optimizer
        plain = options.name == "sgd" and options.momentum == options.weight_decay == 0
        if plain and options.clip_norm is None:
            moved = (memory["start"] - run.vector) / run.summed_rate(steps, steps)
            control = moved - memory["correction"]
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
        """``c <- c + (m/N) mean(dc) = c + (1/N) sum dc``."""
        share = round_.accepted / round_.clients
        return {"shared": mean["shared"], "control": state["control"] + share * mean["control"]}
