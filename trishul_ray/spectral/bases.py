"""Frozen bases of a multi-head adapter.

Head i of a layer adapts ``W`` by ``s_i B_i H_i A_i`` (TRISHUL, eq. forward; RAVAN, sec. 3). The
bases of all heads are concatenated: ``basis_B`` [d_out, h r] has B_i in its columns
``i r : (i + 1) r``, and ``basis_A`` [h r, d_in] has A_i in the same rows.

==================  ================================================  ==========================
init                definition                                        B_i^T B_j (and A_i A_j^T)
==================  ================================================  ==========================
gram_schmidt        one QR of all heads' Gaussian columns together    I if i = j, else 0
random_normal       one QR per head                                   I if i = j, else generic
rv_random_normal    N(0, sigma^2) entries, no QR (RAVAN, sec. 3.1)    generic
shared_subspace     B_i = M R_i, A_i = R_i N (RAVAN, sec. 3.1)        R_i^T R_j
constant            B_i = B_1, A_i = A_1                              I
==================  ================================================  ==========================

RAVAN only requires the R_i to be invertible. Here they are random orthogonal matrices, the best
conditioned choice, so that each head keeps the isometry of eq. norm_equiv.

Bases are drawn and factorized in float64 on the generator's device and cast at the end: a CPU
generator gives the same bases for every target device.

Legend: d width of one side, h heads, r rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from trishul_ray.errors import InputError, warn_once
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: Initialization of bases; see the table above.
BasisInit = Literal[
    "gram_schmidt", "random_normal", "rv_random_normal", "shared_subspace", "constant"
]
#: Treatment of heads that do not fit orthogonally; see :func:`draw_bases`.
Overflow = Literal["error", "independent"]


def heads_that_fit(rank: int, d_out: int, d_in: int) -> int:
    """Return how many heads can be mutually orthogonal: ``floor(min(d_out, d_in) / rank)``."""
    _check_sizes(rank, d_out, d_in)
    return min(d_out, d_in) // rank


def draw_bases(
    init: BasisInit,
    heads: int,
    rank: int,
    d_out: int,
    d_in: int,
    *,
    generator: torch.Generator,
    sigma: float | None = None,
    overflow: Overflow = "error",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the frozen bases of one layer.

    If ``heads * rank`` exceeds the width d of a side, its heads cannot be jointly orthonormal.
    ``overflow="error"`` raises. ``overflow="independent"`` keeps the first ``floor(d / rank)``
    heads jointly orthonormal. The next head gets the rest of the orthogonal complement, completed
    to ``rank`` orthonormal columns, and every later head an independent orthonormal basis. The two
    sides are treated separately. A warning is logged once per shape.

    Args:
        init: Initialization; see the table of the module.
        heads: h >= 0; 0 gives empty bases.
        rank: r, 1 <= r <= min(d_out, d_in).
        d_out: Output width of the layer.
        d_in: Input width of the layer.
        generator: The only source of randomness; it is advanced.
        sigma: Standard deviation of the entries for ``rv_random_normal``. The default,
            ``1/sqrt(d)`` per side, gives columns of B_i and rows of A_i unit length on average.
        overflow: What to do if ``gram_schmidt`` heads do not fit.
        dtype: Dtype of the result; None means float32.

    Returns:
        ``(basis_B, basis_A)`` of shapes [d_out, h r] and [h r, d_in], contiguous, on the
        generator's device.

    Raises:
        InputError: ``rank`` exceeds the width, ``sigma`` is not positive or is given for another
            initialization, or the heads do not fit.
    """
    dtype = dtype or torch.float32
    _check_request(init, overflow, heads, rank, d_out, d_in, sigma)
    if heads == 0:
        empty = torch.empty(0, 0, dtype=dtype, device=generator.device)
        return empty.new_empty(d_out, 0), empty.new_empty(0, d_in)
    if init == "gram_schmidt" and heads * rank > min(d_out, d_in):
        _handle_overflow(overflow, heads, rank, d_out, d_in)

    gaussians = [_gaussian(d, heads * rank, generator) for d in (d_out, d_in)]
    if init == "shared_subspace":
        sides = _mixed(gaussians, heads, rank, generator)
    else:
        sides = [_side(init, gaussian, heads, rank, sigma) for gaussian in gaussians]
    return sides[0].to(dtype).contiguous(), sides[1].mT.to(dtype).contiguous()


