"""RAVAN: multi-head cores between frozen bases, averaged exactly.

Raje, Askin, Jhunjhunwala, Joshi: "RAVAN: Multi-Head Low-Rank Adaptation for Federated
Fine-Tuning", NeurIPS 2025, arXiv 2506.05568, Algorithm 1.

The layer computes ``y = W0 x + sum_i s_i B_i H_i A_i x`` with frozen B_i, A_i, the same on every
client; H_i = 0 and s_i = 1 at the start. A client trains (s_i, H_i), uploads s_i H_i, and the
server averages each head over the clients that trained it and resets s_i to 1. The number of heads
is the same on every layer. The paper's headline runs draw bases from an unnormalized Gaussian
whose scale it does not give; here the default is ``random_normal`` (one QR per head), and
``adapter.init`` selects the others (``rv_random_normal`` with ``adapter.sigma`` is the paper's).
"""

from typing import Literal

from trishul_ray.methods.heads import HeadsConfig, MultiHeadMethod
from trishul_ray.methods.registry import register


class RavanConfig(HeadsConfig):
    """RAVAN's hyper-parameters: those of every multi-head method."""

    name: Literal["ravan"] = "ravan"


@register("ravan")
class Ravan(MultiHeadMethod):
    """Uniform heads, plain local steps, head-wise mean of s·H."""

    Config = RavanConfig
    summary = "multi-head cores between frozen bases; exact head-wise averaging"
    reference = "Raje et al., NeurIPS 2025, arXiv 2506.05568"
    communication = "h r^2 per matrix up and down"
    rates_like = "ravan"
    default_init = "random_normal"
