"""FedMedian: LoRA factors, aggregated by the coordinate-wise median.

Yin et al.: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
arXiv 1803.01498. With an even number of uploads, the median is the mean of the middle two. It has
no weights, so ``federation.weighting`` is not read.
"""

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.base.messages import Round, State
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch


@register("fedmedian")
class FedMedian(FedIT):
    """Train both factors; aggregate by the median of the uploads."""

    summary = "LoRA; A and B aggregated by the median of each coordinate (robust)"
    reference = "Yin et al., ICML 2018, arXiv 1803.01498"
    communication = "r (d_in + d_out) per matrix up and down"
    needs_uploads = True

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        ordered = torch.stack([u.arrays.shared for u in round_.uploads]).sort(dim=0).values
        count = len(ordered)
        return State((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
