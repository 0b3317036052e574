"""FFA-LoRA: LoRA with A frozen.

Sun et al.: "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, arXiv 2403.12313.

A is drawn once, the same on every client, and never trained; B starts at zero and alone is
trained, sent and averaged. With a common A the mean of the products is the product of the means, so
aggregation is exact. Half the parameters of LoRA at equal rank on a square matrix, hence twice the
rank at equal budget (``floor(N / d_out)``).
"""

from typing import TYPE_CHECKING, Literal

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.methods.adapters import ffa, ignored_by
from trishul_ray.methods.base import Method, MethodConfig, Site, register

if TYPE_CHECKING:
    from trishul_ray.config import AdapterConfig


class FFALoRAConfig(MethodConfig):
    """FFA-LoRA's hyper-parameters."""

    name: Literal["ffalora"] = "ffalora"


@register("ffalora")
class FFALoRA(Method):
    """FedAvg on B alone."""

    Config = FFALoRAConfig
    summary = "LoRA with a common frozen A; B averaged (exact)"
    reference = "Sun et al., ICLR 2024, arXiv 2403.12313"
    communication = "r d_out per matrix up and down"
    rates_like = "ffalora"

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """LoRA with A frozen on every target."""
        return ffa(site)

    def ignored_fields(self, adapter: "AdapterConfig") -> frozenset[str]:
        """What LoRA with A frozen does not read."""
        return ignored_by("ffa", adapter)
