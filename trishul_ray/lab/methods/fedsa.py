"""FedSA-LoRA: the server averages the factors A, and every client keeps its B.

Guo et al.: "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025, arXiv
2410.01463.

A client starts its first round with B = 0, and each later round with the B of its last round. The
classification head is shared. The global model has B = 0, so it is the backbone with the shared
head, and A has no effect. Compare the personalized models instead (``evaluation.per_client``).
"""

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.fedit import FedIT


@register("fedsa")
class FedSA(FedIT):
    """Train both factors, average A, and keep B on the client."""

    summary = "LoRA; A averaged, B stays with its client (personal models)"
    reference = "Guo et al., ICLR 2025, arXiv 2410.01463"
    communication = "r d_in per matrix up and down"
    personal = True

    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Return A and the classification head; each client keeps B."""
        return tuple(e.name for e in layout.entries if not e.name.endswith(".lora_B"))
