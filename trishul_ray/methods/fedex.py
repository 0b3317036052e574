"""FedEx-LoRA: average the factors and fold the error of doing so into the frozen weight.

Singhal et al.: "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
Models", ACL 2025, arXiv 2410.09432.

After a round, ``A = mean A_c``, ``B = mean B_c`` and the residual is ``R = mean(B_c A_c) - B A``,
with the same weights in all three means. ``W0 <- W0 + scale R`` is permanent, and the next round
starts from A and B. The global model is therefore exactly the mean of the clients' models. R is
sent dense or, since its rank is at most (m + 1) r, as factors (``method.ship``). A client that
missed rounds needs the factors of all of them, or the dense sum if it is smaller.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.messages import Round, State, count_numbers
from trishul_ray.methods.fedit import FedIT


class FedExConfig(MethodConfig):
    """Hyper-parameters of FedEx-LoRA."""

    ship: Literal["dense", "factors"] = Field(
        "dense", description="form in which the downloaded residual is counted"
    )


@register("fedex")
class FedEx(FedIT):
    """FedIT with the aggregation error folded into the frozen weight."""

    Config = FedExConfig
    summary = "LoRA; A and B averaged, the residual folded into the frozen weight (exact)"
    reference = "Singhal et al., ACL 2025, arXiv 2410.09432"
    communication = "r (d_in + d_out) up; down also d_in d_out, or (m + 1) r (d_in + d_out)"
    aggregates_mean_only = False
    rates_like = "fedex"
    contribution = FedIT.with_products

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Fold ``scale (mean(B_c A_c) - B A)`` into the frozen weights."""
        residuals = {
            layer: update - self.scale(a) * (b.double() @ a.double())
            for layer, a, b, update in self.mean_updates(mean, mean.shared, layout)
        }
        return State(mean.shared, base=self.fold(state, residuals))

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, missed: Sequence[Sequence[int]]
    ) -> int:
        """Count the averaged factors and the residuals of the missed rounds."""
        factors = super().download_parameters(broadcast, layout, unsent, missed)
        dense = count_numbers(broadcast.base)
        if self.config.ship == "dense":
            return factors + dense
        pairs = sum(len(uploads) + 1 for uploads in missed)
        return factors + min(pairs * self.factor_parameters(layout), dense)
