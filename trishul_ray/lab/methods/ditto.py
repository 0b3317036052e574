"""Ditto: clients also train personalized models, which a penalty pulls toward the global model.

Li et al.: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, arXiv
2012.04221, on the adapter and the classification head.

The global model w is trained as in FedAvg. In each of its rounds, a client also takes K steps on
its personalized model v, with the same mini-batches and optimizer, along the gradient of
``L_c(v) + (lam/2) ||v - w||^2``, where w is the broadcast (algorithm 1). v is initially untrained
and stays with the client. With lam = 0 this is local training.

The metrics score the global model. Compare the personalized models instead
(``evaluation.per_client``); a client that was never sampled has the global model. A round costs a
client 2 K steps, but time estimates count K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from trishul_ray.errors import PermanentError
from trishul_ray.methods.base import register
from trishul_ray.methods.base.adapters import AnyAdapterConfig
from trishul_ray.methods.base.messages import LocalRun, State, Tensors
from trishul_ray.methods.base.optimizer import make_optimizer
from trishul_ray.methods.fedavg import FedAvg
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class DittoConfig(AnyAdapterConfig):
    """Hyper-parameters of Ditto."""

    lam: float = Field(
        0.1,
        ge=0,
        description="λ: pull of personalized models toward the broadcast; 0: local training",
    )


@dataclass(frozen=True)
class Own:
    """The personalized model v before the round, [P]."""

    vector: Tensor


@register("ditto")
class Ditto(FedAvg):
    """FedAvg, and a personalized model of each client near the global model."""

    Config = DittoConfig
    summary = "FedAvg, and a personalized model per client, pulled toward the global model"
    reference = "Li et al., ICML 2021, arXiv 2012.04221"
    personal = True
    reads_rows = True

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Load the broadcast or, to score a personalized model, the client's v."""
        run.vector.copy_(initial)
        self.unpack(run.layout, run.vector, run.broadcast.shared)
        own = run.client_state.get("vector", initial)
        if run.training:
            run.set_state(Own(own))
        elif run.client_state:
            run.vector.copy_(own)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the global model's trainables, then train and keep the personalized model."""
        sent = State(self.pack(run.layout, run.vector))
        own = run.state_of(Own).vector
        run.vector.copy_(own)
        target = torch.empty_like(own)  # unpack() fills it: all entries are shared
        self.unpack(run.layout, target, run.broadcast.shared)
        run.vector.grad = run.grad
        optimizer, clip_norm = make_optimizer(run.optimizer, [run.vector]), run.optimizer.clip_norm
        losses = []
        for step in range(1, steps + 1):
            with torch.enable_grad():
                losses.append(run.gradient(step))
            run.grad.add_(run.vector - target, alpha=self.config.lam)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([run.vector], clip_norm)
            optimizer.param_groups[0]["lr"] = run.rates[step - 1]
            optimizer.step()
        run.metrics["own_loss"] = loss = float(torch.stack(losses).double().mean())
        if not torch.isfinite(run.vector).all():
            raise PermanentError(
                f"the personalized model of client {run.client} is not finite after round "
                f"{run.round} (optimizer.lr={run.optimizer.lr}, mean loss {loss}): try a "
                "smaller learning rate"
            )
        return sent, {"vector": run.vector.clone()}
