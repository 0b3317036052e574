"""FSLoRA: a client trains a random sketch of the global LoRA factors.

Fang et al.: "Federated Sketching LoRA: A Flexible Framework for Heterogeneous Collaborative
Fine-Tuning of LLMs", ICML 2026, arXiv 2501.19389, and the authors' code at
github.com/wenzhifang/Federated-Sketching-LoRA-Implementation.

In each round a client draws for each matrix k of the r components. Its model is ``W + s B S A``,
where s is the scale of LoRA and the sketch S is diagonal: ``r / k`` for the drawn components and 0
for the others, so that its mean is the identity. By the chain rule only the drawn columns of B and
rows of A have gradients, with a factor r / k. They are the only ones that are sent, down and up.
The server adds the mean change of each factor to it, where a component that a client has not drawn
has changed by 0. Evaluation and export take S = I.

``k = floor(ratio capacity r)``, at least 1: ``method.ratio`` applies to all clients, and capacities
follow ``federation.compute``. In the authors' code k is at most r / 2 (ratio 0.5), A and B of a
matrix have separate sketches, and the server steps by Adam. Here both have the same sketch, as in
the paper, and the section ``server`` sets the server's optimizer. With ratio 1 and full compute
this is FedIT.

The vector holds ``B S`` in the forward pass, and B in the optimizer's step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        1.0, gt=0, le=1, description="share of the components that a client of full compute trains"
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
    takes_limits = True

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Take the broadcast; draw a sketch for each matrix and apply it."""
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
        """Give the optimizer B and its gradient, in place of B S and the gradient of that."""
        scale = run.state_of(Sketch).scale
        run.vector.div_(scale)
        run.grad.mul_(scale)

    def after_step(self, run: LocalRun, step: int, steps: int) -> None:
        """Return from B to B S."""
        run.vector.mul_(run.state_of(Sketch).scale)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the factors, in which components that were not drawn are the broadcast's."""
        sketch = run.state_of(Sketch)
        vector = torch.where(sketch.drawn, run.vector / sketch.scale, sketch.broadcast)
        return State(self.pack(run.layout, vector)), {}
