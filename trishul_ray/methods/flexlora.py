"""FlexLoRA: full-size aggregation, redistributed by SVD to each client's rank.

Bai et al.: "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024, arXiv 2402.11505.

``G = sum_c p_c scale B_c A_c`` is formed at full size (exact) and decomposed, ``G = U S V^T``; a
client of rank r receives ``A = V[:, :r]^T`` and ``B = U[:, :r] S_r / scale``, the singular values
wholly in B. The global model is G truncated at the largest rank; with ``method.truncate=false``
the part beyond it stays in the frozen weight, so that nothing is lost between rounds (for tests of
exactness and for those who can send it). A component that no client of a round had the rank for is
forgotten, as published, but not dead: its column of B is zero, its row of A is not, so it trains.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.adapters import ProductMethod, folded, limit_rank
from trishul_ray.methods.base import LocalRun, MethodConfig, Round, State, register


class FlexLoRAConfig(MethodConfig):
    """FlexLoRA's hyper-parameters."""

    name: Literal["flexlora"] = "flexlora"
    truncate: bool = Field(True, description="drop what lies beyond the largest rank, as published")


@register("flexlora")
class FlexLoRA(ProductMethod):
    """Average the products, hand out their leading parts."""

    Config = FlexLoRAConfig
    summary = "LoRA of client-specific rank; products averaged at full size, SVD to each rank"
    reference = "Bai et al., NeurIPS 2024, arXiv 2402.11505"
    communication = "r_c (d_in + d_out) per matrix up and down"
    rates_like = "fedit"
    takes_limits = True

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """The leading r_c singular directions of the broadcast."""
        super().start(run, initial)
        run.notes["metrics"] = {"rank": float(limit_rank(run))}

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """SVD of the mean update; its leading part goes out as factors."""
        shared = mean["shared"].clone()
        beyond = {}
        for layer, a, b, update in self.mean_updates(mean, shared, layout):
            u, s, vt = torch.linalg.svd(update, full_matrices=False)
            rank = a.shape[0]
            # Signs of singular vectors are free: the largest entry of each row of A is positive.
            largest = vt[:rank].abs().argmax(dim=1, keepdim=True)
            sign = torch.sign(vt[:rank].gather(1, largest))  # [r, 1]
            a.copy_(sign * vt[:rank])
            b.copy_(u[:, :rank] * (s[:rank] / self.scale(a)) * sign.mT)
            beyond[layer] = update - self.scale(a) * (b.double() @ a.double())
        kept = {} if self.config.truncate else folded(state, beyond)
        return {"shared": shared, **kept}
