"""Full fine-tuning: FedAvg on every weight of the backbone.

McMahan et al., AISTATS 2017, arXiv 1602.05629, applied to the whole pretrained model: the upper
reference of the paper's tables, at the cost of the whole model up and down each round.
"""

from typing import TYPE_CHECKING, Literal

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.methods.base import Method, MethodConfig, Site, register

if TYPE_CHECKING:
    from trishul_ray.config import AdapterConfig


class FullFTConfig(MethodConfig):
    """Full fine-tuning has no hyper-parameters of its own."""

    name: Literal["fullft"] = "fullft"


@register("fullft")
class FullFT(Method):
    """No adapter: all parameters are trained, sent and averaged."""

    Config = FullFTConfig
    summary = "FedAvg on all weights of the backbone"
    reference = "McMahan et al., AISTATS 2017, arXiv 1602.05629"
    communication = "all parameters up and down"
    rates_like = "fullft"
    train_all = True

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """None: the backbone's own weights are what is trained."""
        return {}

    def ignored_fields(self, adapter: "AdapterConfig") -> frozenset[str]:
        """Every field of adapters."""
        return frozenset({"budget", "adapter"})
