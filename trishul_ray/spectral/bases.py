"""How the frozen bases of a multi-head adapter are drawn.

Head i of a layer adapts ``W`` by ``s_i B_i H_i A_i`` (TRISHUL, eq. forward; RAVAN, sec. 3). The
bases of all heads are kept concatenated: ``basis_B`` [d_out, heads*rank] holds B_i in its columns
``i*rank:(i+1)*rank``, ``basis_A`` [heads*rank, d_in] holds A_i in the same rows.

==================  ================================================  ==========================
init                definition                                        B_i^T B_j (and A_i A_j^T)
==================  ================================================  ==========================
gram_schmidt        one QR of all heads' Gaussian columns together    I if i = j, else 0
random_normal       one QR per head                                   I if i = j, else generic
rv_random_normal    N(0, sigma^2) entries, no QR (RAVAN, sec. 3.1)    generic
shared_subspace     B_i = M R_i, A_i = R_i N (RAVAN, sec. 3.1)        R_i^T R_j
constant            B_i = B_1, A_i = A_1                              I
==================  ================================================  ==========================

RAVAN asks of the R_i only that they be invertible; here they are random orthogonal matrices, the
best conditioned choice, so that each single head keeps the isometry of eq. norm_equiv.

Draws and factorizations are made in float64 on the generator's device and cast at the end: with a
CPU generator the bases are the same for every target device.

Legend: d = width of one side, h = heads, r = rank.
"""

import functools
import logging
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from trishul_ray.errors import InputError

Init = Literal["gram_schmidt", "random_normal", "rv_random_normal", "shared_subspace", "constant"]
Overflow = Literal["error", "independent"]

_log = logging.getLogger(__name__)


def heads_that_fit(rank: int, d_out: int, d_in: int) -> int:
    """How many heads of ``rank`` can be mutually orthogonal: ``floor(min(d_out, d_in) / rank)``.

    Raises:
        InputError: if ``rank`` or a width is below 1.
    """
    _check_sizes(rank, d_out, d_in)
    return min(d_out, d_in) // rank


