"""FlexLoRA: average full-size updates and distribute them by SVD at each client's rank.

Bai et al.: "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024, arXiv 2402.11505.

``G = sum_c p_c scale B_c A_c`` is formed at full size (exact) and decomposed, ``G = U S V^T``. A
client of rank r receives ``A = V[:, :r]^T`` and ``B = U[:, :r] S_r / scale``, with the singular
values entirely in B. The global model is G truncated at the largest rank. With
``method.truncate=false`` the remainder is added to the frozen weight, so that nothing is lost
between rounds (for tests of exactness, or if sending it is affordable). As published, components
beyond the largest rank in a round are dropped. They can be trained again, because only their
columns of B are zero, not their rows of A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.messages import LocalRun, Round, State, count_numbers
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class FlexLoRAConfig(MethodConfig):
    """Hyper-parameters of FlexLoRA."""

    truncate: bool = Field(
        True, description="drop components beyond the largest rank, as published"
    )


@register("flexlora")
class FlexLoRA(FedIT):
    """Average the products and send their leading singular components."""

    Config = FlexLoRAConfig
    summary = "LoRA of client-specific rank; products averaged at full size, SVD to each rank"
    reference = "Bai et al., NeurIPS 2024, arXiv 2402.11505"
    communication = "r_c (d_in + d_out) per matrix up and down"
    aggregates_mean_only = False
    takes_limits = True
    contribution = FedIT.with_products

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Load the leading r_c singular components of the broadcast."""
        super().start(run, initial)
        run.metrics["rank"] = float(self.limit_rank(run))

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Decompose the mean update; its leading components become the factors."""
        shared = mean.shared.clone()
        remainders = {}
        for layer, a, b, update in self.mean_updates(mean, shared, layout):
            u, s, vt = torch.linalg.svd(update, full_matrices=False)
            rank = a.shape[0]
            # The signs of singular vectors are arbitrary: make the largest entry of A's rows
            # positive.
            largest = vt[:rank].abs().argmax(dim=1, keepdim=True)
            sign = torch.sign(vt[:rank].gather(1, largest))  # [k, 1], k = min(r, d_out, d_in)
            kept = len(sign)
            a[:kept] = (sign * vt[:rank]).float()
            b[:, :kept] = (u[:, :rank] * (s[:rank] / self.scale(a)) * sign.mT).float()
            b[:, kept:] = 0
            remainders[layer] = update - self.scale(a) * (b.double() @ a.double())
        return State(shared, base={} if self.config.truncate else self.fold(state, remainders))

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, missed: Sequence[Sequence[int]]
    ) -> int:
        """Count the components of the client's rank and, if it is sent, the dense remainder."""
        components = super().download_parameters(broadcast, layout, unsent, missed)
        return components + count_numbers(broadcast.base)
