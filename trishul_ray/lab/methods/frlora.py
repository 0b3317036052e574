"""FRLoRA: train a weight's principal components, and fold their change into the weight each round.

Yan et al.: "Federated Residual Low-Rank Adaptation of Large Language Models", ICLR 2025.

It starts like FeDeRA, at A0, B0 and ``W' = W - s B0 A0``. In every round, all clients start from A0
and B0, and the server adds ``s (B A - B0 A0)`` to W' permanently, so that the global update can
have any rank. B and A are the averaged factors, which is inexact; with ``method.exact``, the mean
of the products replaces ``B A``. The classification head is averaged as in FedIT. Clients receive
the averaged factors, or with ``method.exact`` the factors of the whole cohort.

The paper's rank and alpha are 16 and 32 (``adapter.rank``, ``adapter.alpha``). The diagnostic
``aggregation_error`` is relative to products that include the principal components.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from trishul_ray.adapters.layout import Layout
from trishul_ray.lab.methods.federa import FeDeRA
from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import Round, State, count_numbers


class FRLoRAConfig(MethodConfig):
    """Hyper-parameters of FRLoRA."""

    exact: bool = Field(
        False, description="fold the mean of the products instead of the product of the means"
    )


@register("frlora")
class FRLoRA(FeDeRA):
    """Fold the change of the principal components into the frozen weight each round."""

    Config = FRLoRAConfig
    summary = "LoRA on the weight's principal components; their change folded into it each round"
    reference = "Yan et al., ICLR 2025"
    communication = "r (d_in + d_out) per matrix up, and down for each missed round"
    aggregates_mean_only = False
    #: Tuned like the other rates of the row, over 1e-3 to 5e-3 (2026-11-25).
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 2.0e-3}

    def contribution(self, upload: State, layout: Layout) -> State:
        """Add the products of the factors to an upload if the mean is exact."""
        return self.with_products(upload, layout) if self.config.exact else upload

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Fold the change of the product into ``base``, and reset the factors to A0 and B0."""
        shared, moved = mean.shared.clone(), {}
        old = self.named_tensors(layout, state.shared)
        for layer, a, b in lora_pairs(self.named_tensors(layout, shared)):
            start_A, start_B = old[f"{layer}.lora_A"], old[f"{layer}.lora_B"]
            new = self.scale(a) * mean.base[layer] if self.config.exact else self.product(a, b)
            moved[layer] = new - self.product(start_A, start_B)
            a.copy_(start_A)
            b.copy_(start_B)
        return State(shared, base=self.fold(state, moved))

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, missed: Sequence[Sequence[int]]
    ) -> int:
        """Count the head and, for each missed round, the averaged factors, or all if exact.

        The sum of all changes replaces the factors if it is smaller.
        """
        pair = self.factor_parameters(layout)
        head = broadcast.shared.numel() - pair
        if self.config.exact:
            factors = sum(sent - head for uploads in missed for sent in uploads)
        else:
            factors = len(missed) * pair
        return head + min(factors, count_numbers(broadcast.base))

    def setup_parameters(self, broadcast: State, layout: Layout) -> int:
        """Add A0 and B0, which the simulation sends in every round and clients would store."""
        return super().setup_parameters(broadcast, layout) + self.factor_parameters(layout)
