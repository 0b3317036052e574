"""FFA-LoRA: LoRA with A frozen, so that averaging B is exact.

Sun et al.: "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, arXiv 2403.12313.

A is drawn once, the same on every client, and never trained. B starts at zero; only B is trained,
sent and averaged. With a common A, the mean of the products is the product of the means. At equal
rank this is half the parameters of LoRA on a square matrix, hence twice the rank at equal budget
(``floor(N / d_out)``).
"""

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.methods.base import Method, register
from trishul_ray.methods.base.adapters import FIELDS_READ, attach_adapters
from trishul_ray.methods.base.messages import TargetLayers


@register("ffalora")
class FFALoRA(Method):
    """Train and average only B."""

    summary = "LoRA with a common frozen A; B averaged (exact)"
    reference = "Sun et al., ICLR 2024, arXiv 2403.12313"
    communication = "r d_out per matrix up and down"
    aggregates_mean_only = True
    rates_like = "ffalora"
    fields_read = FIELDS_READ["ffa"]

    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Attach LoRA with A frozen to every target."""
        return attach_adapters("ffa", targets)
