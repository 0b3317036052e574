"""RoLoRA: clients train one LoRA factor in a round, and the other factor in the next round.

Chen et al.: "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", NeurIPS
2025, arXiv 2502.01755.

In odd rounds, A is frozen and the same on all clients, and B is trained, sent and averaged. In even
rounds, A and B swap roles. Each product is linear in the averaged factor, so aggregation is exact,
and a client sends half as many numbers as in FedIT. B comes first, because A has no gradient while
B is zero.
"""

from typing import ClassVar

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.fedit import FedIT


@register("rolora")
class RoLoRA(FedIT):
    """Train and average B in odd rounds, and A in even rounds."""

    summary = "LoRA; B and A trained and averaged alternately (exact)"
    reference = "Chen et al., NeurIPS 2025, arXiv 2502.01755"
    communication = "r d_out or r d_in per matrix up, alternately; both down"
    #: Tuned like the other rates of the row, over 5e-4 to 5e-3 (2026-11-25).
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 1.0e-3}

    def round_wire(self, layout: Layout, round_number: int) -> tuple[str, ...]:
        """Return all names except the names of A in odd rounds, and of B in even rounds."""
        resting = ".lora_A" if round_number % 2 else ".lora_B"
        return tuple(name for name in self.wire(layout) if not name.endswith(resting))
