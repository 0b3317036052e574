"""Multi-head cores between frozen bases: ``y = W x + sum_i s_i B_i H_i A_i x`` (eq. forward).

All heads of a layer are stacked: one core tensor [h, r, r], one scale [h], and the frozen bases B
[d_out, h r] and A [h r, d_in] with the heads next to each other. The layer needs the products P_i =
s_i H_i. A call can merge them into the weight or compute through the thin factors, and can compute
the core gradient from the dense weight gradient or from the thin factors. :func:`choose_routes`
counts multiplications, and ``_MultiHeadLinear`` computes both passes.

Legend: h heads, r rank of one head, R = h r; d_out, d_in widths of the layer; n tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trishul_ray.adapters.base import (
    ComputePath,
    FrozenLinear,
    LayerAdapter,
    LayerSpec,
    Reads,
    is_low_precision,
)
from trishul_ray.adapters.joint import PRODUCT
from trishul_ray.adapters.linear import split_linear
from trishul_ray.adapters.stacked import own_linear
from trishul_ray.errors import InputError
from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.bases import BasisInit, Overflow, draw_bases

#: Number of entries in 16 bytes of a low precision: tensor cores read them at once if they are
#: aligned. On an H200, the core gradients of rank 110 took 1.7 of the 12.6 ms of a step of
#: ViT-B/16.
_ALIGNED = 8


@dataclass(frozen=True)
class MultiHead(LayerAdapter):
    """``heads`` cores [rank, rank] between frozen bases (RAVAN, arXiv 2506.05568; TRISHUL).

    Attributes:
        heads: h; 0 leaves the layer unadapted.
        rank: r.
        init: Initialization of the bases; see :func:`trishul_ray.spectral.bases.draw_bases`.
        sigma: Standard deviation of the entries for ``rv_random_normal``.
        overflow: What to do if h r exceeds the width: raise, or draw independent bases.
        train_scale: Whether to train the scalars s_i instead of fixing them at 1.
    """

    heads: int
    rank: int
    init: BasisInit = "gram_schmidt"
    sigma: float | None = None
    overflow: Overflow = "error"
    train_scale: bool = True

    @property
    def head_ranks(self) -> tuple[int, ...]:
        """The rank of each head."""
        return (self.rank,) * self.heads

    def __post_init__(self) -> None:
        if self.heads < 0:
            raise InputError(f"heads={self.heads} must be 0 (not adapted) or more")
        if self.rank < 1:
            raise InputError(f"rank={self.rank} must be at least 1")

    @property
    def reads(self) -> Reads:
        """The products, unless a subclass defines other products or another forward."""
        return "products" if self._computes_as(MultiHead, "product") else "trainables"

    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Return ``core`` [h, r, r] and, if trained, ``scale`` [h]; nothing for h = 0."""
        if self.heads == 0:
            return {}
        shapes: dict[str, tuple[int, ...]] = {"core": (self.heads, self.rank, self.rank)}
        if self.train_scale:
            shapes["scale"] = (self.heads,)
        return shapes

    def constants(
        self, spec: LayerSpec, seed: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Draw ``basis_B`` [d_out, h r] and ``basis_A`` [h r, d_in], float32.

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
        )
        return {"basis_B": basis_B.to(device), "basis_A": basis_A.to(device)}

    def cast(self, constants: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the bases in ``dtype``; on a GPU, in low precision, with aligned heads."""
        found = super().cast(constants, dtype)
        if found and is_low_precision(dtype) and found["basis_A"].is_cuda:
            return aligned_bases(found, self.heads)
        return found

    def initial(self, spec: LayerSpec, seed: int) -> dict[str, Tensor]:
        """Return H = 0 and s = 1, so that the layer starts as the pretrained layer."""
        shapes = self.shapes(spec).items()
        return {
            n: (torch.ones if n.endswith("scale") else torch.zeros)(shape) for n, shape in shapes
        }

    def product(self, params: Mapping[str, Tensor]) -> Tensor:
        """Compute P_i = s_i H_i, [h, r, r]; for several clients, [k, h, r, r]."""
        if PRODUCT in params:
            return params[PRODUCT]
        scale = params.get("scale")
        return params["core"] if scale is None else scale[..., None, None] * params["core"]

    def forward(
        self,
        x: Tensor,
        frozen: FrozenLinear,
        params: Mapping[str, Tensor],
        path: ComputePath = "auto",
    ) -> Tensor:
        """Compute the adapted layer, [..., d_in] -> [..., d_out] in the weight's dtype.

        The core gradient has the dtype of the core.
        """
        if self.heads == 0:
            return functional.linear(x, frozen.weight, frozen.bias)
        product = self.product(params)
        d_out, d_in = frozen.weight.shape
        grad = torch.is_grad_enabled()
        call = Call(
            x.numel() // d_in, d_out, d_in, self.heads, self.rank,
            core_grad=grad and product.requires_grad, input_grad=grad and x.requires_grad,
        )  # fmt: skip
        routes = choose_routes(call, path, low_precision=frozen.factored)
        return multihead_linear(x, product, frozen, routes)

    def forward_stacked(
        self,
        rows: Tensor,
        frozen: FrozenLinear,
        params: Mapping[str, Tensor],
        path: ComputePath = "auto",
    ) -> Tensor:
        """Compute the adapted layer for k clients, [k, n, d_in] -> [k, n, d_out].

        Forward and core gradient use the same route, the cheaper of two for a client's n tokens:
        each client's merged weight, or the frozen product of all tokens at once and thin factors.
        """
        weight, bias = frozen.weight, frozen.bias
        basis_B, basis_A = frozen.constants["basis_B"], frozen.constants["basis_A"]
        (clients, n, d_in), d_out = rows.shape, weight.shape[0]
        heads = self.heads, len(basis_A) // self.heads
        product = _widened(self.product(params).to(weight.dtype), heads[1])  # [k, h, r, r]
        costs = Call(n, d_out, d_in, self.heads, self.rank, True, True).costs()
        merged = path == "merged"
        if path == "auto":
            merged = costs[Routes(True, True)] < costs[Routes(False, False)]
        if merged and not frozen.factored:
            mixed = torch.einsum("khrs,hsd->khrd", product, basis_A.view(*heads, d_in))
            mixed = mixed.reshape(clients, -1, d_in)
            own = torch.baddbmm(
                weight.expand(clients, -1, -1), basis_B.expand(clients, -1, -1), mixed
            )
            return own_linear(rows, own, bias)
        x2 = rows.reshape(-1, d_in)
        thin = (x2 @ basis_A.t()).view(clients, n, *heads)
        thin = torch.einsum("knhs,khrs->knhr", thin, product).reshape(len(x2), -1)
        if frozen.low_precision:
            y = split_linear(x2, weight, frozen.remainder, bias, (thin, basis_B.t()))
        else:
            y = functional.linear(x2, weight, bias).addmm_(thin, basis_B.t())
        return y.view(clients, n, d_out)

    def merged_weight(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``W + B blockdiag(P) A``, [d_out, d_in] in the weight's dtype."""
        return effective_weight(
            weight, constants["basis_B"], constants["basis_A"], self.product(params)
        )

    def lora_factors(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return ``[B_1 s_1 H_1, ..., B_h s_h H_h]`` [d_out, h r] and A [h r, d_in], float64."""
        product = self.product({k: v.detach().double() for k, v in params.items()})
        basis_B, basis_A = constants["basis_B"].double(), constants["basis_A"].double()
        return mix_output(basis_B, product).t(), basis_A

    def multiplications(
        self,
        spec: LayerSpec,
        n: int,
        *,
        training: bool,
        path: ComputePath = "auto",
        low_precision: bool = False,
    ) -> int:
        """Count the multiplications of the chosen routes."""
        if self.heads == 0:
            return 0
        call = Call(n, spec.d_out, spec.d_in, self.heads, self.rank, training, training)
        return call.costs()[choose_routes(call, path, low_precision=low_precision)]

    def num_parameters(self, spec: LayerSpec) -> int:
        """Return h r^2, the number of entries of the cores."""
        return self.heads * self.rank**2

    def num_scalars(self, spec: LayerSpec) -> int:
        """Return h if the scalars are trained, otherwise 0."""
        return self.heads if self.train_scale else 0


class Routes(NamedTuple):
    """How a call computes its forward and its core gradient."""

    merged_forward: bool  # through W + B blockdiag(P) A instead of the thin factors
    merged_core: bool  # core gradient from dY^T X instead of the thin factors


class Call(NamedTuple):
    """Sizes of a call, and the gradients that it needs."""

    tokens: int
    d_out: int
    d_in: int
    heads: int
    rank: int
    core_grad: bool
    input_grad: bool

    def costs(self) -> dict[Routes, int]:
        """Return the multiplications in addition to those of the plain layer, keyed by routes."""
        n, d_out, d_in, heads, rank, core_grad, input_grad = self
        total, small = heads * rank, min(d_out, d_in)
        merge = total * d_out * d_in + small * total * rank  # W + B (P A); dX = dY W_eff is free
        thin = n * total * (d_out + d_in)  # X A^T and the way back up
        factored = thin + total * rank * min(n, d_out)
        if input_grad:
            factored += thin + total * rank * min(n, d_in)
        per_head = n * total * rank  # U_i^T V_i
        merged_core = n * d_out * d_in + merge  # dY^T X, then B_i^T (.) A_i^T
        costs: dict[Routes, int] = {}
        for merged_forward in (True, False):
            base = merge if merged_forward else factored
            # A factored forward already has X A^T, and dY B if the input gradient is needed.
            again = thin if merged_forward else (0 if input_grad else n * total * d_out)
            costs[Routes(merged_forward, True)] = base + (merged_core if core_grad else 0)
            costs[Routes(merged_forward, False)] = base + (again + per_head if core_grad else 0)
        return costs


@lru_cache(maxsize=4096)
def choose_routes(call: Call, path: ComputePath = "auto", *, low_precision: bool = False) -> Routes:
    """Return the routes of a call.

    ``auto`` selects the routes with the fewest multiplications in addition to those of the plain
    layer. In low precision the forward is always factored.
    """
    if path != "auto":
        return Routes(path == "merged" and not low_precision, path == "merged")
    costs = call.costs()
    allowed = [
        r
        for r in costs
        if not (low_precision and r.merged_forward)
        and (call.core_grad or r.merged_forward == r.merged_core)
    ]
    return min(allowed, key=lambda routes: costs[routes])


def aligned_bases(bases: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Pad the columns of each head in the bases with zeros, to a multiple of 8."""
    basis_B, basis_A = bases["basis_B"], bases["basis_A"]
    rank = len(basis_A) // heads
    wide = -(-rank // _ALIGNED) * _ALIGNED
    basis_B = functional.pad(basis_B.view(-1, heads, rank), (0, wide - rank))
    basis_A = functional.pad(basis_A.view(heads, rank, -1), (0, 0, 0, wide - rank))
    return {
        "basis_B": basis_B.reshape(-1, heads * wide), "basis_A": basis_A.reshape(heads * wide, -1)
    }  # fmt: skip


def _widened(product: Tensor, rank: int) -> Tensor:
    """Pad [..., r, r] with zeros to the rank of aligned bases."""
    extra = rank - product.shape[-1]
    return functional.pad(product, (0, extra, 0, extra)) if extra else product


def effective_weight(weight: Tensor, basis_B: Tensor, basis_A: Tensor, product: Tensor) -> Tensor:
    """Compute ``W + B blockdiag(P) A``, [d_out, d_in] in the weight's dtype; P is [h, r, r]."""
    dtype = torch.promote_types(weight.dtype, product.dtype)
    basis_B, basis_A, product = basis_B.to(dtype), basis_A.to(dtype), product.to(dtype)
    d_out, d_in = weight.shape
    if d_in <= d_out:
        merged = torch.addmm(weight.to(dtype), basis_B, _mix_input(basis_A, product))
    else:
        merged = torch.addmm(weight.to(dtype), mix_output(basis_B, product).t(), basis_A)
    return merged.to(weight.dtype)


def mix_output(basis_B: Tensor, product: Tensor) -> Tensor:
    """Compute ``(B blockdiag(P))^T``, [R, d_out]."""
    heads, rank, _ = product.shape
    per_head = basis_B.t().view(heads, rank, -1)  # [h, r, d_out], a view of the transpose
    return torch.bmm(product.transpose(1, 2), per_head).view(heads * rank, -1)


def _mix_input(basis_A: Tensor, product: Tensor) -> Tensor:
    """Compute ``blockdiag(P) A``, [R, d_in]."""
    heads, rank, _ = product.shape
    return torch.bmm(product, basis_A.view(heads, rank, -1)).view(heads * rank, -1)


def multihead_linear(x: Tensor, product: Tensor, frozen: FrozenLinear, routes: Routes) -> Tensor:
    """Compute ``x (W + B blockdiag(P) A)^T + bias``, differentiable in ``x`` and ``product``.

    Args:
        x: [..., d_in] in the weight's dtype.
        product: [h, r, r] of any dtype, which is also the dtype of its gradient.
        frozen: The frozen part. If it has a remainder or aligned bases (:func:`aligned_bases`), the
            forward must be factored.
        routes: Routes of the call.
    """
    out = _MultiHeadLinear.apply(x, product, frozen, routes)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


class _MultiHeadLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, product: Tensor, frozen: FrozenLinear, routes: Routes
    ) -> Tensor:
        weight, bias = frozen.weight, frozen.bias
        basis_B, basis_A = frozen.constants["basis_B"], frozen.constants["basis_A"]
        ctx.routes, ctx.product_dtype, ctx.rank = routes, product.dtype, product.shape[-1]
        thin_x: Tensor | None = None
        if routes.merged_forward:
            used = effective_weight(weight, basis_B, basis_A, product)
            y = functional.linear(x, used, bias)
        else:
            used = weight
            product = _widened(product.to(weight.dtype), len(basis_A) // len(product))
            x2 = x.reshape(-1, weight.shape[1])
            thin_x = x2 @ basis_A.t()  # V = X A^T, [n, R]
            if len(x2) < weight.shape[0]:
                thin, up = _multiply_heads(thin_x, product.transpose(1, 2)), basis_B.t()
            else:
                thin, up = thin_x, mix_output(basis_B, product)  # [n, R], [R, d_out]
            if frozen.low_precision:
                y = split_linear(x2, used, frozen.remainder, bias, (thin, up))
            else:
                y = functional.linear(x, used, bias).view(-1, weight.shape[0])
                y.addmm_(thin, up)
            y = y.view(*x.shape[:-1], weight.shape[0])
        kept = None if routes.merged_core else thin_x
        ctx.save_for_backward(x, used, basis_B, basis_A, product, kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, used, basis_B, basis_A, product, thin_x = ctx.saved_tensors
        merged_forward, merged_core = ctx.routes
        need_x, need_core = ctx.needs_input_grad[:2]
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
                    dx.addmm_(_multiply_heads(thin_dy, product), basis_A)
                else:
                    dx.addmm_(thin_dy, _mix_input(basis_A, product))
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
            core = core[:, : ctx.rank, : ctx.rank].to(ctx.product_dtype)
        return dx, core, None, None


def _multiply_heads(thin: Tensor, matrices: Tensor) -> Tensor:
    """Multiply [n, R] by [h, r, r] per head, giving [n, R]."""
    heads, rank, _ = matrices.shape
    out = torch.bmm(thin.view(-1, heads, rank).transpose(0, 1), matrices)  # [h, n, r]
    return out.transpose(0, 1).reshape(-1, heads * rank)


def _project(gradient: Tensor, basis_B: Tensor, basis_A: Tensor, heads: int) -> Tensor:
    """Compute ``B_i^T G A_i^T`` of every head, G [d_out, d_in] -> [h, r, r]."""
    d_out, d_in = gradient.shape
    rank = len(basis_A) // heads
    if d_in <= d_out:
        left = (basis_B.t() @ gradient).view(heads, rank, d_in)
        return torch.bmm(left, basis_A.view(heads, rank, d_in).transpose(1, 2))
    right = (basis_A @ gradient.t()).view(heads, rank, d_out)  # (G A^T)^T per head
    return torch.bmm(basis_B.t().view(heads, rank, d_out), right.transpose(1, 2))