def draw_bases(
    init: Init,
    heads: int,
    rank: int,
    d_out: int,
    d_in: int,
    *,
    generator: torch.Generator,
    sigma: float | None = None,
    overflow: Overflow = "error",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Draws the frozen bases of one layer; see the module's table for the inits.

    Where ``heads * rank`` exceeds a side's width d, joint orthonormality is impossible there.
    ``overflow="error"`` refuses; ``"independent"`` keeps the first ``floor(d / rank)`` heads
    jointly orthonormal, gives the next head what is left of the orthogonal complement (completed
    to ``rank`` orthonormal columns), and every later head an orthonormal basis of its own. Each
    side is treated by its own width, and a warning is logged once per shape.

    Args:
        init: how to draw.
        heads: h >= 0; 0 gives empty bases.
        rank: r, 1 <= r <= min(d_out, d_in).
        d_out: output width of the layer.
        d_in: input width of the layer.
        generator: the only source of randomness; it is advanced.
        sigma: entry scale of ``rv_random_normal``; default ``1/sqrt(d)`` of each side, which
            gives columns of B_i and rows of A_i unit length on average.
        overflow: what to do if ``gram_schmidt`` heads do not fit.
        dtype: of the result.
        device: of the result.

    Returns:
        ``(basis_B, basis_A)`` of shapes [d_out, h*r] and [h*r, d_in], contiguous.

    Raises:
        InputError: for an unknown init, a size out of range, a rank above the width, a sigma that
            is not positive or given to another init, or heads that do not fit.
    """
    _check_sizes(rank, d_out, d_in)
    if init not in get_args(Init):
        raise InputError(f"init={init!r} is unknown; known: {', '.join(get_args(Init))}")
    if overflow not in get_args(Overflow):
        raise InputError(f"overflow={overflow!r} is unknown; known: {get_args(Overflow)}")
    if heads < 0:
        raise InputError(f"heads={heads} must be at least 0")
    if sigma is not None and init != "rv_random_normal":
        raise InputError(f"sigma={sigma} has no meaning for init={init!r}: leave it out")
    if sigma is not None and not (math.isfinite(sigma) and sigma > 0):
        raise InputError(f"sigma={sigma} must be positive and finite")
    if rank > min(d_out, d_in):
        raise InputError(
            f"rank={rank} exceeds the width {min(d_out, d_in)} of a {d_out}x{d_in} layer"
        )
    if heads == 0:
        empty = torch.empty(0, 0, dtype=dtype, device=device)
        return empty.new_empty(d_out, 0), empty.new_empty(0, d_in)
    if init == "gram_schmidt" and heads * rank > min(d_out, d_in):
        _overflow(overflow, heads, rank, d_out, d_in)

    columns = [_gaussian(d, heads * rank, generator) for d in (d_out, d_in)]
    if init == "gram_schmidt":
        sides = [_jointly_orthonormal(g, heads, rank) for g in columns]
    elif init == "random_normal":
        sides = [_orthonormal_heads(g, heads, rank) for g in columns]
    elif init == "rv_random_normal":
        sides = [g * (1 / math.sqrt(g.shape[0]) if sigma is None else sigma) for g in columns]
    elif init == "constant":
        sides = [_orthonormal(g[:, :rank]).repeat(1, heads) for g in columns]
    else:
        m, n = (_orthonormal(g[:, :rank]) for g in columns)  # [d_out, r], [d_in, r]
        mixes = _orthonormal(torch.stack([_gaussian(rank, rank, generator) for _ in range(heads)]))
        # A_i = R_i N, so the columns of A_i^T are N^T R_i^T.
        sides = [
            torch.cat([m @ mix for mix in mixes], dim=1),
            torch.cat([n @ mix.mT for mix in mixes], dim=1),
        ]
    basis_b, basis_a = sides[0], sides[1].mT
    return (
        basis_b.to(device=device, dtype=dtype).contiguous(),
        basis_a.to(device=device, dtype=dtype).contiguous(),
    )


def is_orthonormal(columns: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether the columns of a [d, k] matrix are orthonormal, entry by entry of the Gram matrix."""
    columns = columns.double()
    gram = columns.mT @ columns  # [k, d] x [d, k]
    identity = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    return bool(((gram - identity).abs() <= tolerance).all())


def _check_sizes(rank: int, d_out: int, d_in: int) -> None:
    for name, value in (("rank", rank), ("d_out", d_out), ("d_in", d_in)):
        if value < 1:
            raise InputError(f"{name}={value} must be at least 1")


def _overflow(overflow: Overflow, heads: int, rank: int, d_out: int, d_in: int) -> None:
    fit = heads_that_fit(rank, d_out, d_in)
    what = (
        f"heads x rank = {heads} x {rank} = {heads * rank} exceeds the width "
        f"{min(d_out, d_in)} of a {d_out}x{d_in} layer: {fit} heads of rank {rank} fit orthogonally"
    )
    if overflow == "error":
        raise InputError(f"{what}; use fewer heads, a lower rank or overflow=independent")
    _warn_once(f"{what}; the others get orthonormal bases of their own")


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(
        rows, columns, generator=generator, dtype=torch.float64, device=generator.device
    )


def _orthonormal(gaussian: Tensor) -> Tensor:
    """Q of the QR factorization of [..., d, k], k <= d, made unique by a positive diagonal of R."""
    q: Tensor
    r: Tensor
    q, r = torch.linalg.qr(gaussian)
    signs = torch.sign(torch.diagonal(r, dim1=-2, dim2=-1))  # [..., k]; zero has probability 0
    return q * signs.unsqueeze(-2)


def _orthonormal_heads(gaussian: Tensor, heads: int, rank: int) -> Tensor:
    """[d, h*r] whose blocks of r columns are each orthonormal, independently."""
    blocks = gaussian.reshape(-1, heads, rank).movedim(1, 0)  # [h, d, r]
    return _orthonormal(blocks).movedim(0, 1).flatten(1)


def _jointly_orthonormal(gaussian: Tensor, heads: int, rank: int) -> Tensor:
    """[d, h*r], orthonormal as a whole as far as d goes, and always head by head."""
    width = gaussian.shape[0]
    joint = _orthonormal(gaussian[:, :width])  # [d, min(d, h*r)]
    blocks = []
    for start in range(0, heads * rank, rank):
        end = start + rank
        block = joint[:, start:end]
        if end > width:
            # QR leaves the leading, already orthonormal columns as they are.
            block = _orthonormal(torch.cat([block, gaussian[:, max(start, width) : end]], dim=1))
        blocks.append(block)
    return torch.cat(blocks, dim=1)
