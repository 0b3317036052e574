"""FLoRA: stacked factors, merged into the frozen weight each round.

Wang et al.: "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", NeurIPS 2024, arXiv 2409.05976.

Stacking ``A_s = [p_1 A_1; ...; p_m A_m]`` and ``B_s = [B_1, ..., B_m]`` makes ``B_s A_s`` the sum
of ``p_c B_c A_c``: exact for any ranks. The stack is merged into W0, and clients begin the next
round with fresh adapters (A random, B = 0). Limited clients train a lower rank
(``federation.compute``).
The stack itself is what travels down, so the downlink grows with the cohort.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.adapters import ProductMethod, folded, limit_rank, lora_pairs
from trishul_ray.methods.base import BASE, LocalRun, MethodConfig, Round, State, register


class FLoRAConfig(MethodConfig):
    """FLoRA's hyper-parameters."""

    name: Literal["flora"] = "flora"


@register("flora")
class FLoRA(ProductMethod):
    """Stack, merge, begin anew."""

    Config = FLoRAConfig
    summary = "LoRA of any ranks, stacked and merged into the frozen weight each round (exact)"
    reference = "Wang et al., NeurIPS 2024, arXiv 2409.05976"
    communication = "r (d_in + d_out) per matrix up; the cohort's stack down"
    rates_like = "fedit"
    takes_limits = True

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """A fresh pair: A drawn for this round, the same on every client, and B = 0."""
        super().start(run, initial)
        for _, a, b in lora_pairs(run.layout.views(run.vector)):
            draw = torch.randn(a.shape, generator=run.common)
            a.copy_(draw / math.sqrt(3 * a.shape[1]))
            b.zero_()
        limit_rank(run)

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Merge the mean product; only the head is kept from the shared vector."""
        shared = mean["shared"].clone()
        merged = {}
        for layer, a, b, update in self.mean_updates(mean, shared, layout):
            merged[layer] = update
            a.zero_()
            b.zero_()
        return {"shared": shared, **folded(state, merged)}

    def download_parameters(self, broadcast: State, cohort: int, layout: Layout) -> int:
        """The head and, once something was merged, the cohort's stack (at full rank)."""
        count = super().download_parameters(broadcast, cohort, layout)
        pairs = lora_pairs(self.named(layout, broadcast["shared"]))
        thin = sum(a.numel() + b.numel() for _, a, b in pairs)
        merged = any(key.startswith(BASE) for key in broadcast)
        return count - thin + (cohort * thin if merged else 0)
