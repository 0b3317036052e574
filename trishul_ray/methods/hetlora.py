"""HetLoRA: clients of different ranks, padded with zeros and weighted by their update's norm.

Cho et al.: "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP
2024, arXiv 2401.06432.

A client of rank r_c trains the first r_c columns of B and rows of A, and uploads them padded with
zeros. The server averages the padded factors with weights ``p_c = ||B_c A_c||_F / sum ||B A||_F``
(root of the sum of squares over layers; equal weights while all are zero), which is inexact. The
classification head is not low-rank, so it is averaged only with ``federation.weighting``.

The cohort's factors are padded to the largest rank in the cohort; the paper does not define the
value of components beyond it. With ``method.unsent=keep`` they keep the server's values. ``zero``
always pads to r_max: after a round without a client of full rank, a row of A and its column of B
are zero. Their gradients are then also zero (each is a product with the other), so the rank of the
global model can only decrease.

Ranks follow ``federation.compute``. Self-pruning (a penalty on the tail of the rank, and a
permanently lower rank once the tail has shrunk) is off by default, because the TRISHUL paper
compares only with truncation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import LocalRun, Round, State, Tensors
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.proportions import exact_fraction

if TYPE_CHECKING:
    from torch import Tensor


class HetLoRAConfig(MethodConfig):
    """Hyper-parameters of HetLoRA."""

    prune: bool = Field(False, description="self-pruning of a client's rank")
    gamma: float = Field(
        0.95, gt=0, lt=1, description="γ: fraction of the rank at which its tail begins"
    )
    penalty: float = Field(0.01, ge=0, description="weight of the tail's norm in the loss")
    min_rank: int = Field(1, ge=1, description="minimum rank of a client")
    unsent: Literal["keep", "zero"] = Field(
        "keep",
        description="components beyond every rank of the cohort: keep the server's value, or "
        "average the padding zeros, after which they are never trained again",
    )


@dataclass(frozen=True)
class RankInUse:
    """The rank that a client trains, and the norm of its tail before the first step."""

    rank: int
    tail: Tensor


@register("hetlora")
class HetLoRA(FedIT):
    """Truncate, train, pad with zeros, and average by norm."""

    Config = HetLoRAConfig
    summary = "LoRA of client-specific rank; zero-padded, averaged by update norm (inexact)"
    reference = "Cho et al., EMNLP 2024, arXiv 2401.06432"
    communication = "r_c (d_in + d_out) per matrix up and down"
    aggregates_mean_only = False
    takes_limits = True
    weighs_classifier = False

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Load the first r_c components of the broadcast, and zero the others for this round."""
        super().start(run, initial)
        kept = run.client_state.get("rank")
        rank = self.limit_rank(run, None if kept is None else int(kept))
        tail = torch.stack(self._tails(run, run.vector, rank)).sum()
        run.set_state(RankInUse(rank, tail))

    def _pruned(self, rank: int) -> int:
        """Return the start of the tail of ``rank``: ``floor(gamma rank)``, at least min_rank."""
        minimum: int = self.config.min_rank
        return max(minimum, math.floor(exact_fraction(rank, self.config.gamma)))

    def _tails(self, run: LocalRun, vector: Tensor, rank: int) -> list[Tensor]:
        """Compute ``||B[:, tail]||_F ||A[tail, :]||_F`` per layer, with tail = gamma r_c .. r_c."""
        first = self._pruned(rank)
        pairs = lora_pairs(run.layout.views(vector))
        return [b[:, first:rank].norm() * a[first:rank].norm() for _, a, b in pairs]

    def before_step(self, run: LocalRun) -> None:
        """Add the gradient of the penalty on the tail."""
        if not self.config.prune or self.config.penalty == 0:
            return
        with torch.enable_grad():
            leaf = run.vector.detach().clone().requires_grad_()
            total = torch.stack(self._tails(run, leaf, run.state_of(RankInUse).rank)).sum()
            (slope,) = torch.autograd.grad(total, leaf)
        # The norm of an all-zero tail is not differentiable; use the subgradient 0.
        run.grad.add_(slope.nan_to_num(0.0), alpha=self.config.penalty)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the padded factors; lower the rank permanently if the tail has shrunk."""
        start = run.state_of(RankInUse)
        rank = start.rank
        kept: Tensors = {}
        if self.config.prune:
            shrunk = torch.stack(self._tails(run, run.vector, rank)).sum() < start.tail
            kept["rank"] = torch.where(shrunk, float(self._pruned(rank)), float(rank)).view(1)
        run.metrics["rank"] = float(rank)
        return State(self.pack(run.layout, run.vector)), kept

    def weight(self, upload: State, layout: Layout, weight: float) -> float:
        """Compute ``||B_c A_c||_F`` as ``tr(A^T B^T B A)``, without forming the product.

        A zero update has a tiny positive weight, so that clients have equal weights while all
        updates are zero.
        """
        squares = [
            float(((b.mT @ b).double() * (a @ a.mT).double()).sum())
            for _, a, b in lora_pairs(self.named_tensors(layout, upload.shared))
        ]
        return float(max(sum(squares), 1e-60) ** 0.5)

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the mean of the padded factors; by default, keep components that nobody sent."""
        shared = mean.shared.clone()
        if self.config.unsent == "keep":
            old = self.named_tensors(layout, state.shared)
            for layer, a, b in lora_pairs(self.named_tensors(layout, shared)):
                # Weights are positive: a component of the mean is zero if it is zero in all
                # uploads.
                unsent = (a == 0).all(dim=1) & (b == 0).all(dim=0)  # [r]
                a[unsent] = old[f"{layer}.lora_A"][unsent]
                b[:, unsent] = old[f"{layer}.lora_B"][:, unsent]
        return State(shared)
