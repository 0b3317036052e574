"""Core heads of different ranks on one matrix.

To the layer they are a single head of rank ``R = r_1 + ... + r_h`` whose product is block diagonal,
``P = diag(s_1 H_1, ..., s_h H_h)`` [R, R], so it is computed as :class:`MultiHead` computes one
head. Each core is a tensor of its own, which is trained, thresholded, sent and averaged as any
core of its rank. The zeros of P cost ``n R^2`` multiplications at most, little beside
``n R (d_out + d_in)``: R is at most the width.

Legend: h heads, r_i rank of a head; d_out, d_in the layer's widths; n tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.multihead import MultiHead


@dataclass(frozen=True)
class MixedHeads(MultiHead):
    """Cores [r_i, r_i] between orthonormal bases. Build one with :meth:`of`.

    Attributes:
        ranks: r_i.
    """

    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: tuple[int, ...], *, train_scale: bool) -> "MixedHeads":
        """Return heads of these ranks; their bases are drawn together, by Gram-Schmidt."""
        return cls(1, sum(ranks), train_scale=train_scale, ranks=ranks)

    @property
    def head_ranks(self) -> tuple[int, ...]:
        """The rank of each head that is trained at first."""
        return self.ranks

    @property
    def rank_or_ranks(self) -> int | list[int]:
        """The rank of all heads, or that of each where they differ."""
        return list(self.ranks)

    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Return ``head<i>.core`` [1, r_i, r_i] and, if trained, ``head<i>.scale`` [1]."""
        shapes: dict[str, tuple[int, ...]] = {}
        for i, rank in enumerate(self.ranks):
            shapes[f"head{i}.core"] = (1, rank, rank)
            if self.train_scale:
                shapes[f"head{i}.scale"] = (1,)
        return shapes

    def product(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return P, [1, R, R]; of several clients [k, 1, R, R]."""
        first = params["head0.core"]
        product = first.new_zeros(*first.shape[:-2], self.rank, self.rank)
        end = 0
        for i, rank in enumerate(self.ranks):
            start, end = end, end + rank
            core = params[f"head{i}.core"]
            if (scale := params.get(f"head{i}.scale")) is not None:
                core = scale[..., None, None] * core
            product[..., start:end, start:end] = core
        return product

    def num_parameters(self, spec: LayerSpec) -> int:
        """Return the sum of r_i^2, the entries of the cores."""
        return sum(rank**2 for rank in self.ranks)

    def num_scalars(self, spec: LayerSpec) -> int:
        """Return h if the scalars are trained, else 0."""
        return len(self.ranks) if self.train_scale else 0
