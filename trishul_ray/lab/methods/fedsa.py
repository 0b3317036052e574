"""FedSA-LoRA: the factors A are shared and averaged, every client keeps its B.

Guo et al.: "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025,
arXiv 2410.01463.

A client starts its first round with B = 0, and each later one with the B from the end of its last.
The classification head is shared. The global model has B = 0: it is the backbone with the shared
head, and A has no effect in it. The method is meant for personalized models
(``evaluation.per_client``).
"""

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.fedit import FedIT


@register("fedsa")
class FedSA(FedIT):
    """Train both factors, average A, keep B."""

    summary = "LoRA; A averaged, B stays with its client (personal models)"
    reference = "Guo et al., ICLR 2025, arXiv 2410.01463"
    communication = "r d_in per matrix up and down"
    personal = True

    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Return A and the classification head; each client keeps B."""
        return tuple(e.name for e in layout.entries if not e.name.endswith(".lora_B"))
