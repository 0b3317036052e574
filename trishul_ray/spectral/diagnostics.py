"""Diagnostics of one round's uploads: spectra, alignment between clients, variance.

All functions take one stack of cores and compute in float64. Conventions where the paper gives
none:

* An all-zero core has spectral entropy 0 and effective rank 0 (no direction in use, not one).
* A direction counts only if its singular value exceeds ``r * eps`` of the largest, with the eps of
  float32, the dtype of uploaded cores; the rest is rounding noise. Two subspaces of different size
  are compared by the principal angles of the smaller. A pair with a zero core is left out.
* Entropy, rank and similarity are plain means over cores, or over pairs of clients and heads. Only
  the aggregation variance uses the aggregation weights.
* Unrelated k-dimensional subspaces of R^r have principal-angle similarity k/r, not 0.
* The inconsistency index, which the paper plots but does not define, is 1 minus the principal-angle
  similarity.
* The paper's normalized variance is ``aggregation_variance`` divided by that of RAVAN in round 1
  of the same setting; reports do this division. ``relative_variance`` needs no other run.

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
    """Return ``-sum_j p_j log p_j``, ``p = sigma / sum sigma`` (TRISHUL, eq. spectral_entropy).

    For singular values [..., r] in any order it is float64 [...] in [0, log r]; 0 where all are 0.
    """
    values = values.double()
    total = values.sum(dim=-1, keepdim=True)
    shares = values / torch.where(total > 0, total, 1.0)
    terms: Tensor = torch.special.entr(shares)  # -p log p, 0 at p = 0
    return terms.sum(dim=-1)


def effective_rank(values: Tensor) -> Tensor:
    """Return ``exp(entropy)`` of singular values [..., r] as float64 [...]; 0 where all are 0."""
    rank = spectral_entropy(values).exp()
    return torch.where((values > 0).any(dim=-1), rank, 0.0)


def significant(values: Tensor) -> Tensor:
    """Return which singular values [..., r] exceed float32 rounding of the largest, as bool."""
    floor = values.shape[-1] * torch.finfo(torch.float32).eps
    return values > floor * values.amax(dim=-1, keepdim=True)


def left_spectrum(cores: Tensor, pool: Executor | None = None) -> tuple[Tensor, Tensor]:
    """Return left singular vectors and values of cores [..., n, r, r], in descending order.

    They come from the float64 Gram matrix ``X X^T``, at half the cost of an SVD. Values below about
    1e-8 of the largest, which float32 cores cannot resolve anyway, are noise of that size. The
    threads of a pool share the stack, with the same bits.

    Returns:
        ``(vectors, values)``: float64 [..., n, r, r] with vectors in columns, and [..., n, r].

    Raises:
        InputError: an entry is not finite.
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
    """Return the mean squared cosine of principal angles (TRISHUL, eq. principal_similarity).

    Args:
        vectors: [m, n, r, r] left singular vectors in columns, from :func:`left_spectrum`.
        values: [m, n, r] their singular values, descending.
        top_k: k >= 1, directions to compare; fewer where a core has fewer (or r is smaller).

    Returns:
        [n, m, m] float64, per head and pair of clients; NaN where either core is zero.
    """
    assert top_k >= 1, top_k
    used = significant(values)[..., :top_k]  # [m, n, k]
    bases = vectors[..., :top_k] * used.unsqueeze(-2)  # [m, n, r, k], unused columns zero
    m, n, r, k = bases.shape
    flat = bases.permute(1, 0, 3, 2).reshape(n, m * k, r)
    cosines = (flat @ flat.mT).reshape(n, m, k, m, k)  # u_{c,a} . u_{c',b}
    dimension = used.sum(dim=-1).mT.double()  # [n, m]
    angles = torch.minimum(dimension.unsqueeze(2), dimension.unsqueeze(1))  # [n, m, m]
    return cosines.square().sum(dim=(2, 4)) / torch.where(angles > 0, angles, math.nan)


def dominant_direction_similarity(vectors: Tensor, values: Tensor) -> Tensor:
    """Return ``|u_1^T v_1|`` per head and pair of clients, [n, m, m]; NaN where a core is zero."""
    return principal_angle_similarity(vectors, values, 1).sqrt()


def client_matrices(
    uploads: Tensor,
    top_k: int,
    active: Tensor | None = None,
    spectrum: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Compare every pair of clients of one round.

    Arguments are those of :func:`diagnose`.

    Returns:
        Float64 [m, m] each: ``inner_products``, the Frobenius inner products averaged over heads,
        where one that a client did not train is zero; and ``principal_angle_similarity`` and
        ``cosine``, means over the heads that both clients trained and that are zero in neither; NaN
        where there are none. Nothing is centred: centred on the mean of m clients, the entries off
        the diagonal are -1/(m-1) of it on average, whatever the uploads.

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
    """Return the variance of the uploads and the squared norm of their mean, by head.

    ``sum_c w_c ||Z_c - sum_c w_c Z_c||_F^2`` is the empirical variance of one upload; for equal
    weights, the variance of the mean of m independent clients is 1/m of it (TRISHUL, eq.
    variance_bound). The other is ``||sum_c w_c Z_c||_F^2``.

    Args:
        uploads: Z, [m, n, r, r].
        weights: [m], at least 0; normalized here over the clients that trained the head.
        active: [m, n] bool, which heads each client trained; None means all.

    Returns:
        Float64 [n] each; 0 for a head of total weight 0.
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
    """Return the paper's diagnostics of one round's uploads by metric name.

    Apply it to the uploaded cores and to their change since the broadcast: the former share the
    global core and therefore always look aligned.

    Args:
        uploads: [m, n, r, r], finite; cores of heads a client did not train are ignored.
        weights: [m] aggregation weights, at least 0, with any sum.
        top_k: directions in the principal-angle similarity, >= 1.
        active: [m, n] bool, which heads each client trained; None means all.
        spectrum: :func:`left_spectrum` of the uploads, zero where not active; None computes it.

    Returns:
        ``spectral_entropy``, ``effective_rank``, ``top_singular_value``, ``zeroed`` (share of
        singular values at or below rounding), ``aggregation_variance`` (mean over heads), all
        finite; ``relative_variance``, variance over signal (:func:`variance_and_signal`) of all
        heads, where the mean is not zero: for changes since the broadcast it does not depend on the
        scale of the learning rate; and, only where two clients have nonzero cores of the same head,
        ``principal_angle_similarity``, ``inconsistency_index``, ``dominant_similarity`` and
        ``client_cosine`` (mean cosine between the cores of two clients). Empty if there is no
        active core.

    Raises:
        InputError: An entry is not finite.
    """
    _check(uploads, weights, active, top_k)
    uploads = uploads.detach().double()
    if active is None:
        active = torch.ones(uploads.shape[:2], dtype=torch.bool, device=uploads.device)
    else:
        # An untrained head may hold any values; zeros take it out of every figure.
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
    """Return the means over pairs of clients and heads; empty without a pair of nonzero cores.

    Cores that a client did not train are zero in ``uploads`` [m, n, r, r] and in its spectrum.
    """
    m = len(uploads)
    first, second = torch.triu_indices(m, m, offset=1)
    angle = principal_angle_similarity(vectors, values, top_k)[:, first, second]
    pairs = angle.isfinite()  # a pair with a zero core is NaN
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
    """Return the cosines [n, m, m] between two clients' cores of one head; 0 for a zero core."""
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
