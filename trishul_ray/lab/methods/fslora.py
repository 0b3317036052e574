"""FSLoRA: a client trains a random sketch of the global LoRA factors.

Fang et al.: "Federated Sketching LoRA: A Flexible Framework for Heterogeneous Collaborative
Fine-Tuning of LLMs", ICML 2026, arXiv 2501.19389, and the authors' code at
github.com/wenzhifang/Federated-Sketching-LoRA-Implementation.

In each round, a client draws k of the r components of each matrix. Its model is ``W + s B S A``,
where s is the scale of LoRA. The sketch S is diagonal, with ``r / k`` for drawn components and 0
for the others, so that its expectation is the identity. By the chain rule, only the drawn columns
of B and rows of A have gradients, with a factor r / k, and only these are sent, down and up. The
server adds the mean change to each factor; a component that a client did not draw counts as a
change of 0. Evaluation and export use S = I.

``k = floor(ratio capacity r)``, at least 1: ``method.ratio`` applies to all clients, and capacities
follow ``federation.compute``. In the authors' code, k is at most r / 2 (ratio 0.5), A and B of a
matrix have separate sketches, and the server uses Adam. Here, A and B have the same sketch, as in
the paper, and the section ``server`` selects the server's optimizer. With ratio 1 and full compute
this is FedIT.

The client's vector is ``B S`` in the forward pass, and B in the optimizer's step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import LocalRun, State, Tensors
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.proportions import exact_fraction

if TYPE_CHECKING:
    from torch import Tensor


class FSLoRAConfig(MethodConfig):
    """Hyper-parameters of FSLoRA."""

    ratio: float = Field(
        1.0,
        gt=0,
        le=1,
        description="fraction of the components that a client of full compute trains",
    )


@dataclass(frozen=True)
class Sketch:
    """A client's sketch.

    Attributes:
        scale: [P], r / k for the entries of B and 1 for all others.
        drawn: [P] bool, the entries that the client trains.
        broadcast: [P], the global trainables.
    """

    scale: Tensor
    drawn: Tensor
    broadcast: Tensor


@register("fslora")
class FSLoRA(FedIT):
    """Train and send random components of both factors; average their changes."""

    Config = FSLoRAConfig
    summary = "LoRA; each client trains a random sketch of A and B; changes averaged (inexact)"
    reference = "Fang et al., ICML 2026, arXiv 2501.19389"
    communication = "k (d_in + d_out) per matrix up and down"
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 2.0e-3}
    takes_limits = True

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Load the broadcast, and apply a random sketch to each matrix."""
        super().start(run, initial)
        if not run.training:
            return
        scale, drawn = torch.ones_like(run.vector), torch.ones_like(run.vector)
        scales = run.layout.views(scale)
        for layer, a, b in lora_pairs(run.layout.views(drawn)):
            rank = len(a)
            count = max(1, math.floor(exact_fraction(rank, self.config.ratio, run.capacity)))
            rest = torch.randperm(rank, generator=run.generator)[count:].to(a.device)
            a[rest] = 0
            b[:, rest] = 0
            scales[f"{layer}.lora_B"].fill_(rank / count)
            run.metrics["rank"] = float(count)
        run.entries = drawn > 0
        run.unsent = int((~run.entries).sum())
        run.set_state(Sketch(scale, run.entries, run.vector.clone()))
        run.vector.mul_(scale * drawn)

    def before_step(self, run: LocalRun) -> None:
        """Convert ``B S`` and its gradient to B and its gradient, for the optimizer."""
        scale = run.state_of(Sketch).scale
        run.vector.div_(scale)
        run.grad.mul_(scale)

    def after_step(self, run: LocalRun, step: int, steps: int) -> None:
        """Convert B back to ``B S``."""
        run.vector.mul_(run.state_of(Sketch).scale)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the factors, with the broadcast's value in components that were not drawn."""
        sketch = run.state_of(Sketch)
        vector = torch.where(sketch.drawn, run.vector / sketch.scale, sketch.broadcast)
        return State(self.pack(run.layout, vector)), {}
