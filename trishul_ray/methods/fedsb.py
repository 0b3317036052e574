"""Fed-SB: one trained core between frozen bases that come from the first gradient.

Singhal et al.: "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in
(Private) Federated LoRA Fine-Tuning", 2025, arXiv 2502.15436, on LoRA-SB.

Before round 1, clients send the dense gradient of the full model on a few mini-batches. With its
mean g, the first step of a signed optimizer is ``D = -eta0 sign(g)``; its truncated SVD
``D ~ U S V^T`` gives ``B = U[:, :r]``, ``A = V[:, :r]^T`` and the start ``R = diag(S_r)``, so
training starts from ``W0 + B R A``, not from W0. Then only R [r, r] is trained, sent and averaged:
exact.
The paper states no number of clients or batches for this round; ``method.init_clients`` and
``method.init_batches`` say it here, and the dense upload is counted once, in round 0. The bases
cannot be drawn from the seed: each client downloads them in the first round it takes part in. The
figures of round 0 are those of W0, as for every method.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.budget import fed_sb_rank
from trishul_ray.adapters.layout import Layout
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.methods.adapters import rank_fields
from trishul_ray.methods.base import (
    CONSTANT,
    Method,
    MethodConfig,
    Round,
    Site,
    State,
    SurveyPlan,
    register,
)

if TYPE_CHECKING:
    from trishul_ray.config import AdapterConfig


class FedSBConfig(MethodConfig):
    """Fed-SB's hyper-parameters."""

    name: Literal["fedsb"] = "fedsb"
    init_clients: int = Field(3, ge=1, description="clients asked for a dense gradient")
    init_batches: int = Field(4, ge=1, description="mini-batches each of them reads")
    init_lr: float = Field(1e-3, gt=0, description="η0: size of the signed first step")


@register("fedsb")
class FedSB(Method):
    """A single core in the plane of the first step."""

    Config = FedSBConfig
    summary = "one core between bases from the SVD of the first gradient; core averaged (exact)"
    reference = "Singhal et al., 2025, arXiv 2502.15436"
    communication = "r^2 per matrix up and down; d_in d_out up and r (d_in + d_out) down once"
    rates_like = "fedsb"

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """One core of the budget's rank; its bases are replaced by the survey's."""
        options = site.adapter
        return {
            layer.name: MultiHead(
                heads=1,
                rank=options.rank or fed_sb_rank(layer, site.lora_rank, options.matching),
                init="gram_schmidt",
                train_scale=False,
            )
            for layer in site.layers
        }

    def ignored_fields(self, adapter: "AdapterConfig") -> frozenset[str]:
        """How many heads there are and how bases are drawn: one core, bases by SVD."""
        unread = ("heads", "init", "sigma", "overflow", "alpha")
        return rank_fields(adapter) | {f"adapter.{name}" for name in unread}

    @property
    def survey_plan(self) -> SurveyPlan:
        """Dense gradients before round 1."""
        return SurveyPlan(clients=self.config.init_clients, batches=self.config.init_batches)

    def survey(self, gradients: Iterator[dict[str, Tensor]]) -> State:
        """The mean gradient [d_out, d_in] of every adapted weight."""
        found = list(gradients)
        return {name: torch.stack([g[name] for g in found]).mean(0) for name in found[0]}

    def initial_state(self, layout: Layout, initial: Tensor, survey: State) -> State:
        """Bases and start from the SVD of the signed mean gradient."""
        start = initial.clone()
        views = layout.views(start)
        state: State = {}
        for layer, gradient in survey.items():
            core = views[f"{layer}.core"]  # [1, r, r]
            rank = core.shape[-1]
            first_step = -self.config.init_lr * torch.sign(gradient.double())
            u, s, vt = torch.linalg.svd(first_step, full_matrices=False)
            core[0].copy_(torch.diag(s[:rank]))
            state[f"{CONSTANT}{layer}/basis_B"] = u[:, :rank].float().contiguous()
            state[f"{CONSTANT}{layer}/basis_A"] = vt[:rank].float().contiguous()
        return {"shared": self.pack(layout, start), **state}

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """The mean core; the bases stay."""
        return state | {"shared": mean["shared"]}
