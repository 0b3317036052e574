"""Diagnostics of one round's uploads: spectra, alignment between clients, variance.

All functions operate on one stack of cores and compute in float64. If the paper does not define a
convention, they use these:

* An all-zero core has spectral entropy 0 and effective rank 0 (no direction is used, rather than
  one).
* A direction counts only if its singular value exceeds ``r * eps`` times the largest, with the eps
  of float32, the dtype of uploaded cores; smaller values are rounding noise. Two subspaces of
  different dimensions are compared by the principal angles of the smaller subspace. Pairs with a
  zero core are excluded.
* Entropy, rank and similarity are unweighted means over cores, or over pairs of clients and heads.
  Only the aggregation variance uses the aggregation weights.
* Unrelated k-dimensional subspaces of R^r have a principal-angle similarity of k/r, not 0.
* The inconsistency index, which the paper plots but does not define, is 1 minus the principal-angle
  similarity.
* The paper's normalized variance is ``aggregation_variance`` divided by the value of RAVAN in round
  1 of the same setting; reports perform this division. ``relative_variance`` does not need another
  run.

Legend: m clients, n cores of a client (heads over all layers), r rank, k directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.spectral.svt import PART

if TYPE_CHECKING:
    from torch import Tensor

#: Names of the metrics that :func:`diagnose` returns.
DIAGNOSTICS = (
    "spectral_entropy",
    "effective_rank",
    "top_singular_value",
    "zeroed",
    "aggregation_variance",
    "relative_variance",
    "principal_angle_similarity",
    "inconsistency_index",
    "dominant_similarity",
    "client_cosine",
)


def stack_spectra(spectra: Sequence[Tensor]) -> Tensor:
    """Stack singular values [n_i, r_i] of several ranks into [sum n_i, max r], padded with NaN."""
    width = max((values.shape[1] for values in spectra), default=0)
    padded = [
        torch.nn.functional.pad(values, (0, width - values.shape[1]), value=math.nan)
        for values in spectra
    ]
    return torch.cat(padded) if padded else torch.zeros(0, 0, dtype=torch.float64)


def spectral_entropy(values: Tensor) -> Tensor:
    """Compute the spectral entropy of singular values (TRISHUL, eq. spectral_entropy).

    The entropy is ``-sum_j p_j log p_j`` with ``p = sigma / sum sigma``.

    Args:
        values: [..., r], singular values in any order.

    Returns:
        Float64 [...] in [0, log r]; 0 if all values are 0.
    """
    values = values.double()
    total = values.sum(dim=-1, keepdim=True)
    shares = values / torch.where(total > 0, total, 1.0)
    terms: Tensor = torch.special.entr(shares)  # -p log p, 0 at p = 0
    return terms.sum(dim=-1)


def effective_rank(values: Tensor) -> Tensor:
    """Compute ``exp(entropy)`` of singular values [..., r] as float64 [...]; 0 if all are 0."""
    rank = spectral_entropy(values).exp()
    return torch.where((values > 0).any(dim=-1), rank, 0.0)


def significant(values: Tensor) -> Tensor:
    """Return a mask of the singular values [..., r] that exceed float32 rounding of the largest."""
    floor = values.shape[-1] * torch.finfo(torch.float32).eps
    return values > floor * values.amax(dim=-1, keepdim=True)


def left_spectrum(cores: Tensor, pool: Executor | None = None) -> tuple[Tensor, Tensor]:
    """Compute left singular vectors and values of cores [..., n, r, r], in descending order.

    They come from the float64 Gram matrix ``X X^T``, at half the cost of an SVD. Values below about
    1e-8 of the largest, which float32 cores cannot resolve, are noise of that size.

    Args:
        cores: [..., n, r, r], finite.
        pool: Threads that share the stack; they do not change the bits of the result.

    Returns:
        ``(vectors, values)``: float64 [..., n, r, r] with vectors in columns, and [..., n, r].

    Raises:
        InputError: An entry is not finite.
    """
    x = cores.detach().double()
    if not bool(x.isfinite().all()):
        raise InputError("cores have NaN or infinite entries: validate uploads first")
    parts = x.flatten(0, -3).split(PART)
    found = list((map if pool is None else pool.map)(_left_spectrum, parts))
    vectors, values = (torch.cat(each) for each in zip(*found, strict=True))
    return vectors.view(x.shape), values.view(x.shape[:-1])


def _left_spectrum(x: Tensor) -> tuple[Tensor, Tensor]:
    squares, vectors = torch.linalg.eigh(x @ x.mT)
    return vectors.flip(-1), squares.clamp(min=0.0).sqrt().flip(-1)


def principal_angle_similarity(vectors: Tensor, values: Tensor, top_k: int) -> Tensor:
    """Compute the mean squared cosine of principal angles (TRISHUL, eq. principal_similarity).

    Args:
        vectors: [m, n, r, r], left singular vectors in columns, from :func:`left_spectrum`.
        values: [m, n, r], their singular values, descending.
        top_k: k >= 1, number of directions to compare; fewer if a core has fewer or r is smaller.

    Returns:
        [n, m, m] float64, per head and pair of clients; NaN if either core is zero.
    """
    assert top_k >= 1, top_k
    used = significant(values)[..., :top_k]  # [m, n, k]
    bases = vectors[..., :top_k] * used.unsqueeze(-2)  # [m, n, r, k], unused columns are zero
    m, n, r, k = bases.shape
    flat = bases.permute(1, 0, 3, 2).reshape(n, m * k, r)
    cosines = (flat @ flat.mT).reshape(n, m, k, m, k)  # u_{c,a} . u_{c',b}
    dimension = used.sum(dim=-1).mT.double()  # [n, m]
    angles = torch.minimum(dimension.unsqueeze(2), dimension.unsqueeze(1))  # [n, m, m]
    return cosines.square().sum(dim=(2, 4)) / torch.where(angles > 0, angles, math.nan)


def dominant_direction_similarity(vectors: Tensor, values: Tensor) -> Tensor:
    """Compute ``|u_1^T v_1|`` per head and pair of clients, [n, m, m]; NaN if a core is zero."""
    return principal_angle_similarity(vectors, values, 1).sqrt()


def client_matrices(
    uploads: Tensor,
    top_k: int,
    active: Tensor | None = None,
    spectrum: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Compare every pair of clients of one round.

    The arguments are the same as for :func:`diagnose`.

    Returns:
        Three float64 matrices [m, m]. ``inner_products`` has the Frobenius inner products averaged
        over heads, with zero for heads that a client did not train. ``principal_angle_similarity``
        and ``cosine`` are means over the heads that both clients trained and that are nonzero in
        both, or NaN without such heads. The matrices are not centered: with uploads centered on the
        mean of m clients, the off-diagonal entries would be -1/(m-1) of the diagonal on average,
        whatever the uploads.

    Raises:
        InputError: An entry is not finite.
    """
    uploads = uploads.detach().double()
    if active is not None:
        uploads = uploads.masked_fill(~active[..., None, None], 0.0)
    angle = principal_angle_similarity(*(spectrum or left_spectrum(uploads)), top_k)  # [n, m, m]
    cosine = torch.where(angle.isnan(), math.nan, _cosines(uploads))
    flat = uploads.flatten(1)  # [m, n*r*r]
    return {
        "inner_products": flat @ flat.mT / max(uploads.shape[1], 1),
        "principal_angle_similarity": angle.nanmean(dim=0),
        "cosine": cosine.nanmean(dim=0),
    }


