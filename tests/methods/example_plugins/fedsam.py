"""FedSAM: LoRA factors, trained with sharpness-aware minimization.

Qu et al.: "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022, arXiv
2206.02618. Each step uses the gradient at ``w + 0.05 g / ||g||``, where g is the gradient at w on
the same mini-batch.
"""

from trishul_ray.methods.base import register
from trishul_ray.methods.base.messages import LocalRun
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch


@register("fedsam")
class FedSAM(FedIT):
    """Train both factors with the gradient at the worst point nearby."""

    summary = "LoRA; A and B by sharpness-aware minimization"
    reference = "Qu et al., ICML 2022, arXiv 2206.02618"
    communication = "r (d_in + d_out) per matrix up and down"
    reads_rows = True

    def before_step(self, run: LocalRun) -> None:
        """Replace the gradient of this step by the gradient at the point in its direction."""
        here = run.vector.clone()
        with torch.no_grad():
            run.vector.add_(run.grad, alpha=0.05 / float(run.grad.norm().clamp(min=1e-12)))
        run.gradient(run.step)
        with torch.no_grad():
            run.vector.copy_(here)
