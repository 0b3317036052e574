"""Inputs of the forwards of all adapted layers from their trainables, computed at once.

A GPU step with small kernels waits for their launches. So the products ``s_i H_i`` and the casts to
a low precision are one kernel for all layers instead of one for each, and so are their backward and
the sum into the gradient. All of it goes entry by entry, or head by head in the gradients of
scalars, with the bits of layer by layer.

Legend: P length of the vector, Q length of its part that adapters train; k clients that train
together; n core heads of all layers, h of one, r their rank.
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

#: Name of the products among what a forward reads.
PRODUCT = "product"


@dataclass(frozen=True)
class JointTrainables:
    """The trainables of all layers; see :meth:`of`.

    Attributes:
        entries: Theirs, from the beginning of the vector.
        dtype: The layers' dtype.
        reads: What their adapters read.
    """

    entries: tuple[Entry, ...]
    dtype: torch.dtype
    reads: Reads

    @classmethod
    def of(cls, layout: Layout, layers: Mapping[str, AdaptedLinear]) -> JointTrainables | None:
        """Return the trainables of all layers; None if the layers read each its own.

        That is so where adapters ask for it or differ, where they read casts to float32, which the
        trainables are, and where not all that is trained is cores of one rank, with scalars or not.
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
        """Return the part [Q] or [k, Q] of a vector, whose gradients ``backward`` adds to ``grad``.

        Both are [P] or [k, P]. None for products of several clients: the gradients of their scalars
        would be sums in another order than layer by layer.
        """
        if vector.dim() == 2 and self.reads == "products":
            return None
        length = sum(entry.numel for entry in self.entries)
        leaf = vector.detach().narrow(-1, 0, length).requires_grad_()
        leaf.grad = grad.detach().narrow(-1, 0, length)
        return leaf

    @torch.enable_grad()
    def read(self, leaf: Tensor) -> dict[str, dict[str, Tensor]]:
        """Return what each layer's forward reads, by layer and name; for one forward."""
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
