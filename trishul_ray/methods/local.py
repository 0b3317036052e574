"""Local training: every client trains a separate adapter, and nothing is sent.

This baseline measures the benefit of federation. A client continues from its last round; its
adapter and its classification head never leave it. Without a global model, the global metrics score
the untuned backbone with an untrained head in every round. Compare the personalized models instead
(``evaluation.per_client``); the model of a client that was never sampled is also untuned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.base.adapters import AnyAdapter
from trishul_ray.methods.base.messages import LocalRun, State, Tensors
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@register("local")
class Local(AnyAdapter):
    """Train on each client separately."""

    summary = "no federation: each client trains a separate adapter (personal models)"
    reference = "the usual baseline of personalization"
    communication = "nothing"
    rates_like = "fedit"
    personal = True

    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Return no names."""
        return ()

    def pack(self, layout: Layout, vector: Tensor) -> Tensor:
        """Return an empty vector."""
        return torch.empty(0)

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Continue from this client's last round, or start untrained."""
        run.vector.copy_(run.client_state.get("vector", initial))

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send nothing and keep all trainables."""
        return State(self.pack(run.layout, run.vector)), {"vector": run.vector.clone()}
