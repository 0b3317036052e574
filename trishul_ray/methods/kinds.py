"""The adapters that several methods attach alike, sized by the budget, and their products.

Not a method itself: what would otherwise stand twice in method files.
"""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Literal

from pydantic import Field
from torch import Tensor

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.budget import ffa_rank, multihead_rank
from trishul_ray.adapters.layout import Layout
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.methods.base import BASE, LocalRun, Method, MethodConfig, Site, State

#: LoRA's alpha / r: alpha = r everywhere, so that the update is B A itself.
LORA_SCALE = 1.0

#: Where ``B_c A_c`` stands beside an upload.
PRODUCT = "product/"

Kind = Literal["lora", "ffa", "multihead"]


def lora_rank(site: Site) -> int:
    """The rank of plain LoRA: the budget's, or ``adapter.rank``."""
    return site.adapter.rank or site.lora_rank


def lora(site: Site) -> dict[str, LayerAdapter]:
    """A trained pair B A on every target."""
    return {layer.name: LoRA(rank=lora_rank(site), scale=LORA_SCALE) for layer in site.layers}


def ffa(site: Site) -> dict[str, LayerAdapter]:
    """LoRA with A frozen, of the rank that costs the same."""
    matching = site.adapter.matching
    return {
        layer.name: LoRA(
            rank=site.adapter.rank or ffa_rank(layer, site.lora_rank, matching),
            scale=LORA_SCALE,
            train_A=False,
        )
        for layer in site.layers
    }


def head_rank(layer: LayerSpec, site: Site) -> int:
    """Rank of one of ``adapter.heads`` cores on a layer."""
    options = site.adapter
    return options.rank or multihead_rank(layer, site.lora_rank, options.heads, options.matching)


def multihead(site: Site) -> dict[str, LayerAdapter]:
    """``adapter.heads`` cores on every target, without scalars."""
    return {
        layer.name: MultiHead(
            heads=site.adapter.heads,
            rank=head_rank(layer, site),
            init=site.adapter.init or "random_normal",
            sigma=site.adapter.sigma,
            overflow="independent",
            train_scale=False,
        )
        for layer in site.layers
    }


def of_kind(kind: Kind, site: Site) -> dict[str, LayerAdapter]:
    """Adapters of a named kind."""
    return {"lora": lora, "ffa": ffa, "multihead": multihead}[kind](site)


class AnyAdapterConfig(MethodConfig):
    """Of a method that does not care what it trains."""

    adapter: Kind = Field("lora", description="what is trained: lora, ffa or multihead")


class AnyAdapterMethod(Method):
    """A method whose ``Config`` (an :class:`AnyAdapterConfig`) names the kind of adapter."""

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """The chosen kind, sized by the budget."""
        return of_kind(self.config.adapter, site)


class LoRAMethod(Method):
    """A method that trains a LoRA pair on every target; the scale alpha / r is 1."""

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """LoRA of the budget's rank."""
        return lora(site)


class ProductMethod(LoRAMethod):
    """One whose server needs the mean of the products ``B_c A_c`` beside that of the factors."""

    def contribution(self, upload: State, layout: Layout) -> State:
        """The upload and its products."""
        return with_products(upload, self.named(layout, upload["shared"]))

    def mean_updates(
        self, mean: State, shared: Tensor, layout: Layout
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Layer, A and B of a wire vector, and the mean update [d_out, d_in], float64.

        Args:
            mean: of the contributions.
            shared: a wire vector [W]; A and B are views of it.
            layout: names its entries.
        """
        for layer, a, b in lora_pairs(self.named(layout, shared)):
            yield layer, a, b, LORA_SCALE * mean[PRODUCT + layer]


def lora_pairs(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Layer, A [r, d_in] and B [d_out, r] of every LoRA pair among named tensors."""
    for name, factor_A in named.items():
        layer, _, last = name.rpartition(".")
        if last == "lora_A":
            yield layer, factor_A, named[f"{layer}.lora_B"]


def exact_share(count: int, *shares: float) -> Fraction:
    """Return ``count`` times the shares, each taken as the decimal number that it is written as.

    In binary 0.8 x 0.75 x 5 is a little more than 3, and its ceiling 4; here it is 3.
    """
    return math.prod((Fraction(repr(float(share))) for share in shares), start=Fraction(count))


def limit_rank(run: LocalRun, at_most: int | None = None) -> int:
    """Zero and freeze the components beyond this client's rank; returns that rank.

    The rank is ``floor(capacity x r)``, at least 1. B's columns and A's rows beyond it are zero, so
    their gradients are zero too (each is a product with the other) and no optimizer moves them.
    """
    pairs = list(lora_pairs(run.layout.views(run.vector)))
    full = pairs[0][1].shape[0]
    rank = max(1, math.floor(exact_share(full, run.capacity)))
    rank = rank if at_most is None else min(rank, at_most)
    for _, a, b in pairs:
        run.unsent += a[rank:].numel() + b[:, rank:].numel()
        a[rank:].zero_()
        b[:, rank:].zero_()
    return rank


def with_products(upload: State, named: Mapping[str, Tensor]) -> State:
    """An upload and, beside it, ``B_c A_c`` [d_out, d_in] of every pair, float64.

    The mean of products is what the mean of factors is not.
    """
    products = {PRODUCT + layer: b.double() @ a.double() for layer, a, b in lora_pairs(named)}
    return upload | products


def folded(state: State, updates: Mapping[str, Tensor]) -> State:
    """The ``base/`` part of the next state: each layer's update on top of what was folded before.

    Args:
        state: the present global state.
        updates: by layer, [d_out, d_in] of any float dtype.
    """
    return {
        BASE + layer: state[BASE + layer] + update.float()
        if BASE + layer in state
        else update.float()
        for layer, update in updates.items()
    }
