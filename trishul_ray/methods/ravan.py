"""RAVAN: multi-head cores between frozen bases, averaged exactly.

Raje, Askin, Jhunjhunwala, Joshi: "RAVAN: Multi-Head Low-Rank Adaptation for Federated
Fine-Tuning", NeurIPS 2025, arXiv 2506.05568, Algorithm 1.

The layer computes ``y = W0 x + sum_i s_i B_i H_i A_i x`` with frozen B_i and A_i, the same on every
client; H_i = 0 and s_i = 1 at the start. A client trains (s_i, H_i) and uploads s_i H_i. The server
averages each core head over the clients that trained it and resets s_i to 1. Every layer has the
same number of core heads. The paper's headline runs draw bases from an unnormalized Gaussian whose
scale is not published; the default here is ``random_normal`` (one QR per core head).
``adapter.init`` selects others (``rv_random_normal`` with ``adapter.sigma`` is the paper's).

With ``method.private_heads`` a client keeps its last k core heads of each matrix: they are never
sent, and are no part of the global model. If bases are orthogonal, the shared and the private part
of an update are orthogonal matrices. Private heads are not in the paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.budget import check_heads_fit
from trishul_ray.adapters.layout import Layout
from trishul_ray.config import COMPUTE_LEVELS, in_id_if_set
from trishul_ray.lab.trishul.limited import (
    average_leading,
    leading_entries,
    leading_rank,
    level_of,
)
from trishul_ray.lazy import torch
from trishul_ray.methods.adapters import FIELDS_READ, core_rank
from trishul_ray.methods.base import (
    LocalRun,
    Method,
    MethodConfig,
    Round,
    Site,
    State,
    Tensors,
    exact_share,
    register,
)
from trishul_ray.spectral.bases import BasisInit, heads_that_fit

if TYPE_CHECKING:
    from torch import Tensor


class RavanConfig(MethodConfig):
    """Hyper-parameters of RAVAN."""

    scalars: Literal["trainable", "fixed"] = Field(
        "trainable", description="train the scalars s_i of core heads, or keep them at 1"
    )
    head_fraction: float = Field(
        1.0, gt=0, le=1, description="share of each layer's core heads that a client trains a round"
    )
    selection: Literal["random", "weight", "gradient"] = Field(
        "random",
        description="core heads a limited client trains, chosen each round: at random, those of "
        "largest norm, or those of largest gradient on one mini-batch; ties are broken at random",
    )
    limits: Literal["heads", "ranks"] = in_id_if_set(
        "heads",
        "what a limited client trains fewer of: heads, or ranks (the leading rows and columns of "
        "every core, where each entry is averaged over the clients that hold it)",
    )
    private_heads: int = in_id_if_set(
        0,
        "core heads of each matrix that stay with the client: trained in each of its rounds, never "
        "sent; a matrix with no more heads than that shares one. With adapter.heads, all stay",
        ge=0,
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.limits == "ranks":
            self.refuse_unread(("head_fraction", "selection"), "with limits='ranks'")
        return self


@register("ravan")
class Ravan(Method):
    """Train the same number of core heads on every layer and average s_i H_i head by head."""

    Config = RavanConfig
    summary = "multi-head cores between frozen bases; exact head-wise averaging"
    reference = "Raje et al., NeurIPS 2025, arXiv 2506.05568"
    communication = "h r^2 per matrix up and down"
    rates_like = "ravan"
    mean_is_enough = True
    fields_read = FIELDS_READ["multihead"] | {"overflow"}
    takes_limits = True
    #: Basis initialization if the experiment does not set ``adapter.init``.
    default_init: ClassVar[BasisInit] = "random_normal"
    #: Core heads of each matrix, beside those it has, that are not trained at first.
    spare_heads: int = 0

    def __init__(self, config: RavanConfig) -> None:
        super().__init__(config)
        self.personal = config.private_heads > 0
        self.takes_limits = not self.personal
        self.mean_is_enough &= config.limits == "heads"

    def heads_by_block(self, site: Site, caps: dict[str, int]) -> dict[str, int]:
        """Return the number of core heads on each adapted matrix, by transformer block.

        ``caps`` are the largest numbers with mutually orthogonal bases.
        """
        return dict.fromkeys(site.blocks(), site.adapter.heads)

    def ranks(self, site: Site) -> dict[str, int]:
        """Return the rank of each core head of a layer, by layer name: that of the budget."""
        return {layer.name: core_rank(layer, site) for layer in site.layers}

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """Attach cores of the budget's rank, as many as :meth:`heads_by_block` returns."""
        from trishul_ray.adapters.multihead import MultiHead  # imports torch

        options = site.adapter
        init = options.init or self.default_init
        ranks = self.ranks(site)
        if init == "gram_schmidt" and options.overflow != "independent":
            for layer in site.layers:
                check_heads_fit(
                    layer, options.heads, ranks[layer.name], site.lora_rank, options.matching
                )
        caps = {
            block: min(heads_that_fit(ranks[m.name], m.d_out, m.d_in) for m in members)
            for block, members in site.blocks().items()
        }
        heads, wanted = self.heads_by_block(site, caps), self.config.private_heads
        everything = wanted == options.heads
        private = {b: n if everything else max(0, min(wanted, n - 1)) for b, n in heads.items()}
        return {
            layer.name: MultiHead(
                heads=heads[layer.block] + self.spare_heads * (heads[layer.block] > 0),
                rank=ranks[layer.name],
                init=init,
                sigma=options.sigma,
                # With "cap" the allocation is already limited to the width.
                overflow="error" if options.overflow == "cap" else "independent",
                train_scale=self.config.scalars == "trainable",
                private=private[layer.block],
                spare=self.spare_heads * (heads[layer.block] > 0),
            )
            for layer in site.layers
        }

    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Return the cores and the classification head; the server resets scalars to 1."""
        return tuple(e.name for e in layout.entries if e.kind in ("core", "classifier"))

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Take the cores of the broadcast and the client's own; choose this round's core heads."""
        super().start(run, initial)
        if not run.training or min(self.config.head_fraction, run.capacity) == 1.0:
            return
        if self.config.limits == "heads":
            run.active = self._choose(run)
            return
        units = list(run.layout.units(self.wire(run.layout)))
        if run.active is None:  # all units, but not all of each
            run.active = torch.ones(len(units), dtype=torch.bool)
        run.entries = leading_entries(run.layout, run.vector, run.capacity)
        run.unsent = sum(
            unit.rank**2 - leading_rank(unit.rank, run.capacity) ** 2
            for unit, active in zip(units, run.active.tolist(), strict=True)
            if active and unit.rank is not None
        )

    def _choose(self, run: LocalRun) -> Tensor:
        """Return [U] bool: on each layer the ``ceil(share h)`` core heads of the largest score.

        Only heads that are active already can be chosen. The client's random stream breaks ties (in
        round 1 all cores are zero). Otherwise the first core heads would be trained in round 1,
        have the largest norms afterwards, and be the only ones ever trained.
        """
        selection, wire = self.config.selection, self.wire(run.layout)
        if selection == "gradient":
            run.gradient(1)
        scores: dict[str, Tensor] = {}  # [h] by layer
        if selection != "random":
            views = run.layout.views(run.grad if selection == "gradient" else run.vector)
            cores = [name for name in wire if run.layout.entry(name).kind == "core"]
            norms = [views[name].flatten(1).norm(dim=1) for name in cores]
            # All at once: each copy to the host waits for the device.
            on_host = torch.cat(norms).cpu().split([len(norm) for norm in norms])
            scores = dict(zip(cores, on_host, strict=True))
        flags: list[Tensor] = []
        first = 0
        for name, group in groupby(run.layout.units(wire), lambda u: u.tensor):
            units = list(group)
            heads = len(units)
            offered = torch.ones(heads, dtype=torch.bool)
            if run.active is not None:
                offered = run.active[first : first + heads]
            first += heads
            if units[0].kind != "core":
                flags.append(offered)
                continue
            if selection == "random":
                score = torch.rand(heads, generator=run.generator)
                order = score.argsort(descending=True, stable=True)
            else:
                score = scores[name]
                shuffled = torch.randperm(heads, generator=run.generator)
                order = shuffled[score[shuffled].argsort(descending=True, stable=True)]
            order = order[offered[order]]
            count = self._trained_heads(len(order), run.capacity)
            chosen = torch.zeros(heads, dtype=torch.bool)
            chosen[order[:count]] = True
            flags.append(chosen)
        return torch.cat(flags)

    def _trained_heads(self, heads: int, capacity: float) -> int:
        """Return how many of a layer's core heads a client trains in a round."""
        return math.ceil(exact_share(heads, self.config.head_fraction, capacity))

    def unit_shares(self, layout: Layout, capacities: Sequence[float]) -> np.ndarray:
        """Return the mean share of heads that clients choose at random on each layer."""
        counts, shares = Counter(capacities), []
        for unit in layout.units(self.wire(layout)):
            heads = layout.entry(unit.tensor).shape[0] if unit.kind == "core" else 1
            trained = sum(n * self._trained_heads(heads, c) for c, n in sorted(counts.items()))
            shares.append(trained / (heads * len(capacities)))
        return np.array(shares)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the products s_i H_i (eq. uploaded_core) and the classification head."""
        vector = run.vector.clone()
        views = run.layout.views(vector)
        for entry in run.layout.entries:
            if entry.kind == "scale":
                core = views[entry.name.removesuffix("scale") + "core"]  # [h, r, r]
                core *= views[entry.name][:, None, None]
        kept = {e.name: views[e.name].clone() for e in run.layout.entries if e.kind == "adapter"}
        extra = {"level": level_of(run.capacity)} if self.config.limits == "ranks" else {}
        return State(self.pack(run.layout, vector), extra), kept

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Return those of the cores and, where ranks are limited, of the client's level."""
        lengths = super().upload_lengths(layout)
        if self.config.limits == "ranks":
            lengths["level"] = len(COMPUTE_LEVELS)
        return lengths

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the mean, of each entry of a core over the clients that hold it."""
        if self.config.limits == "ranks":
            shared = mean.shared.clone()
            new, old = (self.named_tensors(layout, each) for each in (shared, state.shared))
            average_leading(new, old, mean.extra["level"], layout)
            mean = replace(mean, shared=shared, extra={})
        return mean

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, uploads: Sequence[int]
    ) -> int:
        """Count all cores: what a client of limited ranks does not hold is in its model."""
        unsent = 0 if self.config.limits == "ranks" else unsent
        return super().download_parameters(broadcast, layout, unsent, uploads)
