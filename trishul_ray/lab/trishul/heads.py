"""Core heads of a matrix some of which are spare, or stay with the client.

Legend: h heads of a matrix, r their rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.multihead import MultiHead, mix_output

#: Name of the trainables of private heads.
PRIVATE_CORE = "private_core"


@dataclass(frozen=True)
class SpareHeads(MultiHead):
    """Heads, the last ``spare`` of which are zero at first and no part of the budget."""

    spare: int = 0

    @property
    def head_ranks(self) -> tuple[int, ...]:
        """The rank of each head that is trained at first."""
        return (self.rank,) * (self.heads - self.spare)

    def num_parameters(self, spec: LayerSpec) -> int:
        """Return the number of entries of the cores that are trained at first."""
        return super().num_parameters(spec) - self.spare * self.rank**2

    def num_scalars(self, spec: LayerSpec) -> int:
        """Return the number of scalars of the heads that are trained at first."""
        return super().num_scalars(spec) - self.spare * self.train_scale

    def lora_factors(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return B and A of the heads that are not zero: only these need a rank in a file."""
        product = self.product({k: v.detach().double() for k, v in params.items()})
        used = product.flatten(1).any(dim=1)
        used[0] = True  # PEFT has no rank 0
        entries = used.repeat_interleave(self.rank)
        basis_B, basis_A = constants["basis_B"].double(), constants["basis_A"].double()
        return mix_output(basis_B[:, entries], product[used]).t(), basis_A[entries]


@dataclass(frozen=True)
class PrivateHeads(MultiHead):
    """Heads, the last ``private`` of which are tensors of their own, without scalars."""

    private: int = 0

    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the shared heads, and ``private_core`` [k, r, r]."""
        shared = self.heads - self.private
        shapes = {n: (shared, *shape[1:]) for n, shape in super().shapes(spec).items()}
        if self.private:
            shapes[PRIVATE_CORE] = (self.private, self.rank, self.rank)
        return shapes

    def product(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return P_i = s_i H_i of the shared heads, and H_i of the private ones, [h, r, r]."""
        shared, private = super().product(params), params.get(PRIVATE_CORE)
        return shared if private is None else torch.cat([shared, private], dim=-3)

    def num_scalars(self, spec: LayerSpec) -> int:
        """Return the number of shared heads if their scalars are trained, else 0."""
        return self.heads - self.private if self.train_scale else 0


@dataclass(frozen=True)
class SparePrivateHeads(SpareHeads, PrivateHeads):
    """Heads, some of which are spare, and some private."""
