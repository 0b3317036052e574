"""Fed-PLoRA: resource-constrained clients train some of the rank-one parts of LoRA.

Zhang, Hu and Xu: "Heterogeneous Federated Fine-Tuning with Parallel One-Rank Adaptation", ICLR
2026, arXiv 2602.16936.

``B A = sum_j b_j a_j``, with b_j a column of B and a_j a row of A. In each round, a client of rank
r_c selects r_c of the r parts at random and trains them; the selection, the same on all layers, is
our choice. The other parts stay in its model as frozen weights, so the client starts from the
global model. The server averages each part over the clients that trained it, A and B separately; a
part that no client trained keeps its value. At full capacity this is FedIT. The server sends A and
B completely; a client sends the parts that it trained, and their positions.

Ranks follow ``federation.compute``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import LocalRun, Round, State, Tensors
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.proportions import exact_fraction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Parts:
    """The rank-one parts that a client trains, [r] bool."""

    trained: Tensor


@register("fedplora")
class FedPLoRA(FedIT):
    """Train, send and average rank-one parts of LoRA."""

    summary = "LoRA in rank-one parts; each averaged over the clients that trained it (inexact)"
    reference = "Zhang et al., ICLR 2026, arXiv 2602.16936"
    communication = "r_c (d_in + d_out) per matrix up, r (d_in + d_out) down"
    aggregates_mean_only = False  # divides parts by the fraction that trained them
    takes_limits = True

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Load the broadcast, and select the parts to train."""
        super().start(run, initial)
        if not run.training:
            return
        rank = self.parts(run.layout)
        count = max(1, math.floor(exact_fraction(rank, run.capacity)))
        run.metrics["rank"] = float(count)
        parts = torch.ones(rank, dtype=torch.bool)
        run.set_state(Parts(parts))
        if count < rank:
            parts[torch.randperm(rank, generator=run.generator)[count:]] = False
            every = torch.ones_like(run.vector)
            for _, a, b in lora_pairs(run.layout.views(every)):
                a[~parts] = 0
                b[:, ~parts] = 0
            run.entries = every > 0
            run.unsent = int((~run.entries).sum())

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the factors, and a mask of the trained parts."""
        trained = {"trained": run.state_of(Parts).trained.float()}
        return State(self.pack(run.layout, run.vector), trained), {}

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Return the lengths of the factors and of the mask."""
        return super().upload_lengths(layout) | {"trained": self.parts(layout)}

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Divide the mean change of each part by the fraction of clients that trained it."""
        share = mean.extra["trained"]  # [r], fraction of the weights
        shared, old = mean.shared.clone(), self.named_tensors(layout, state.shared)
        for layer, a, b in lora_pairs(self.named_tensors(layout, shared)):
            a.copy_(over_holders(a, old[f"{layer}.lora_A"], share[:, None]))
            b.copy_(over_holders(b, old[f"{layer}.lora_B"], share))
        return State(shared)

    def parts(self, layout: Layout) -> int:
        """Return r, the number of parts."""
        return next(e.shape[0] for e in layout.entries if e.name.endswith(".lora_A"))

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, missed: Sequence[Sequence[int]]
    ) -> int:
        """Count both factors completely: frozen parts are also in a client's model."""
        return super().download_parameters(broadcast, layout, 0, missed)


def over_holders(mean: Tensor, old: Tensor, share: Tensor) -> Tensor:
    """Compute the mean over the clients that trained an entry from the mean over all clients.

    Args:
        mean: The mean over all clients; clients that did not train an entry sent the old value.
        old: The broadcast value.
        share: The fraction of clients that trained an entry, of a shape that broadcasts to the
            others. Entries with fraction 0 do not change.
    """
    moved = torch.where(share > 0, old + (mean - old) / share, old)
    return torch.where(share == 1, mean, moved)
