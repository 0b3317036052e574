"""Compute the inputs of all adapted layers' forwards from their trainables at once.

A GPU step with small kernels waits for their launches. Therefore the products ``s_i H_i`` and the
casts to a low precision use one kernel for all layers instead of one per layer, as do their
backward and the sum into the gradient. All operations are per entry, or per head in the gradients
of scalars, so the results are bitwise identical to computing layer by layer.

Legend: P length of the vector, Q length of the part that adapters train; k clients that train
together; n core heads of all layers, h of one layer, r their rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trishul_ray.adapters.base import Reads
from trishul_ray.adapters.layout import Entry, Layout

if TYPE_CHECKING:
    from trishul_ray.adapters.linear import AdaptedLinear

#: Key of the products among the inputs of a forward.
PRODUCT = "product"


@dataclass(frozen=True)
class JointTrainables:
    """The trainables of all layers; see :meth:`of`.

    Attributes:
        entries: Their entries, from the beginning of the vector.
        dtype: Dtype of the layers.
        reads: Kind of inputs of their adapters.
    """

    entries: tuple[Entry, ...]
    dtype: torch.dtype
    reads: Reads

    @classmethod
    def of(cls, layout: Layout, layers: Mapping[str, AdaptedLinear]) -> JointTrainables | None:
        """Collect the trainables of all layers, or return None to compute layer by layer.

        The result is None if adapters read plain trainables or differ, if they read casts to
        float32, the dtype of the trainables, or if the trainables are not all cores of one rank,
        all with or all without scalars.
        """
        entries = tuple(entry for entry in layout.entries if entry.kind != "classifier")
        both = {(layer.adapter.reads, layer.dtype) for layer in layers.values()}
        if len(both) != 1:
            return None
        reads, dtype = both.pop()
        if reads == "products":
            names = {entry.name for entry in entries}
            scaled = {f"{name}.scale" in names for name in layers}
            ranks = {entry.shape[-1] for entry in entries if entry.kind == "core"}
            if len(scaled) > 1 or len(ranks) != 1 or any(e.kind == "adapter" for e in entries):
                return None
        if reads == "trainables" or (reads == "casts" and dtype == torch.float32):
            return None
        return cls(entries, dtype, reads)

    def leaf(self, vector: Tensor, grad: Tensor) -> Tensor | None:
        """Return the leaf for autograd, whose gradients ``backward`` adds to ``grad``.

        Args:
            vector: [P] or [k, P].
            grad: [P] or [k, P].

        Returns:
            The part [Q] or [k, Q] of the vector. None for products of several clients, because the
            gradients of their scalars would be summed in another order than layer by layer.
        """
        if vector.dim() == 2 and self.reads == "products":
            return None
        length = sum(entry.numel for entry in self.entries)
        leaf = vector.detach().narrow(-1, 0, length).requires_grad_()
        leaf.grad = grad.detach().narrow(-1, 0, length)
        return leaf

    @torch.enable_grad()
    def read(self, leaf: Tensor) -> dict[str, dict[str, Tensor]]:
        """Compute the inputs of each layer for one forward, keyed by layer and name."""
        if self.reads == "products":
            cores = [entry for entry in self.entries if entry.kind == "core"]
            rank, heads = cores[0].shape[-1], [entry.shape[0] for entry in cores]
            size = sum(heads) * rank * rank
            core, scale = leaf.split([size, len(leaf) - size])
            product = core.view(-1, rank, rank)  # H, [n, r, r]
            if len(scale):
                product = scale[:, None, None] * product  # s_i H_i
            each = product.to(self.dtype).split(heads)  # [h, r, r]
            return {
                entry.name.removesuffix(".core"): {PRODUCT: value}
                for entry, value in zip(cores, each, strict=True)
            }
        found: dict[str, dict[str, Tensor]] = {}
        parts = leaf.to(self.dtype).split([entry.numel for entry in self.entries], dim=-1)
        for entry, part in zip(self.entries, parts, strict=True):
            layer, _, suffix = entry.name.rpartition(".")
            found.setdefault(layer, {})[suffix] = part.view(*leaf.shape[:-1], *entry.shape)
        return found
