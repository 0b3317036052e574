"""Adapters that several methods attach, sized by the budget: LoRA, FFA-LoRA and multi-head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.budget import ffa_rank, multihead_rank
from trishul_ray.methods.base import ADAPTED, Method, MethodConfig
from trishul_ray.methods.base.messages import TargetLayers

if TYPE_CHECKING:
    from torch import Tensor

AdapterKind = Literal["lora", "ffa", "multihead"]

#: Shared fields that each kind reads; see :attr:`trishul_ray.methods.base.Method.fields_read`.
FIELDS_READ: dict[AdapterKind, frozenset[str]] = {
    "lora": ADAPTED | {"alpha", "dropout"},
    "ffa": ADAPTED | {"matching", "alpha", "dropout"},
    "multihead": ADAPTED | {"matching", "heads", "init", "sigma"},
}


def attach_adapters(
    kind: AdapterKind, targets: TargetLayers, *, principal: bool = False
) -> dict[str, LayerAdapter]:
    """Create an adapter of the given kind for every targeted layer.

    Args:
        kind: ``lora`` trains A and B, ``ffa`` freezes A, and ``multihead`` trains ``adapter.heads``
            cores without scalars.
        targets: The targeted layers, the budget and the section ``adapter``.
        principal: Whether LoRA starts from the principal components of each weight.

    Returns:
        The adapters, keyed by layer name.
    """
    # These modules import torch.
    from trishul_ray.adapters.lora import LoRA
    from trishul_ray.adapters.multihead import MultiHead

    options = targets.adapter
    adapters: dict[str, LayerAdapter] = {}
    for layer in targets.layers:
        if kind == "multihead":
            adapters[layer.name] = MultiHead(
                heads=options.heads,
                rank=core_rank(layer, targets),
                init=options.init or "random_normal",
                sigma=options.sigma,
                overflow="independent",
                train_scale=False,
            )
            continue
        rank = options.rank or (
            targets.lora_rank
            if kind == "lora"
            else ffa_rank(layer, targets.lora_rank, options.matching)
        )
        scale = lora_scale(options.alpha, rank)
        adapters[layer.name] = LoRA(
            rank, scale, train_A=kind == "lora", principal=principal, dropout=options.dropout
        )
    return adapters


class AnyAdapterConfig(MethodConfig):
    """Hyper-parameters of a method that supports any kind of adapter."""

    adapter: AdapterKind = Field("lora", description="kind of adapter: lora, ffa or multihead")


class AnyAdapter(Method):
    """Base class of methods that attach adapters of the kind ``method.adapter``."""

    Config = AnyAdapterConfig

    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Attach adapters of the configured kind."""
        return attach_adapters(self.config.adapter, targets)

    @property
    def fields_read(self) -> frozenset[str]:
        """Fields that adapters of the configured kind read."""
        return FIELDS_READ[self.config.adapter]


def core_rank(layer: LayerSpec, targets: TargetLayers) -> int:
    """Return the rank of each of the ``adapter.heads`` cores on a layer.

    Args:
        layer: The layer.
        targets: The budget and the section ``adapter``.
    """
    options = targets.adapter
    return options.rank or multihead_rank(layer, targets.lora_rank, options.heads, options.matching)


def lora_scale(alpha: float | None, rank: int) -> float:
    """Return the factor of B A: alpha / r, or 1 if alpha is None.

    r is the full rank. A client that trains only r_c components uses the same factor, so that its
    product is a part of the global product; its effective alpha_c is alpha r_c / r.

    Args:
        alpha: ``adapter.alpha``; None means alpha = r.
        rank: r.
    """
    return 1.0 if alpha is None else alpha / rank


def lora_pairs(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Iterate over the LoRA pairs among tensors.

    A factor without its counterpart is skipped.

    Args:
        tensors: Tensors, keyed by name.

    Yields:
        Layer name, A [r, d_in] and B [d_out, r].
    """
    for name, factor_A in tensors.items():
        layer, _, suffix = name.rpartition(".")
        if suffix == "lora_A" and (factor_B := tensors.get(f"{layer}.lora_B")) is not None:
            yield layer, factor_A, factor_B
