"""FedAvg: average what clients have trained locally, on any kind of adapter.

McMahan et al.: "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, arXiv 1602.05629. ``w <- sum_c p_c w_c`` over the cohort, with p_c equal or
proportional to the client's data (``federation.weighting``). On LoRA this is FedIT.
"""

from pydantic import Field

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.methods.adapters import FIELDS_READ, AdapterKind, attach_adapters
from trishul_ray.methods.base import Method, MethodConfig, Site, register


class FedAvgConfig(MethodConfig):
    """Hyper-parameters of FedAvg."""

    adapter: AdapterKind = Field("lora", description="what is trained: lora, ffa or multihead")


@register("fedavg")
class FedAvg(Method):
    """Average adapters of the kind that ``method.adapter`` names."""

    Config = FedAvgConfig
    summary = "the mean of locally trained adapters, of any kind"
    reference = "McMahan et al., AISTATS 2017, arXiv 1602.05629"
    communication = "the adapter's parameters up and down"
    rates_like = "fedit"
    mean_is_enough = True

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """Attach adapters of the configured kind."""
        return attach_adapters(self.config.adapter, site)

    @property
    def fields_read(self) -> frozenset[str]:
        """What adapters of the configured kind read."""
        return FIELDS_READ[self.config.adapter]
