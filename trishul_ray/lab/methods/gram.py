"""Adapter of FLoRG: one trained factor per layer.

The layer computes ``y = W x + scale L (A^T A - A0^T A0) R x`` and trains only A. The adapter is not
part of `florg.py`, because configurations are loaded without torch.

Legend: k the smaller width of a layer, r rank; A and A0 [r, k], L [d_out, k], R [k, d_in].
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trishul_ray.adapters.base import ComputePath, LayerSpec, Reads
from trishul_ray.adapters.lora import LoRA
from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.bases import draw_bases


@dataclass(frozen=True)
class GramFactor(LoRA):
    """LoRA of rank 2 r with the factors ``L [A^T, -A0^T]`` and ``[A; A0] R``.

    L has orthonormal columns and R orthonormal rows. L, R and A0 are drawn from the seed and
    frozen.
    """

    @property
    def reads(self) -> Reads:
        """The trainables: A stays in float32, and only its products with L and R are rounded."""
        return "trainables"

    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Return ``gram_A`` [r, k]."""
        return {"gram_A": (self.rank // 2, min(spec.d_out, spec.d_in))}

    def constants(
        self, spec: LayerSpec, seed: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Draw L, R and A0."""
        generator, width = torch_rng(seed, "gram", spec.name), min(spec.d_out, spec.d_in)
        left, right = draw_bases(
            "random_normal", 1, width, spec.d_out, spec.d_in, generator=generator
        )
        found = {"left": left, "right": right, "gram_A0": self.initial(spec, seed)["gram_A"]}
        return {name: value.to(device) for name, value in found.items()}

    def cast(self, constants: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Keep the constants in float32."""
        return dict(constants)

    def initial(self, spec: LayerSpec, seed: int) -> dict[str, Tensor]:
        """Draw A0, the initial A."""
        shape = self.shapes(spec)["gram_A"]
        draw = torch.randn(shape, generator=torch_rng(seed, "gram start", spec.name))
        return {"gram_A": draw / math.sqrt(3 * shape[1])}

    def _factors(
        self, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        factor, start = params["gram_A"], constants["gram_A0"]
        start = start.expand_as(factor)  # stacked clients share A0
        left = constants["left"] @ torch.cat([factor, -start], dim=-2).mT
        return left, torch.cat([factor, start], dim=-2) @ constants["right"]

    def multiplications(
        self,
        spec: LayerSpec,
        n: int,
        *,
        training: bool,
        path: ComputePath = "auto",
        low_precision: bool = False,
    ) -> int:
        """Count the multiplications of LoRA and of the products with L and R."""
        thin = super().multiplications(
            spec, n, training=training, path=path, low_precision=low_precision
        )
        factors = self.rank * min(spec.d_out, spec.d_in) * (spec.d_out + spec.d_in)
        return thin + (2 * factors if training else factors)

    def num_parameters(self, spec: LayerSpec) -> int:
        """Return r k."""
        return math.prod(self.shapes(spec)["gram_A"])
