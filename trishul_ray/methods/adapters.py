"""The adapters that several methods attach alike, sized by the budget, and their products.

Not a method itself: what would otherwise stand twice in method files.
"""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from torch import Tensor

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.budget import ffa_rank, multihead_rank
from trishul_ray.adapters.layout import Layout
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.methods.base import BASE, LocalRun, Method, MethodConfig, Site, State

if TYPE_CHECKING:
    from trishul_ray.config import AdapterConfig


#: Where ``B_c A_c`` stands beside an upload.
PRODUCT = "product/"


Kind = Literal["lora", "ffa", "multihead"]


#: Fields of the adapter section that only multi-head adapters read, and those that also the
#: multi-head adapter of :func:`multihead` leaves unread.
_HEADS_ONLY = frozenset(f"adapter.{name}" for name in ("heads", "init", "sigma", "overflow"))


_UNREAD: dict[Kind, frozenset[str]] = {
    "lora": _HEADS_ONLY | {"adapter.matching"},
    "ffa": _HEADS_ONLY,
    "multihead": frozenset({"adapter.overflow", "adapter.alpha"}),
}


def rank_fields(adapter: "AdapterConfig") -> frozenset[str]:
    """Return the fields that decide a rank and are not read where ``adapter.rank`` is set."""
    return frozenset({"budget", "adapter.matching"} if adapter.rank else ())


def ignored_by(kind: Kind, adapter: "AdapterConfig") -> frozenset[str]:
    """Return the shared fields that adapters of a kind do not read, by dotted name."""
    return _UNREAD[kind] | rank_fields(adapter)


def lora_scale(alpha: float | None, rank: int) -> float:
    """Return what multiplies B A: alpha / r, with alpha = r by default.

    Args:
        alpha: ``adapter.alpha``.
        rank: r, the full rank. A client that trains r_c components keeps this scale, so that its
            product is a part of the global one: its own alpha_c is alpha r_c / r.
    """
    return 1.0 if alpha is None else alpha / rank


def lora_rank(site: Site) -> int:
    """The rank of plain LoRA: the budget's, or ``adapter.rank``."""
    return site.adapter.rank or site.lora_rank


def lora(site: Site) -> dict[str, LayerAdapter]:
    """A trained pair B A on every target."""
    rank = lora_rank(site)
    scale = lora_scale(site.adapter.alpha, rank)
    return {layer.name: LoRA(rank=rank, scale=scale) for layer in site.layers}


def ffa(site: Site) -> dict[str, LayerAdapter]:
    """LoRA with A frozen, of the rank that costs the same."""
    options = site.adapter
    ranks = {
        layer.name: options.rank or ffa_rank(layer, site.lora_rank, options.matching)
        for layer in site.layers
    }
    return {
        name: LoRA(rank=rank, scale=lora_scale(options.alpha, rank), train_A=False)
        for name, rank in ranks.items()
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

    def ignored_fields(self, adapter: "AdapterConfig") -> frozenset[str]:
        """What adapters of the chosen kind do not read."""
        return ignored_by(self.config.adapter, adapter)


class LoRAMethod(Method):
    """A method that trains a LoRA pair on every target."""

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """LoRA of the budget's rank."""
        return lora(site)

    def ignored_fields(self, adapter: "AdapterConfig") -> frozenset[str]:
        """What LoRA does not read."""
        return ignored_by("lora", adapter)

    def scale(self, factor_A: Tensor) -> float:
        """Return alpha / r of a pair whose A is [r, d_in]."""
        return lora_scale(self.lora_alpha, factor_A.shape[0])


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
            yield layer, a, b, self.scale(a) * mean[PRODUCT + layer]


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
