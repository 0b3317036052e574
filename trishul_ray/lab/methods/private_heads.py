"""Adapter of a matrix whose last heads are private.

It is not part of `private.py`, because configurations are loaded without torch.

Legend: h heads of a matrix, r their rank, k private heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.multihead import MultiHead

#: Name of the trainables of private heads.
PRIVATE_CORE = "private_core"


@dataclass(frozen=True)
class PrivateHeads(MultiHead):
    """Multi-head adapter whose last ``private`` heads are separate tensors without scalars."""

    private: int = 0

    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the shared heads, and ``private_core`` [k, r, r]."""
        shared = self.heads - self.private
        shapes = {n: (shared, *shape[1:]) for n, shape in super().shapes(spec).items()}
        if self.private:
            shapes[PRIVATE_CORE] = (self.private, self.rank, self.rank)
        return shapes

    def product(self, params: Mapping[str, Tensor]) -> Tensor:
        """Concatenate s_i H_i of the shared heads and H_i of the private heads, [h, r, r]."""
        shared, private = super().product(params), params.get(PRIVATE_CORE)
        return shared if private is None else torch.cat([shared, private], dim=-3)

    def num_scalars(self, spec: LayerSpec) -> int:
        """Return the number of shared heads if their scalars are trained, or 0."""
        return self.heads - self.private if self.train_scale else 0
