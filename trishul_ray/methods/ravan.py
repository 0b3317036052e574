"""RAVAN: multi-head cores between frozen bases, averaged exactly.

Raje, Askin, Jhunjhunwala, Joshi: "RAVAN: Multi-Head Low-Rank Adaptation for Federated Fine-Tuning",
NeurIPS 2025, arXiv 2506.05568, Algorithm 1.

The layer computes ``y = W0 x + sum_i s_i B_i H_i A_i x`` with frozen B_i and A_i, the same on every
client; H_i = 0 and s_i = 1 at the start. A client trains (s_i, H_i) and uploads s_i H_i. The server
averages each core head over the clients that trained it and resets s_i to 1. Every layer has the
same number of core heads. The paper's main experiments draw bases from an unnormalized Gaussian
with an unpublished scale; the default here is ``random_normal`` (one QR per core head).
``adapter.init`` selects other initializations (the paper's is ``rv_random_normal`` with
``adapter.sigma``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.budget import check_heads_fit
from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import Method, MethodConfig, register
from trishul_ray.methods.base.adapters import FIELDS_READ, core_rank
from trishul_ray.methods.base.messages import LocalRun, State, TargetLayers, Tensors
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.proportions import exact_fraction
from trishul_ray.spectral.bases import BasisInit, heads_that_fit

if TYPE_CHECKING:
    from torch import Tensor


class RavanConfig(MethodConfig):
    """Hyper-parameters of RAVAN."""

    scalars: Literal["trainable", "fixed"] = Field(
        "trainable", description="train the scalars s_i of core heads, or fix them at 1"
    )
    head_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="fraction of each layer's core heads that a client trains per round",
    )
    selection: Literal["random", "weight", "gradient"] = Field(
        "random",
        description="core heads that a constrained client trains in a round: random, of largest "
        "norm, or of largest gradient on one mini-batch; ties are broken at random",
    )


@register("ravan")
class Ravan(Method):
    """Train the same number of core heads on every layer, and average s_i H_i per head."""

    Config = RavanConfig
    summary = "multi-head cores between frozen bases; exact head-wise averaging"
    reference = "Raje et al., NeurIPS 2025, arXiv 2506.05568"
    communication = "h r^2 per matrix up and down"
    rates_like = "ravan"
    aggregates_mean_only = True
    fields_read = FIELDS_READ["multihead"] | {"overflow"}
    takes_limits = True
    #: Initialization of the bases if the experiment does not set ``adapter.init``.
    default_init: ClassVar[BasisInit] = "random_normal"

    @property
    def units_by_data(self) -> str:
        """The selection, if clients select core heads by their data."""
        selection = self.config.selection
        return "" if selection == "random" else f"method.selection={selection!r}"

    def heads_by_block(self, targets: TargetLayers, caps: dict[str, int]) -> dict[str, int]:
        """Return the number of core heads on each adapted matrix, keyed by transformer block.

        ``caps`` are the maximum numbers with mutually orthogonal bases.
        """
        return dict.fromkeys(targets.blocks(), targets.adapter.heads)

    def ranks(self, targets: TargetLayers) -> dict[str, int]:
        """Return the rank of each core head of a layer, from the budget, keyed by layer name."""
        return {layer.name: core_rank(layer, targets) for layer in targets.layers}

    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Attach :meth:`heads_by_block` cores of the budget's rank to each layer."""
        options, ranks = targets.adapter, self.ranks(targets)
        if self.init(targets) == "gram_schmidt" and options.overflow != "independent":
            for layer in targets.layers:
                check_heads_fit(layer, options.heads, ranks[layer.name])
        caps = {
            block: min(heads_that_fit(ranks[m.name], m.d_out, m.d_in) for m in members)
            for block, members in targets.blocks().items()
        }
        heads = self.heads_by_block(targets, caps)
        return {
            m.name: self.cores(targets, m, heads[m.block], ranks[m.name]) for m in targets.layers
        }

    def init(self, targets: TargetLayers) -> BasisInit:
        """Return the initialization of the bases."""
        return targets.adapter.init or self.default_init

    def cores(self, targets: TargetLayers, layer: LayerSpec, heads: int, rank: int) -> LayerAdapter:
        """Create the adapter of one layer."""
        from trishul_ray.adapters.multihead import MultiHead  # imports torch

        return MultiHead(
            heads,
            rank,
            self.init(targets),
            targets.adapter.sigma,
            # With "cap", the allocation is already limited to the width.
            "error" if targets.adapter.overflow == "cap" else "independent",
            train_scale=self.config.scalars == "trainable",
        )

    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Return the cores and the classification head; the server resets scalars to 1."""
        return tuple(e.name for e in layout.entries if e.kind in ("core", "classifier"))

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Load the cores of the broadcast, and select the cores to train in this round."""
        super().start(run, initial)
        if run.training and min(self.config.head_fraction, run.capacity) < 1.0:
            run.active = self.choose(run)

    def choose(self, run: LocalRun) -> Tensor:
        """Select on each layer the ``ceil(fraction h)`` core heads of the largest score, [U] bool.

        Only heads that are already active can be selected. The client's random stream breaks ties,
        because all cores are zero in round 1. Otherwise the first core heads would be trained in
        round 1, have the largest norms afterwards, and be the only ones ever trained.
        """
        selection, wire = self.config.selection, self.wire(run.layout)
        if selection == "gradient":
            run.gradient(1)
        scores: dict[str, Tensor] = {}  # [h], keyed by layer
        if selection != "random":
            views = run.layout.views(run.grad if selection == "gradient" else run.vector)
            cores = [name for name in wire if run.layout.entry(name).kind == "core"]
            norms = [views[name].flatten(1).norm(dim=1) for name in cores]
            # Concatenate them: each copy to the host waits for the device.
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
        """Return the number of a layer's core heads that a client trains in a round."""
        return math.ceil(exact_fraction(heads, self.config.head_fraction, capacity))

    def unit_shares(self, layout: Layout, capacities: Sequence[float]) -> np.ndarray:
        """Return the mean fraction of heads that clients select at random on each layer."""
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
        return State(self.pack(run.layout, vector)), {}
