"""FedIT: plain LoRA on every client, factors averaged separately.

Zhang et al.: "Towards Building the Federated GPT: Federated Instruction Tuning", ICASSP 2024,
arXiv 2305.05644.

The layer computes ``y = W0 x + B A x`` with B = 0 and A random at the start; clients train both,
and the server averages A and B each on its own. The mean of the products is not the product of the
means, so the aggregate is inexact whenever clients differ: the fault the other methods mend.
"""

from typing import Literal

from trishul_ray.methods.adapters import LoRAMethod
from trishul_ray.methods.base import MethodConfig, register


class FedITConfig(MethodConfig):
    """FedIT's hyper-parameters."""

    name: Literal["fedit"] = "fedit"


@register("fedit")
class FedIT(LoRAMethod):
    """FedAvg on the two LoRA factors."""

    Config = FedITConfig
    summary = "LoRA on every client; A and B averaged separately (inexact)"
    reference = "Zhang et al., ICASSP 2024, arXiv 2305.05644"
    communication = "r (d_in + d_out) per matrix up and down"
    rates_like = "fedit"
