"""Multi-head cores between frozen bases: ``y = W x + sum_i s_i B_i H_i A_i x`` (eq. forward).

All heads of a layer live in stacked tensors: one core [h, r, r], one scale [h], and the frozen
bases B [d_out, h r] and A [h r, d_in] with the heads side by side.

Legend: h heads, r rank of one head, d_out and d_in the layer's width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trishul_ray.adapters.base import LOW_PRECISION, LayerAdapter, LayerSpec, Path
from trishul_ray.adapters.low_precision import add_linear, rest_product
from trishul_ray.errors import InputError
from trishul_ray.rng import torch_rng
from trishul_ray.spectral.bases import draw_bases


@lru_cache(maxsize=4096)
def choose_routes(
    n: int,
    d_out: int,
    d_in: int,
    heads: int,
    rank: int,
    *,
    core_grad: bool,
    input_grad: bool,
    path: Path = "auto",
    low_precision: bool = False,
) -> tuple[bool, bool]:
    """Which routes one call takes: ``(merged forward, merged core gradient)``.

    On ``auto`` the pair with the fewest multiplications beside those of the plain layer; in low
    precision the forward is always factored.
    """
    if path != "auto":
        return path == "merged" and not low_precision, path == "merged"
    total, small = heads * rank, min(d_out, d_in)
    merge = total * d_out * d_in + small * total * rank  # W + B (P A); dX = dY W_eff is then free
    thin = n * total * (d_out + d_in)  # X A^T and the way back up
    factored = thin + total * rank * min(n, d_out)
    if input_grad:
        factored += thin + total * rank * min(n, d_in)
    per_head = n * total * rank  # U_i^T V_i
    merged_core = n * d_out * d_in + merge  # dY^T X, then B_i^T (.) A_i^T
    costs: dict[tuple[bool, bool], int] = {}
    for merged_forward in (False,) if low_precision else (True, False):
        base = merge if merged_forward else factored
        if not core_grad:
            costs[merged_forward, merged_forward] = base
            continue
        costs[merged_forward, True] = base + merged_core
        # A factored forward has X A^T already, and dY B if the input gradient is wanted.
        again = thin if merged_forward else (0 if input_grad else n * total * d_out)
        costs[merged_forward, False] = base + again + per_head
    return min(costs, key=lambda routes: costs[routes])


def effective_weight(weight: Tensor, basis_B: Tensor, basis_A: Tensor, product: Tensor) -> Tensor:
    """``W + B blockdiag(P) A``, [d_out, d_in] in the weight's dtype.

    Args:
        weight: [d_out, d_in].
        basis_B: [d_out, h r].
        basis_A: [h r, d_in].
        product: [h, r, r].
    """
    dtype = torch.promote_types(weight.dtype, product.dtype)
    basis_B, basis_A, product = basis_B.to(dtype), basis_A.to(dtype), product.to(dtype)
    heads, rank, _ = product.shape
    d_out, d_in = weight.shape
    if d_in <= d_out:
        mixed = torch.bmm(product, basis_A.view(heads, rank, d_in))  # [h, r, d_in]
        merged = torch.addmm(weight.to(dtype), basis_B, mixed.view(-1, d_in))
    else:
        mixed = mix_output(basis_B, product)  # [R, d_out]
        merged = torch.addmm(weight.to(dtype), mixed.t(), basis_A)
    return merged.to(weight.dtype)


def mix_output(basis_B: Tensor, product: Tensor) -> Tensor:
    """(B blockdiag(P))^T, [R, d_out]."""
    heads, rank, _ = product.shape
    per_head = basis_B.t().view(heads, rank, -1)  # [h, r, d_out], a view of the transpose
    return torch.bmm(product.transpose(1, 2), per_head).view(heads * rank, -1)


def _per_head(thin: Tensor, matrices: Tensor) -> Tensor:
    """[n, R] times [h, r, r], head by head -> [n, R]."""
    heads, rank, _ = matrices.shape
    out = torch.bmm(thin.view(-1, heads, rank).transpose(0, 1), matrices)  # [h, n, r]
    return out.transpose(0, 1).reshape(-1, heads * rank)


class _MultiHeadLinear(torch.autograd.Function):
    """The adapted layer with the gradients of ``x`` and ``product`` alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        basis_B: Tensor,
        basis_A: Tensor,
        product: Tensor,
        routes: tuple[bool, bool],
        rest: Tensor | None,
    ) -> Tensor:
        merged_forward, merged_core = routes
        ctx.routes, ctx.product_dtype = routes, product.dtype
        thin_x: Tensor | None = None
        if merged_forward:
            used = effective_weight(weight, basis_B, basis_A, product)
            y = functional.linear(x, used, bias)
        else:
            used = weight
            product = product.to(weight.dtype)
            x2 = x.reshape(-1, weight.shape[1])
            thin_x = x2 @ basis_A.t()  # V = X A^T, [n, R]
            if len(x2) < weight.shape[0]:
                thin, up = _per_head(thin_x, product.transpose(1, 2)), basis_B.t()
            else:
                thin, up = thin_x, mix_output(basis_B, product)  # [n, R], [R, d_out]
            if weight.dtype in LOW_PRECISION:
                update = rest_product(x2, rest)  # [n, d_out]
                update = thin @ up if update is None else update.addmm_(thin, up)
                y = add_linear(update, x2, used, bias)
            else:
                y = functional.linear(x, used, bias).view(-1, weight.shape[0])
                y.addmm_(thin, up)
            y = y.view(*x.shape[:-1], weight.shape[0])
        ctx.save_for_backward(x, used, basis_B, basis_A, product, None if merged_core else thin_x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, used, basis_B, basis_A, product, thin_x = ctx.saved_tensors
        merged_forward, merged_core = ctx.routes
        need_x, need_core = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        d_out, d_in = used.shape
        heads, rank, _ = product.shape
        dy2, x2 = dy.reshape(-1, d_out), x.reshape(-1, d_in)
        thin_dy: Tensor | None = None  # U = dY B, [n, R]
        if (need_x and not merged_forward) or (need_core and not merged_core):
            thin_dy = dy2 @ basis_B
        dx: Tensor | None = None
        if need_x:
            dx = dy2 @ used
            if not merged_forward:
                assert thin_dy is not None
                if len(dx) < d_in:
                    dx.addmm_(_per_head(thin_dy, product), basis_A)
                else:
                    mixed = torch.bmm(product, basis_A.view(heads, rank, d_in))
                    dx.addmm_(thin_dy, mixed.view(-1, d_in))
            dx = dx.view(x.shape)
        core: Tensor | None = None
        if need_core and merged_core:
            core = _project(dy2.t() @ x2, basis_B, basis_A, heads)
        elif need_core:
            assert thin_dy is not None
            thin_x = x2 @ basis_A.t() if thin_x is None else thin_x
            core = torch.bmm(  # U_i^T V_i: [h, r, n] x [h, n, r]
                thin_dy.view(-1, heads, rank).permute(1, 2, 0),
                thin_x.view(-1, heads, rank).transpose(0, 1),
            )
        if core is not None:
            core = core.to(ctx.product_dtype)
        return dx, None, None, None, None, core, None, None


def _project(gradient: Tensor, basis_B: Tensor, basis_A: Tensor, heads: int) -> Tensor:
    """``B_i^T G A_i^T`` for every head: G [d_out, d_in] -> [h, r, r]."""
    d_out, d_in = gradient.shape
    rank = len(basis_A) // heads
    if d_in <= d_out:
        left = (basis_B.t() @ gradient).view(heads, rank, d_in)
        return torch.bmm(left, basis_A.view(heads, rank, d_in).transpose(1, 2))
    right = (basis_A @ gradient.t()).view(heads, rank, d_out)  # (G A^T)^T by head
    return torch.bmm(basis_B.t().view(heads, rank, d_out), right.transpose(1, 2))


def multihead_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    basis_B: Tensor,
    basis_A: Tensor,
    product: Tensor,
    routes: tuple[bool, bool],
    rest: Tensor | None = None,
) -> Tensor:
    """``x (W + B blockdiag(P) A)^T + bias``, differentiable in ``x`` and ``product`` alone.

    Args:
        x: [..., d_in].
        weight: [d_out, d_in]; x, bias and bases have its dtype.
        bias: [d_out] or None.
        basis_B: [d_out, h r].
        basis_A: [h r, d_in].
        product: [h, r, r], any dtype; its gradient comes in it.
        routes: from :func:`choose_routes`.
        rest: [d_out, d_in], what the frozen weight has beyond ``weight`` in low precision, where
            the forward is factored; or None.

    Returns:
        [..., d_out].
    """
    out = _MultiHeadLinear.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        x, weight, bias, basis_B, basis_A, product, routes, rest
    )
    return cast(Tensor, out)


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
