"""LoRA-FAIR: average the factors, then correct B so that the product is near the mean product.

Bian et al.: "LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement",
ICCV 2025, arXiv 2411.14961.

With ``A = mean A_c`` and ``B = mean B_c``, the server adds to B the D that minimizes
``S(mean(B_c A_c), (B + D) A) + lam ||D||`` (eq. 8, lam = 0.01), and clients start the next round
from A and B + D. A positive lam keeps B + D near the averaged factors. The paper uses the cosine
similarity as S, and solves the problem by SGD with a step size and a number of steps. Here, S is
the squared Frobenius distance and the norm is squared, so that the minimum has a closed form:

``D = (mean(B_c A_c) - B A) A^T (A A^T + lam I)^-1``.

For lam near 0, this product also has the largest cosine similarity among all products with A.
Uploads, downloads and frozen weights are as in FedIT.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import Round, State
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch


class LoRAFairConfig(MethodConfig):
    """Hyper-parameters of LoRA-FAIR."""

    lam: float = Field(0.01, gt=0, description="λ: weight of the correction's norm")
    correct: bool = Field(True, description="correct B; false is FedIT")


@register("lorafair")
class LoRAFair(FedIT):
    """FedIT with a correction of the averaged B."""

    Config = LoRAFairConfig
    summary = "LoRA; A and B averaged, B corrected toward the mean product (nearly exact)"
    reference = "Bian et al., ICCV 2025, arXiv 2411.14961"
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 2.0e-3}
    aggregates_mean_only = False  # reads the mean of the products
    contribution = FedIT.with_products

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Add the correction D to the mean B."""
        shared = mean.shared.clone()
        if self.config.correct:
            for layer, a, b in lora_pairs(self.named_tensors(layout, shared)):
                right = a.double()
                error = mean.base[layer] - b.double() @ right  # [d_out, d_in]
                gram = right @ right.mT + self.config.lam * torch.eye(len(right), dtype=right.dtype)
                b += torch.linalg.solve(gram, error @ right.mT, left=False).float()
        return State(shared)
