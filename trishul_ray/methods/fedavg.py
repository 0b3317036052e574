"""FedAvg: local steps, then the mean of what was trained, on any adapter.

McMahan et al.: "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, arXiv 1602.05629. ``w <- sum_c p_c w_c`` over the cohort, p_c equal or by data size
(``federation.weighting``). On LoRA this is FedIT.
"""

from typing import Literal

from trishul_ray.methods.adapters import AnyAdapterConfig, AnyAdapterMethod
from trishul_ray.methods.base import register


class FedAvgConfig(AnyAdapterConfig):
    """FedAvg's hyper-parameters."""

    name: Literal["fedavg"] = "fedavg"


@register("fedavg")
class FedAvg(AnyAdapterMethod):
    """The plain mean."""

    Config = FedAvgConfig
    summary = "the mean of locally trained adapters, of any kind"
    reference = "McMahan et al., AISTATS 2017, arXiv 1602.05629"
    communication = "the adapter's parameters up and down"
    rates_like = "fedit"
