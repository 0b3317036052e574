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

import math
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.budget import check_heads_fit
from trishul_ray.adapters.layout import Layout
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.methods.adapters import exact_share, head_rank, rank_fields
from trishul_ray.methods.base import LocalRun, Method, MethodConfig, Site, State, register
from trishul_ray.spectral.bases import BasisInit, heads_that_fit

if TYPE_CHECKING:
    from trishul_ray.config import AdapterConfig


class HeadsConfig(MethodConfig):
    """Hyper-parameters that every multi-head method has."""

    scalars: Literal["trainable", "fixed"] = Field(
        "trainable", description="train the head scalars s_i, or keep them at 1"
    )
    head_fraction: float = Field(
        1.0, gt=0, le=1, description="share of each layer's heads a client trains in a round"
    )
    selection: Literal["random", "weight", "gradient"] = Field(
        "random",
        description="which heads a limited client trains, chosen anew each round: drawn, those of "
        "largest norm, or those of largest gradient on one mini-batch; ties are drawn",
    )


class MultiHeadMethod(Method):
    """Heads on every target layer. Subclasses say how many heads and how a step ends."""

    takes_limits = True
    #: Basis initialization where the experiment leaves ``adapter.init`` open.
    default_init: BasisInit

    def heads_by_block(self, site: Site, caps: dict[str, int]) -> dict[str, int]:
        """Heads on each adapted matrix of a block; ``caps`` is what fits orthogonally."""
        return dict.fromkeys(site.blocks(), site.adapter.heads)

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """Multi-head cores of the budget's rank; see ``heads_by_block`` for their number."""
        options = site.adapter
        init = options.init or self.default_init
        ranks = {layer.name: head_rank(layer, site) for layer in site.layers}
        orthogonal = init == "gram_schmidt"
        if orthogonal and options.overflow != "independent":
            for layer in site.layers:
                check_heads_fit(
                    layer, options.heads, ranks[layer.name], site.lora_rank, options.matching
                )
        caps = {
            block: min(heads_that_fit(ranks[m.name], m.d_out, m.d_in) for m in members)
            for block, members in site.blocks().items()
        }
        heads = self.heads_by_block(site, caps)
        return {
            layer.name: MultiHead(
                heads=heads[layer.block],
                rank=ranks[layer.name],
                init=init,
                sigma=options.sigma,
                # "cap" has already kept the allocation inside the width.
                overflow="error" if options.overflow == "cap" else "independent",
                train_scale=self.config.scalars == "trainable",
            )
            for layer in site.layers
        }

    def ignored_fields(self, adapter: "AdapterConfig") -> frozenset[str]:
        """LoRA's alpha."""
        return rank_fields(adapter) | {"adapter.alpha"}

    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Cores and the classification head; scalars never travel (the server resets them)."""
        return tuple(e.name for e in layout.entries if not e.name.endswith(".scale"))

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Cores from the broadcast, scalars at 1, and this round's active heads."""
        super().start(run, initial)
        if run.training and min(self.config.head_fraction, run.capacity) < 1.0:
            run.active = self._choose(run)

    def _choose(self, run: LocalRun) -> Tensor:
        """[U] bool: on each layer the ``ceil(share h)`` heads of the largest score.

        Heads of equal score (all cores are zero in round 1) are drawn from the client's stream:
        otherwise the first heads would be trained in round 1, have the largest norms from there
        on, and be the only ones ever trained.
        """
        if self.config.selection == "gradient":
            run.gradient(1)
        source = run.grad if self.config.selection == "gradient" else run.vector
        views = run.layout.views(source)
        # Units follow the wire: the heads of each core in turn, then one unit per other tensor.
        flags: list[Tensor] = []
        for entry in (run.layout.entry(name) for name in self.wire(run.layout)):
            if not entry.name.endswith(".core"):
                flags.append(torch.ones(1, dtype=torch.bool))
                continue
            heads = entry.shape[0]
            if self.config.selection == "random":
                score = torch.rand(heads, generator=run.generator)
            else:
                score = views[entry.name].flatten(1).norm(dim=1).cpu()
            chosen = torch.zeros(heads, dtype=torch.bool)
            order = score.argsort(descending=True, stable=True)
            if self.config.selection != "random":
                drawn = torch.randperm(heads, generator=run.generator)
                order = drawn[score[drawn].argsort(descending=True, stable=True)]
            count = math.ceil(exact_share(heads, self.config.head_fraction, run.capacity))
            chosen[order[:count]] = True
            flags.append(chosen)
        return torch.cat(flags)

    def active_heads(self, run: LocalRun) -> dict[str, Tensor]:
        """Return [h] bool, the heads this client trains, by layer; empty where it trains all."""
        found: dict[str, Tensor] = {}
        if run.active is None:
            return found
        start = 0
        # Cores stand first on the wire, each with one unit for a head.
        for entry in (e for e in run.layout.entries if e.name.endswith(".core")):
            found[entry.name.removesuffix(".core")] = run.active[start : start + entry.shape[0]]
            start += entry.shape[0]
        return found

    def upload(self, run: LocalRun, steps: int) -> tuple[State, State]:
        """The products s_i H_i (eq. uploaded_core) and the classification head."""
        views = run.layout.views(run.vector.clone())
        parts = []
        for name in self.wire(run.layout):
            value = views[name]
            scale = views.get(name.removesuffix(".core") + ".scale")
            if name.endswith(".core") and scale is not None:
                value = value * scale[:, None, None]  # [h, r, r] * [h, 1, 1]
            parts.append(value.reshape(-1))
        return {"shared": torch.cat(parts)}, {}


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