def variance_and_signal(
    uploads: Tensor, weights: Tensor, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the variance of the uploads and the squared norm of their mean, per head.

    The variance ``sum_c w_c ||Z_c - sum_c w_c Z_c||_F^2`` is the empirical variance of one upload.
    For equal weights, the mean of m independent clients has 1/m of this variance (TRISHUL, eq.
    variance_bound). The signal is ``||sum_c w_c Z_c||_F^2``.

    Args:
        uploads: Z, [m, n, r, r].
        weights: [m], nonnegative; normalized over the clients that trained the head.
        active: [m, n] bool, the heads that each client trained; None means all.

    Returns:
        ``(variance, signal)``, float64 [n] each; 0 for a head with total weight 0.
    """
    _check(uploads, weights, active)
    z = uploads.detach().double().flatten(2)  # [m, n, r*r]
    w = weights.to(z).unsqueeze(1).expand(z.shape[:2])
    if active is not None:
        w = torch.where(active, w, 0.0)
    total = w.sum(dim=0)
    w = w / torch.where(total > 0, total, 1.0)  # [m, n]
    mean = (w.unsqueeze(-1) * z).sum(dim=0)  # [n, r*r]
    return (w * (z - mean).square().sum(dim=-1)).sum(dim=0), mean.square().sum(dim=-1)


def diagnose(
    uploads: Tensor,
    weights: Tensor,
    top_k: int,
    active: Tensor | None = None,
    spectrum: tuple[Tensor, Tensor] | None = None,
) -> dict[str, float]:
    """Compute the paper's diagnostics of one round's uploads, keyed by metric name.

    Apply it both to the uploaded cores and to their change since the broadcast: all uploaded cores
    include the global core and therefore always look aligned.

    Args:
        uploads: [m, n, r, r], finite; cores of heads that a client did not train are ignored.
        weights: [m], nonnegative aggregation weights with any sum.
        top_k: Number of directions in the principal-angle similarity, >= 1.
        active: [m, n] bool, the heads that each client trained; None means all.
        spectrum: :func:`left_spectrum` of the uploads, zero where not active; None computes it.

    Returns:
        The metrics; empty without an active core. Always present and finite are
        ``spectral_entropy``, ``effective_rank``, ``top_singular_value``, ``zeroed`` (fraction of
        singular values at or below rounding) and ``aggregation_variance`` (mean over heads).
        ``relative_variance``, the variance over the signal (:func:`variance_and_signal`) of all
        heads, is present if the mean is not zero; for changes since the broadcast it is independent
        of the scale of the learning rate. ``principal_angle_similarity``, ``inconsistency_index``,
        ``dominant_similarity`` and ``client_cosine`` (mean cosine between the cores of two clients)
        are present if two clients have nonzero cores of the same head.

    Raises:
        InputError: An entry is not finite.
    """
    _check(uploads, weights, active, top_k)
    uploads = uploads.detach().double()
    if active is None:
        active = torch.ones(uploads.shape[:2], dtype=torch.bool, device=uploads.device)
    else:
        # An untrained head may have any values; zeros exclude it from every metric.
        uploads = uploads.masked_fill(~active[..., None, None], 0.0)
    if not bool(active.any()):
        return {}
    vectors, values = spectrum or left_spectrum(uploads)
    trained = values[active]  # [cores, r]
    variance, signal = variance_and_signal(uploads, weights, active)
    result = {
        "spectral_entropy": float(spectral_entropy(trained).mean()),
        "effective_rank": float(effective_rank(trained).mean()),
        "top_singular_value": float(trained[:, 0].mean()),
        "zeroed": 1.0 - float(significant(trained).double().mean()),
        "aggregation_variance": float(variance[active.any(dim=0)].mean()),
    }
    relative = float(variance.sum() / signal.sum())
    if math.isfinite(relative):
        result["relative_variance"] = relative
    return result | _compare_pairs(uploads, vectors, values, top_k)


def _compare_pairs(
    uploads: Tensor, vectors: Tensor, values: Tensor, top_k: int
) -> dict[str, float]:
    """Average the similarities over pairs of clients and heads.

    Cores that a client did not train are zero in ``uploads`` [m, n, r, r] and in its spectrum.

    Returns:
        The metrics; empty without a pair of nonzero cores.
    """
    m = len(uploads)
    first, second = torch.triu_indices(m, m, offset=1)
    angle = principal_angle_similarity(vectors, values, top_k)[:, first, second]
    pairs = angle.isfinite()  # Pairs with a zero core are NaN.
    if not bool(pairs.any()):
        return {}
    dominant = dominant_direction_similarity(vectors, values)[:, first, second]
    cosine = _cosines(uploads)[:, first, second]
    similarity = float(angle[pairs].mean())
    return {
        "principal_angle_similarity": similarity,
        "inconsistency_index": 1.0 - similarity,
        "dominant_similarity": float(dominant[pairs].mean()),
        "client_cosine": float(cosine[pairs].mean()),
    }


def _cosines(uploads: Tensor) -> Tensor:
    """Compute the cosines [n, m, m] between two clients' cores of one head; 0 for a zero core."""
    z = uploads.flatten(2).movedim(1, 0)  # [n, m, r*r]
    norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    z = z / torch.where(norms > 0, norms, 1.0)
    return z @ z.mT


def _check(uploads: Tensor, weights: Tensor, active: Tensor | None, top_k: int = 1) -> None:
    assert uploads.ndim == 4 and uploads.shape[2] == uploads.shape[3], uploads.shape
    m, n = uploads.shape[:2]
    assert weights.shape == (m,), weights.shape
    assert bool((weights >= 0).all() & weights.isfinite().all()), weights
    assert active is None or active.shape == (m, n), active
    assert top_k >= 1, top_k
