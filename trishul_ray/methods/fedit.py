"""FedIT: LoRA on every client, with both factors averaged separately.

Zhang et al.: "Towards Building the Federated GPT: Federated Instruction Tuning", ICASSP 2024, arXiv
2305.05644.

The layer computes ``y = W0 x + scale B A x`` with B = 0 and A random at the start. Clients train
both factors, and the server averages A and B separately. The mean of the products is not the
product of the means, so aggregation is inexact whenever clients differ. FedEx, FLoRA and FlexLoRA
correct this with the mean of the products, which this file computes for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import Method, register
from trishul_ray.methods.base.adapters import FIELDS_READ, attach_adapters, lora_pairs, lora_scale
from trishul_ray.methods.base.messages import LocalRun, State, TargetLayers, Tensors
from trishul_ray.runtime.proportions import exact_fraction

if TYPE_CHECKING:
    from torch import Tensor


@register("fedit")
class FedIT(Method):
    """Train and average both LoRA factors."""

    summary = "LoRA on every client; A and B averaged separately (inexact)"
    reference = "Zhang et al., ICASSP 2024, arXiv 2305.05644"
    communication = "r (d_in + d_out) per matrix up and down"
    aggregates_mean_only = True
    rates_like = "fedit"
    fields_read = FIELDS_READ["lora"]

    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Attach LoRA to every target."""
        return attach_adapters("lora", targets)

    def with_products(self, upload: State, layout: Layout) -> State:
        """Add the products [d_out, d_in] of the factors, in float64, to an upload.

        Subclasses whose server also averages the products set it as their :meth:`contribution`.
        """
        pairs = lora_pairs(self.named_tensors(layout, upload.shared))
        return replace(upload, base={layer: b.double() @ a.double() for layer, a, b in pairs})

    def mean_updates(
        self, mean: State, shared: Tensor, layout: Layout
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Iterate over the mean update of each layer.

        Args:
            mean: The mean of the results of :meth:`with_products`.
            shared: [W], the vector of which A and B are views.
            layout: Names of the trainables.

        Yields:
            Layer name, A, B and ``scale mean(B_c A_c)`` in float64.
        """
        for layer, a, b in lora_pairs(self.named_tensors(layout, shared)):
            yield layer, a, b, self.scale(a) * mean.base[layer]

    def fold(self, state: State, updates: Tensors) -> Tensors:
        """Add updates [d_out, d_in] to ``base`` of a state, and return the next ``base``."""
        new = {layer: update.float() for layer, update in updates.items()}
        return {k: state.base[k] + new[k] if k in state.base else new[k] for k in new}

    def limit_rank(self, run: LocalRun, at_most: int | None = None) -> int:
        """Zero the components beyond this client's rank, and return the rank.

        The rank is ``floor(capacity r)``, at least 1 and at most ``at_most``. The components beyond
        it stay zero, because the gradients of B's columns and A's rows are products with each
        other.
        """
        pairs = list(lora_pairs(run.layout.views(run.vector)))
        rank = max(1, math.floor(exact_fraction(pairs[0][1].shape[0], run.capacity)))
        rank = rank if at_most is None else min(rank, at_most)
        for _, a, b in pairs:
            run.unsent += a[rank:].numel() + b[:, rank:].numel()
            a[rank:].zero_()
            b[:, rank:].zero_()
        return rank

    def scale(self, factor_A: Tensor) -> float:
        """Return alpha / r of a pair, given its A [r, d_in]."""
        return lora_scale(self.lora_alpha, factor_A.shape[0])

    def factor_parameters(self, layout: Layout) -> int:
        """Return the number of entries of all factors A and B."""
        return sum(entry.numel for entry in layout.entries if entry.kind == "adapter")
