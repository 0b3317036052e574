"""Multi-head cores between frozen bases: ``y = W x + sum_i s_i B_i H_i A_i x`` (eq. forward).

All heads of a layer live in stacked tensors: one core [h, r, r], one scale [h], and the frozen
bases B [d_out, h r] and A [h r, d_in] with the heads side by side.

Legend: h heads, r rank of one head, d_out and d_in the layer's width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from trishul_ray.adapters.base import LOW_PRECISION, LayerAdapter, LayerSpec, Path
from trishul_ray.adapters.multihead_linear import (
    choose_routes,
    effective_weight,
    mix_output,
    multihead_linear,
)
from trishul_ray.errors import InputError
from trishul_ray.rng import torch_rng
from trishul_ray.spectral.bases import draw_bases

BasisInit = Literal[
    "gram_schmidt", "random_normal", "rv_random_normal", "shared_subspace", "constant"
]


@dataclass(frozen=True)
class MultiHead(LayerAdapter):
    """``heads`` cores [rank, rank] between frozen bases (RAVAN, arXiv 2506.05568; TRISHUL).

    Attributes:
        heads: h; 0 leaves the layer as it is.
        rank: r.
        init: how the bases are drawn; see :func:`trishul_ray.spectral.bases.draw_bases`.
        sigma: entry scale of ``rv_random_normal``.
        overflow: what happens where h r exceeds the width: refuse, or bases of their own.
        train_scale: train the scalars s_i, or keep them at 1.
    """

    heads: int
    rank: int
    init: BasisInit = "gram_schmidt"
    sigma: float | None = None
    overflow: Literal["error", "independent"] = "error"
    train_scale: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing."""
        if self.heads < 0:
            raise InputError(f"heads={self.heads}: must be 0 (not adapted) or more")
        if self.rank < 1:
            raise InputError(f"rank={self.rank}: must be at least 1")

    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """``core`` [h, r, r] and, if trained, ``scale`` [h]; nothing where h is 0."""
        if self.heads == 0:
            return {}
        shapes: dict[str, tuple[int, ...]] = {"core": (self.heads, self.rank, self.rank)}
        if self.train_scale:
            shapes["scale"] = (self.heads,)
        return shapes

    def constants(
        self, spec: LayerSpec, seed: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """``basis_B`` [d_out, h r] and ``basis_A`` [h r, d_in], float32.

        Raises:
            InputError: h r exceeds the width and ``overflow`` is ``"error"``.
        """
        if self.heads == 0:
            return {}
        basis_B, basis_A = draw_bases(
            self.init,
            self.heads,
            self.rank,
            spec.d_out,
            spec.d_in,
            generator=torch_rng(seed, "basis", spec.name),
            sigma=self.sigma,
            overflow=self.overflow,
            dtype=torch.float32,
            device="cpu",
        )
        return {
            "basis_B": basis_B.contiguous().to(device),
            "basis_A": basis_A.contiguous().to(device),
        }

    def initial(self, spec: LayerSpec, seed: int) -> dict[str, Tensor]:
        """H = 0 and s = 1: the layer starts as the pretrained one."""
        values = {"core": torch.zeros, "scale": torch.ones}
        return {name: values[name](shape) for name, shape in self.shapes(spec).items()}

    def product(self, params: Mapping[str, Tensor]) -> Tensor:
        """P_i = s_i H_i, [h, r, r]."""
        scale = params.get("scale")
        return params["core"] if scale is None else scale[:, None, None] * params["core"]

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        constants: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        path: Path = "auto",
        rest: Tensor | None = None,
    ) -> Tensor:
        """The adapted layer: x [..., d_in] -> [..., d_out], in the weight's dtype.

        Bases may be handed over in float32 or already in the weight's dtype; the core gradient
        comes in the core's dtype.
        """
        if self.heads == 0:
            return functional.linear(x, weight, bias)
        product = self.product(params)
        d_out, d_in = weight.shape
        grad = torch.is_grad_enabled()
        routes = choose_routes(
            x.numel() // d_in,
            d_out,
            d_in,
            self.heads,
            self.rank,
            core_grad=grad and product.requires_grad,
            input_grad=grad and x.requires_grad,
            path=path,
            low_precision=weight.dtype in LOW_PRECISION,
        )
        basis_B, basis_A = constants["basis_B"], constants["basis_A"]
        if basis_B.dtype != weight.dtype:
            basis_B, basis_A = basis_B.to(weight.dtype), basis_A.to(weight.dtype)
        return multihead_linear(x, weight, bias, basis_B, basis_A, product, routes, rest)

    def merged_weight(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """The weight with the update added, [d_out, d_in] in the weight's dtype."""
        return effective_weight(
            weight, constants["basis_B"], constants["basis_A"], self.product(params)
        )

    def lora_factors(
        self, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """B-side ``[B_1 s_1 H_1, ..., B_h s_h H_h]`` [d_out, h r] and A-side [h r, d_in]."""
        product = self.product({k: v.detach().double() for k, v in params.items()})
        return mix_output(constants["basis_B"].double(), product).t(), constants["basis_A"].double()

    def num_parameters(self, spec: LayerSpec) -> int:
        """The h r^2 entries of the cores."""
        return self.heads * self.rank**2

    def num_scalars(self, spec: LayerSpec) -> int:
        """The h scalars, if they are trained."""
        return self.heads if self.train_scale else 0
