"""Fed-SB: one trained core between frozen bases computed from the first gradient.

Singhal et al.: "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in
(Private) Federated LoRA Fine-Tuning", 2025, arXiv 2502.15436, on LoRA-SB.

Before round 1, clients send the dense gradient of the full model on a few mini-batches. With its
mean g, the first step of a signed optimizer is ``D = -eta0 sign(g)``. Its truncated SVD ``D ~ U S
V^T`` gives ``B = U[:, :r]``, ``A = V[:, :r]^T`` and the initial ``R = diag(S_r)``, so training
starts from ``W0 + B R A``, not from W0. After that, only R [r, r] is trained, sent and averaged,
which is exact.

The paper does not give the number of clients or batches for the first gradient: see
``method.init_clients`` and ``method.init_batches``. The dense upload is counted once, in round 0.
The bases cannot be drawn from the seed, so each client downloads them in its first round. As for
every method, the metrics of round 0 score W0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.budget import fed_sb_rank
from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import ADAPTED, Method, MethodConfig, register
from trishul_ray.methods.base.messages import Round, State, SurveyPlan, TargetLayers, Tensors
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class FedSBConfig(MethodConfig):
    """Hyper-parameters of Fed-SB."""

    init_clients: int = Field(
        3, ge=1, description="clients that compute a dense gradient, unless a stage selects them"
    )
    init_batches: int = Field(4, ge=1, description="mini-batches per client for it")
    init_lr: float = Field(1e-3, gt=0, description="η0: size of the signed first step")


@register("fedsb")
class FedSB(Method):
    """Train a single core in the subspaces of the first step."""

    Config = FedSBConfig
    summary = "one core between bases from the SVD of the first gradient; core averaged (exact)"
    reference = "Singhal et al., 2025, arXiv 2502.15436"
    communication = "r^2 per matrix up and down; d_in d_out up and r (d_in + d_out) down once"
    rates_like = "fedsb"
    aggregates_mean_only = True
    fields_read = ADAPTED | {"matching"}

    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Attach one core of the budget's rank; the survey replaces its bases."""
        from trishul_ray.adapters.multihead import MultiHead  # imports torch

        options = targets.adapter
        return {
            layer.name: MultiHead(
                heads=1,
                rank=options.rank or fed_sb_rank(layer, targets.lora_rank, options.matching),
                init="gram_schmidt",
                train_scale=False,
            )
            for layer in targets.layers
        }

    @property
    def survey_plan(self) -> SurveyPlan:
        """Request dense gradients before round 1."""
        return SurveyPlan(clients=self.config.init_clients, batches=self.config.init_batches)

    def survey(self, gradients: Iterator[Tensors]) -> Tensors:
        """Compute the mean gradient [d_out, d_in] of every adapted weight."""
        batches = list(gradients)
        return {name: torch.stack([g[name] for g in batches]).mean(0) for name in batches[0]}

    def initial_state(self, layout: Layout, initial: Tensor, survey: Tensors) -> State:
        """Compute bases and initial cores from the SVD of the signed mean gradient."""
        start = initial.clone()
        views = layout.views(start)
        bases: dict[str, Tensors] = {}
        for layer, gradient in survey.items():
            core = views[f"{layer}.core"]  # [1, r, r]
            rank = core.shape[-1]
            first_step = -self.config.init_lr * torch.sign(gradient.double())
            u, s, vt = torch.linalg.svd(first_step, full_matrices=False)
            core[0].copy_(torch.diag(s[:rank]))
            bases[layer] = {
                "basis_B": u[:, :rank].float().contiguous(),
                "basis_A": vt[:rank].float().contiguous(),
            }
        return State(self.pack(layout, start), constants=bases)

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the mean core with unchanged bases."""
        return replace(state, shared=mean.shared)
