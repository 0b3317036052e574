"""FeDeRA: LoRA that starts from the singular value decomposition of the frozen weight.

Yan et al.: "FeDeRA: Efficient Fine-tuning of Language Models in Federated Learning Leveraging
Weight Decomposition", arXiv 2404.18848.

With ``W = U S V^T`` and scale s, ``B0 = U_r sqrt(S_r / s)`` and ``A0 = sqrt(S_r / s) V_r^T``. The
frozen weight is ``W' = W - s B0 A0``, so the first model is the pretrained model. Clients then
train A and B, and the server averages them separately, as in FedIT. Every client decomposes its
copy of the weights, so FeDeRA sends no more than FedIT.

The diagnostic ``aggregation_error`` is relative to products that include the principal components.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.base.adapters import attach_adapters, lora_pairs
from trishul_ray.methods.base.messages import Round, State, TargetLayers, Tensors
from trishul_ray.methods.fedit import FedIT

if TYPE_CHECKING:
    from torch import Tensor


@register("federa")
class FeDeRA(FedIT):
    """FedIT that starts from the principal components, after their removal from the weight."""

    summary = "LoRA on the weight's principal components; A and B averaged (inexact)"
    reference = "Yan et al., 2024, arXiv 2404.18848"
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 1.0e-3}

    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Attach LoRA, initialized from the principal components, to every target."""
        return attach_adapters("lora", targets, principal=True)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute ``s B A`` [d_out, d_in] of a pair of factors, in float64."""
        return self.scale(a) * (b.double() @ a.double())

    def initial_state(self, layout: Layout, initial: Tensor, survey: Tensors) -> State:
        """Add ``-s B0 A0`` to the frozen weights, so that the model is the pretrained model."""
        start = super().initial_state(layout, initial, survey)
        pairs = lora_pairs(self.named_tensors(layout, start.shared))
        taken = {layer: -self.product(a, b) for layer, a, b in pairs}
        return State(start.shared, base=self.fold(start, taken))

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the mean of the factors, and keep the frozen weights."""
        return replace(mean, base=state.base)