def _side(init: BasisInit, gaussian: Tensor, heads: int, rank: int, sigma: float | None) -> Tensor:
    """Build one side's basis [d, h r] from a Gaussian matrix [d, h r]."""
    if init == "gram_schmidt":
        return _jointly_orthonormal(gaussian, heads, rank)
    if init == "random_normal":
        return _orthonormal_heads(gaussian, heads, rank)
    if init == "rv_random_normal":
        return gaussian * (1 / math.sqrt(gaussian.shape[0]) if sigma is None else sigma)
    return _orthonormal(gaussian[:, :rank]).repeat(1, heads)  # constant


def _mixed(
    gaussians: Sequence[Tensor], heads: int, rank: int, generator: torch.Generator
) -> list[Tensor]:
    """Build both sides [d, h r], whose heads are rotations ``M R_i`` and ``R_i N`` of one pair."""
    m, n = (_orthonormal(g[:, :rank]) for g in gaussians)  # [d_out, r], [d_in, r]
    mixes = _orthonormal(torch.stack([_gaussian(rank, rank, generator) for _ in range(heads)]))
    # A_i = R_i N, so the columns of A_i^T are N^T R_i^T.
    return [
        torch.cat([m @ mix for mix in mixes], dim=1),
        torch.cat([n @ mix.mT for mix in mixes], dim=1),
    ]


def _check_request(
    init: str, overflow: str, heads: int, rank: int, d_out: int, d_in: int, sigma: float | None
) -> None:
    _check_sizes(rank, d_out, d_in)
    assert init in get_args(BasisInit) and overflow in get_args(Overflow), (init, overflow)
    assert heads >= 0, heads
    if sigma is not None and init != "rv_random_normal":
        raise InputError(f"sigma={sigma} is only allowed for init=rv_random_normal, not {init}")
    if sigma is not None and not (math.isfinite(sigma) and sigma > 0):
        raise InputError(f"sigma={sigma} must be positive and finite")
    if rank > min(d_out, d_in):
        raise InputError(
            f"rank={rank} exceeds the width {min(d_out, d_in)} of a {d_out}x{d_in} layer"
        )


def _check_sizes(rank: int, d_out: int, d_in: int) -> None:
    assert min(rank, d_out, d_in) >= 1, (rank, d_out, d_in)


def _handle_overflow(overflow: Overflow, heads: int, rank: int, d_out: int, d_in: int) -> None:
    fit = heads_that_fit(rank, d_out, d_in)
    problem = (
        f"heads x rank = {heads} x {rank} = {heads * rank} exceeds the width "
        f"{min(d_out, d_in)} of a {d_out}x{d_in} layer: {fit} heads of rank {rank} fit orthogonally"
    )
    if overflow == "error":
        raise InputError(f"{problem}; use fewer heads, a lower rank or overflow=independent")
    warn_once(f"{problem}; the other heads get independent orthonormal bases")


def _gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(
        rows, columns, generator=generator, dtype=torch.float64, device=generator.device
    )


def _orthonormal(gaussian: Tensor) -> Tensor:
    """Compute Q of the QR of [..., d, k], k <= d, made unique by a positive diagonal of R."""
    q: Tensor
    r: Tensor
    q, r = torch.linalg.qr(gaussian)
    signs = torch.sign(torch.diagonal(r, dim1=-2, dim2=-1))  # [..., k]; zero has probability 0
    return q * signs.unsqueeze(-2)


def _orthonormal_heads(gaussian: Tensor, heads: int, rank: int) -> Tensor:
    blocks = gaussian.reshape(-1, heads, rank).movedim(1, 0)  # [h, d, r]
    return _orthonormal(blocks).movedim(0, 1).flatten(1)


def _jointly_orthonormal(gaussian: Tensor, heads: int, rank: int) -> Tensor:
    """Build [d, h r], orthonormal within each head, and across heads as far as d allows."""
    width = gaussian.shape[0]
    joint = _orthonormal(gaussian[:, :width])  # [d, min(d, h r)]
    blocks = []
    for start in range(0, heads * rank, rank):
        end = start + rank
        block = joint[:, start:end]
        if end > width:
            # QR leaves the leading columns unchanged, because they are orthonormal.
            block = _orthonormal(torch.cat([block, gaussian[:, max(start, width) : end]], dim=1))
        blocks.append(block)
    return torch.cat(blocks, dim=1)
