"""Low-rank adaptation: ``y = W x + scale · B A x`` (Hu et al., arXiv 2106.09685).

B starts at zero and A at ``N(0, 1/(3 d_in))``. RAVAN's appendix states a Gaussian for its LoRA
baselines but not its scale. This variance equals the variance of the uniform distribution in PEFT,
and therefore in the code of FedIT.

Legend: r rank; n tokens; d_out, d_in widths of the layer; A [r, d_in], B [d_out, r].
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trishul_ray.adapters.base import ComputePath, FrozenLinear, LayerAdapter, LayerSpec, Reads
from trishul_ray.adapters.linear import split_linear
from trishul_ray.adapters.stacked import as_shape, own_linear
from trishul_ray.errors import InputError
from trishul_ray.runtime.random_streams import torch_rng

#: A product with a thin factor is bound by memory, not by arithmetic: reading or writing one entry
#: of the wide side costs about as much as this number of multiplications (measured on AVX-512
#: CPUs).
ENTRY_COST = 32


def merging_pays(n: int, d_out: int, d_in: int, rank: int, *, backward: bool) -> bool:
    """Return whether forming ``W + scale B A`` is cheaper than the thin products."""
    thin = n * (rank + ENTRY_COST) * (d_out + d_in)
    merge = rank * d_out * d_in
    if not backward:
        return merge < thin
    # Merged: dY^T X, then one product per factor. Factored: two thin products per factor.
    return n * d_out * d_in + 3 * merge < 3 * thin


def principal_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``U_r sqrt(S_r)`` [d_out, r] and ``sqrt(S_r) V_r^T`` [r, d_in] of a weight U S V^T.

    Both are float64 on the CPU, padded with zeros beyond the smaller width. They come from the
    eigenvectors of the smaller Gram matrix, which costs a fraction of the SVD and is equally exact
    for the leading components.
    """
    w = weight.detach().cpu().double()
    if w.shape[0] > w.shape[1]:
        right, left = principal_factors(w.mT, rank)
        return left.mT.contiguous(), right.mT.contiguous()
    u = torch.linalg.eigh(w @ w.mT).eigenvectors.flip(1)[:, :rank]  # [d_out, k]
    # The signs of eigenvectors are arbitrary: make the largest entry of each positive.
    u = u * torch.sign(u.gather(0, u.abs().argmax(dim=0, keepdim=True)))
    sv = u.mT @ w  # [k, d_in], the rows of S V^T
    root = sv.norm(dim=1).sqrt()
    factor_B = torch.zeros(w.shape[0], rank, dtype=w.dtype)
    factor_A = torch.zeros(rank, w.shape[1], dtype=w.dtype)
    factor_B[:, : len(root)] = u * root
    factor_A[: len(root)] = torch.where(root > 0, 1 / root, 0.0)[:, None] * sv
    return factor_B, factor_A


