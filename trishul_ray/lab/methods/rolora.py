"""RoLoRA: clients train one LoRA factor in a round and the other in the next.

Chen et al.: "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", NeurIPS
2025, arXiv 2502.01755.

In odd rounds A is frozen and common and B is trained, sent and averaged; in even rounds the other
way round. Each product is then linear in the averaged factor, so aggregation is exact, and a client
sends half of what FedIT's sends. B comes first: while B is zero, A has no gradient.
"""

from typing import ClassVar

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.fedit import FedIT


@register("rolora")
class RoLoRA(FedIT):
    """Train and average B in odd rounds, A in even ones."""

    summary = "LoRA; B and A trained and averaged in turns (exact)"
    reference = "Chen et al., NeurIPS 2025, arXiv 2502.01755"
    communication = "r d_out or r d_in per matrix up in turns, both down"
    #: As the row's, on 2026-11-25, of 5e-4 to 5e-3.
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 1.0e-3}

    def round_wire(self, layout: Layout, round_number: int) -> tuple[str, ...]:
        """Return all but A in odd rounds, all but B in even ones."""
        resting = ".lora_A" if round_number % 2 else ".lora_B"
        return tuple(name for name in self.wire(layout) if not name.endswith(resting))
