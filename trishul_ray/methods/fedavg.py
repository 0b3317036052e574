"""FedAvg: average locally trained adapters of any kind.

McMahan et al.: "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, arXiv 1602.05629. ``w <- sum_c p_c w_c`` over the cohort, with p_c equal or proportional to
the client's data (``federation.weighting``). On LoRA this is FedIT.
"""

from trishul_ray.methods.base import register
from trishul_ray.methods.base.adapters import AnyAdapter


@register("fedavg")
class FedAvg(AnyAdapter):
    """Average adapters of the kind ``method.adapter``."""

    summary = "the mean of locally trained adapters, of any kind"
    reference = "McMahan et al., AISTATS 2017, arXiv 1602.05629"
    communication = "the adapter's parameters up and down"
    rates_like = "fedit"
    aggregates_mean_only = True
