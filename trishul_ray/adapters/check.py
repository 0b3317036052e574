"""Consistency check of a kind of adapter, on two rows of one random layer.

Forward, merged weight and update compute the same function in three ways: clients train with the
first, evaluation uses the second, and exports the third. A layer of the true shape with random
tensors reveals a difference before training.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from trishul_ray.adapters.base import FrozenLinear, LayerAdapter, LayerSpec
from trishul_ray.errors import InputError

#: Maximum difference of two outputs, relative to the largest entry. All tensors are float32; the
#: effect of the random trainables is far larger.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Trial:
    """A layer of an adapter with random tensors.

    Attributes:
        adapter: The adapter.
        spec: The layer.
        frozen: Random weight, and the adapter's constants.
        params: Random trainables.
        rows: [2, d_in], random inputs.
    """

    adapter: LayerAdapter
    spec: LayerSpec
    frozen: FrozenLinear
    params: dict[str, Tensor]
    rows: Tensor

    @classmethod
    def of(cls, adapter: LayerAdapter, spec: LayerSpec) -> "Trial":
        """Draw the tensors, the same in every call."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        weight = draw(spec.d_out, spec.d_in) / spec.d_in**0.5
        start = adapter.initial(spec, 0)
        shapes = adapter.shapes(spec)
        if {name: tuple(value.shape) for name, value in start.items()} != shapes:
            raise InputError("initial() returns other tensors than shapes() declares")
        params = {name: value + 0.1 * draw(*value.shape) for name, value in start.items()}
        frozen = FrozenLinear(weight, None, adapter.constants(spec, 0))
        return cls(adapter, spec, frozen, params, draw(2, spec.d_in))

    def forward_is_the_merged_weight(self) -> None:
        """Check that the forward equals a product with the merged weight."""
        merged = self.adapter.merged_weight(self.frozen.weight, self.frozen.constants, self.params)
        _equal(self._trained, linear(self.rows, merged), "forward() differs from merged_weight()")

    def factors_are_the_update(self) -> None:
        """Check that the forward adds the LoRA pair or, without a pair, the weight's update."""
        given = (self.frozen.weight, self.frozen.constants, self.params)
        pair, rows = self.adapter.lora_factors(*given), self.rows.double()
        if pair is None:
            name, added = "delta()", rows @ self.adapter.delta(*given).mT
        else:
            name, added = "lora_factors()", rows @ pair[1].mT @ pair[0].mT
        plain = linear(rows, self.frozen.weight.double())
        _equal(self._trained, plain + added, f"forward() differs from the update of {name}")

    @property
    def _trained(self) -> Tensor:
        return self.adapter.forward(self.rows, self.frozen, self.params)


def _equal(found: Tensor, expected: Tensor, fault: str) -> None:
    found, expected = found.detach().double(), expected.detach().double()
    if found.shape != expected.shape:
        raise InputError(f"{fault}: got {tuple(found.shape)}, expected {tuple(expected.shape)}")
    away, size = float((found - expected).abs().max()), float(expected.abs().max())
    if not away <= TOLERANCE * size:  # also true for NaN
        raise InputError(f"{fault}: outputs of up to {size:.3g} differ by {away:.2g}")
