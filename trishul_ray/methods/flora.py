"""FLoRA: stack the clients' factors and merge them into the frozen weight each round.

Wang et al.: "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", NeurIPS 2024, arXiv 2409.05976.

Stacking ``A_s = [p_1 A_1; ...; p_m A_m]`` and ``B_s = [B_1, ..., B_m]`` makes ``B_s A_s`` the sum
of ``p_c B_c A_c``, which is exact for any ranks. The stack is merged into W0, and clients start the
next round with fresh adapters (A random, B = 0). Resource-constrained clients train a lower rank
(``federation.compute``). The stack itself is sent down, so the downlink grows with the cohort, and
a client that missed rounds needs the stacks of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import LocalRun, Round, State, count_numbers
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@register("flora")
class FLoRA(FedIT):
    """Merge the mean product each round and start from fresh factors."""

    summary = "LoRA of any ranks, stacked and merged into the frozen weight each round (exact)"
    reference = "Wang et al., NeurIPS 2024, arXiv 2409.05976"
    communication = "r (d_in + d_out) per matrix up; the cohorts' stacks of missed rounds down"
    aggregates_mean_only = False
    takes_limits = True
    contribution = FedIT.with_products

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Draw A for this round, the same on every client, and set B = 0."""
        super().start(run, initial)
        for _, a, b in lora_pairs(run.layout.views(run.vector)):
            draw = torch.randn(a.shape, generator=run.common)
            a.copy_(draw / math.sqrt(3 * a.shape[1]))
            b.zero_()
        self.limit_rank(run)

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Merge the mean product, and keep only the classification head of the shared vector."""
        shared = mean.shared.clone()
        merged = {}
        for layer, a, b, update in self.mean_updates(mean, shared, layout):
            merged[layer] = update
            a.zero_()
            b.zero_()
        return State(shared, base=self.fold(state, merged))

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, missed: Sequence[Sequence[int]]
    ) -> int:
        """Count the classification head and the stacks of factors of the missed rounds.

        A stack has the ranks of the clients that sent it, regardless of this client's rank. The sum
        of all merged updates replaces the stacks if it is smaller.
        """
        head = broadcast.shared.numel() - self.factor_parameters(layout)
        stacks = sum(sent - head for uploads in missed for sent in uploads)
        return head + min(stacks, count_numbers(broadcast.base))