@dataclass(frozen=True)
class LoRA(LayerAdapter):
    """A pair of thin factors.

    Attributes:
        rank: r.
        scale: Factor of B A (alpha / r).
        train_A: Whether to train both factors, or freeze A as drawn (FFA-LoRA, arXiv 2403.12313).
        principal: Whether the first global state has the weight's principal components as factors
            (PiSSA, arXiv 2404.02948).
        dropout: Fraction of the entries of the input that are hidden from B A in a training step;
            the others are scaled up.
    """

    rank: int
    scale: float = 1.0
    train_A: bool = True
    principal: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"rank={self.rank} must be at least 1")

    @property
    def reads(self) -> Reads:
        """The factors in the weight's dtype, unless a subclass defines another forward."""
        return "casts" if self._computes_as(LoRA) else "trainables"

    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Return ``lora_A`` [r, d_in] if trained, and ``lora_B`` [d_out, r]."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.train_A:
            shapes["lora_A"] = (self.rank, spec.d_in)
        shapes["lora_B"] = (spec.d_out, self.rank)
        return shapes

    def constants(
        self, spec: LayerSpec, seed: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return ``lora_A`` [r, d_in] if it is frozen, otherwise nothing."""
        return {} if self.train_A else {"lora_A": self._draw(spec, seed).to(device)}

    def initial(self, spec: LayerSpec, seed: int) -> dict[str, Tensor]:
        """Return the drawn A and B = 0, so that the layer starts as the pretrained layer."""
        start = {"lora_A": self._draw(spec, seed)} if self.train_A else {}
        return start | {"lora_B": torch.zeros(spec.d_out, self.rank)}

    def start(self, spec: LayerSpec, seed: int, weight: Tensor) -> dict[str, Tensor]:
        """Return :meth:`initial` or, with ``principal``, factors of the principal components."""
        if not self.principal:
            return self.initial(spec, seed)
        factor_B, factor_A = principal_factors(weight, self.rank)
        root = math.sqrt(self.scale)
        return {"lora_A": (factor_A / root).float(), "lora_B": (factor_B / root).float()}

    def _draw(self, spec: LayerSpec, seed: int) -> Tensor:
        generator = torch_rng(seed, "lora", spec.name)
        return torch.randn(self.rank, spec.d_in, generator=generator) / math.sqrt(3 * spec.d_in)

    def _factors(
        self, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return params["lora_B"], params["lora_A"] if self.train_A else constants["lora_A"]

    def forward(
        self,
        x: Tensor,
        frozen: FrozenLinear,
        params: Mapping[str, Tensor],
        path: ComputePath = "auto",
    ) -> Tensor:
        """Compute the adapted layer, [..., d_in] -> [..., d_out] in the weight's dtype."""
        weight, bias = frozen.weight, frozen.bias
        factor_B, factor_A = self._factors(frozen.constants, params)
        d_out, d_in = weight.shape
        merged = path == "merged"
        trained = torch.is_grad_enabled() and factor_B.requires_grad
        if path == "auto":
            merged = merging_pays(x.numel() // d_in, d_out, d_in, self.rank, backward=trained)
        dropout = self.dropout if trained else 0.0
        if merged and not frozen.factored and not dropout:
            return functional.linear(x, self.merged_weight(weight, frozen.constants, params), bias)
        factor_A, factor_B = factor_A.to(weight.dtype), factor_B.to(weight.dtype)
        x2 = x.reshape(-1, d_in)
        if dropout:
            thin = functional.dropout(x2, dropout) @ factor_A.mT  # [n, r]
        else:
            x2, thin = project(x2, factor_A)
        if self.scale != 1.0:
            thin = thin * self.scale
        up = factor_B.t()  # [r, d_out]
        if frozen.low_precision:
            y = split_linear(x2, weight, frozen.remainder, bias, (thin, up))
        else:
            # In place: only this sum needs the plain output, and a copy costs as much as a product.
            y = functional.linear(x2, weight, bias).addmm_(thin, up)
        return y.view(*x.shape[:-1], d_out)

    def forward_stacked(
        self,
        rows: Tensor,
        frozen: FrozenLinear,
        params: Mapping[str, Tensor],
        path: ComputePath = "auto",
    ) -> Tensor:
        """Compute the adapted layer for k clients, [k, n, d_in] -> [k, n, d_out].

        ``auto`` is factored, because separate weights of clients could not share the frozen
        product. Dropout is not supported, because clients would share its random masks.
        """
        weight, bias = frozen.weight, frozen.bias
        factor_B, factor_A = self._factors(frozen.constants, params)
        (clients, n, d_in), d_out = rows.shape, weight.shape[0]
        factor_A, factor_B = factor_A.to(weight.dtype), factor_B.to(weight.dtype)
        if factor_A.dim() == 2:  # frozen: shared by all clients
            factor_A = factor_A.expand(clients, -1, -1)
        if path == "merged" and not frozen.factored:
            merged = torch.baddbmm(
                weight.expand(clients, -1, -1), factor_B, factor_A, alpha=self.scale
            )
            return own_linear(rows, merged, bias)
        rows, thin = project(rows, factor_A)  # [k, n, d_in], [k, n, r]
        if self.scale != 1.0:
            thin = thin * self.scale
        x2, up = rows.reshape(-1, d_in), factor_B.mT
        if frozen.low_precision:
            return split_linear(x2, weight, frozen.remainder, bias, (thin, up)).view(
                clients, n, d_out
            )
        y = as_shape(functional.linear(x2, weight, bias), clients, n, d_out)
        return y.baddbmm_(thin, up)

    def merged_weight(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``W + scale · B A``, [d_out, d_in] in the weight's dtype."""
        factor_B, factor_A = self._factors(constants, params)
        dtype = torch.promote_types(weight.dtype, factor_B.dtype)
        return torch.addmm(
            weight.to(dtype), factor_B.to(dtype), factor_A.to(dtype), alpha=self.scale
        ).to(weight.dtype)

    def lora_factors(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return ``scale · B`` [d_out, r] and A [r, d_in], float64."""
        factor_B, factor_A = self._factors(constants, params)
        return self.scale * factor_B.detach().double(), factor_A.detach().double()

    def multiplications(
        self,
        spec: LayerSpec,
        n: int,
        *,
        training: bool,
        path: ComputePath = "auto",
        low_precision: bool = False,
    ) -> int:
        """Count the multiplications of the merged weight or of the thin factors."""
        thin, merge = n * self.rank * (spec.d_out + spec.d_in), self.rank * spec.d_out * spec.d_in
        merged = path == "merged"
        if path == "auto":
            merged = merging_pays(n, spec.d_out, spec.d_in, self.rank, backward=training)
        if merged and not low_precision and not (training and self.dropout):
            return n * spec.d_out * spec.d_in + 3 * merge if training else merge
        return 3 * thin if training else thin

    def num_parameters(self, spec: LayerSpec) -> int:
        """Return r (d_in + d_out), or r d_out if A is frozen."""
        return self.rank * (spec.d_out + (spec.d_in if self.train_A else 0))


def project(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, for a product with the frozen weight, and ``x factor^T``.

    On a GPU, the gradient of x through the thin product is added to the gradient of the other
    product, in one kernel.

    Args:
        x: [n, d_in] or [k, n, d_in].
        factor: [r, d_in] or [k, r, d_in].
    """
    if not x.is_cpu and torch.is_grad_enabled():
        both = _Project.apply(x, factor)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], both)
    return x, x @ factor.mT


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, factor)
        return x, x @ factor.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor | None, thin: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Add to ``dx`` in place: the product with the frozen weight created it for this call."""
        x, factor = ctx.saved_tensors
        need_x, need_factor = ctx.needs_input_grad
        if need_x:
            assert dx is not None
            add = dx.addmm_ if dx.dim() == 2 else dx.baddbmm_
            add(thin, factor)
        return dx if need_x else None, thin.mT @ x if need_factor else None
