"""Full fine-tuning: FedAvg on every weight of the backbone.

McMahan et al., AISTATS 2017, arXiv 1602.05629, applied to the whole pretrained model: the upper
reference of the paper's tables. The whole model is sent up and down each round.
"""

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.methods.base import Method, register
from trishul_ray.methods.base.messages import TargetLayers


@register("fullft")
class FullFT(Method):
    """Train, send and average all parameters, without adapters."""

    summary = "FedAvg on all weights of the backbone"
    reference = "McMahan et al., AISTATS 2017, arXiv 1602.05629"
    communication = "all parameters up and down"
    aggregates_mean_only = True
    rates_like = "fullft"
    train_all = True
    fields_read: frozenset[str] = frozenset()

    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Attach no adapters."""
        return {}
