"""Singular-value thresholding: the proximal map of the nuclear norm on a stack of cores.

``prox_{tau ||.||_*}(X) = U diag((sigma - tau)_+) V^T`` for ``X = U diag(sigma) V^T`` (TRISHUL, eq.
svt). It runs after every local step and must be cheap:

* On a CPU, the eigenvectors V of the Gram matrix ``X^T X`` in float64 give the result as ``X V
  diag(1 - tau / max(sigma, tau)) V^T``, without dividing by a small number and without U. Squaring
  loses half the digits, which float64 can spare for float32 cores: errors stay below about 1e-7 of
  the largest singular value. (A float32 Gram matrix would lose every singular value below 3e-4 of
  the largest.) If PyTorch has several threads, each thread decomposes a part of the stack, because
  LAPACK loses time if it divides such small matrices among threads.
* On a GPU, where batched eigensolvers are slow at these sizes and block the host,
  :func:`svt_by_iteration` computes the same map using only batched matrix products, the same ones
  for any values.
* A core whose spectral norm is provably at most tau, by ``sigma_1^2 <= ||X^T X||_F``, becomes zero
  without a decomposition.

A core with a NaN or infinite entry becomes NaN and does not affect the others. A diverged client is
thus detected when its upload is validated, not by an exception in its local step.

Legend: n cores in the stack, r rank (side of a core), k number of singular values kept.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from trishul_ray.runtime.cuda_graphs import replayed
from trishul_ray.runtime.device import set_threads_of_thread
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Upper bound of the Newton-Schulz scalings. At sqrt(3) the map would send 1 to 0, and rounding
#: could flip a sign; 1.7 sends 1 to 0.09 and still multiplies small values by 2.55.
_LARGEST_SCALING = 1.7

#: Resolution of the iteration relative to the largest singular value: smaller values may be lost,
#: and values closer than this to the threshold may be shrunk inexactly.
_RESOLUTION = 5e-7

#: Number of cores that a thread decomposes at once. A multiple of 8: every part of a stack then
#: starts at a multiple of 64 bytes for any rank, and rounding in LAPACK depends on the alignment of
#: its input.
PART = 16

#: Maximum number of host threads that decompose the cores of a GPU, which waits for them.
_HOST_THREADS = 8


@dataclass(frozen=True)
class SvtStats:
    """Spectra of a stack of n cores before and after thresholding.

    Attributes:
        before: [n, r] float64, singular values before, descending.
        after: [n, r] float64, singular values after, descending.
        threshold: tau.
    """

    before: Tensor
    after: Tensor
    threshold: float


def svt(cores: Tensor, threshold: float) -> Tensor:
    """Apply the proximal map of ``threshold * ||.||_*`` to each core (TRISHUL, eq. svt).

    Args:
        cores: [n, r, r], float32 or float64 (float64 is not computed more accurately); n may be 0.
        threshold: tau >= 0; 0 returns a bitwise copy.

    Returns:
        [n, r, r] on the same device and of the same dtype, without gradient history, within 1e-6 of
        the largest singular value of the exact result. Non-finite cores become NaN.
    """
    if cores.device.type != "cpu":
        return svt_by_iteration(cores, threshold)
    _check(cores, threshold)
    if cores.numel() == 0 or threshold == 0.0:
        return cores.detach().clone()
    with torch.no_grad():
        return _svt_by_gram(cores, threshold)


def svt_of_stacks(stacks: Sequence[tuple[Tensor, float]]) -> list[Tensor]:
    """Apply :func:`svt` to stacks [n_i, r_i, r_i], each with its threshold.

    On a GPU, consecutive stacks with equal ranks and thresholds are concatenated, to launch the
    kernels of only one stack. Each result equals the separate result up to the last bits.
    """
    found: list[Tensor] = []
    for (_, threshold), same in groupby(stacks, lambda each: (each[0].shape[-1], each[1])):
        cores = [stack for stack, _ in same]
        if cores[0].device.type == "cpu" or len(cores) == 1:
            found += [svt(core, threshold) for core in cores]
        else:
            found += svt(torch.cat(cores), threshold).split([len(core) for core in cores])
    return found


def svt_stats(cores: Tensor, threshold: float) -> SvtStats:
    """Compute the spectra of cores before and after :func:`svt`, in host memory.

    Every core is decomposed on the host, which waits: for 96 cores of 110 x 110, a GPU takes
    several times as long as a CPU, because it decomposes them sequentially. Singular values below
    about 1e-8 of a core's largest are rounding noise of that size. A non-finite core has NaN.
    """
    _check(cores, threshold)
    on_host = cores.device.type == "cpu"
    threads = 1 if on_host else min(_HOST_THREADS, os.cpu_count() or 1)
    values = singular_values(cores.cpu(), threads)
    return SvtStats(values, (values - threshold).clamp(min=0.0), threshold)


def svt_summary(stats: Iterable[SvtStats]) -> dict[str, float]:
    """Summarize the thresholding of several stacks of any ranks.

    Returns:
        ``zeroed``, the fraction of singular values that are zero afterwards, and
        ``energy_removed``, the fraction of the squared Frobenius norm that was removed. An empty
        fraction is 0.0.
    """
    stats = list(stats)
    count = sum(s.after.numel() for s in stats)
    zeros = sum(int((s.after == 0).sum()) for s in stats)
    before = math.fsum(float(s.before.square().sum()) for s in stats)
    after = math.fsum(float(s.after.square().sum()) for s in stats)
    return {
        "zeroed": zeros / count if count else 0.0,
        "energy_removed": 1.0 - after / before if before else 0.0,
    }


def singular_values(cores: Tensor, threads: int = 1) -> Tensor:
    """Compute the singular values of [n, r, r] as float64 [n, r], descending.

    A non-finite core has NaN. Several threads share the stack; PyTorch uses one thread in each.
    """
    if threads > 1 and len(cores) > PART:
        parts = _threads(threads, os.getpid()).map(singular_values, cores.split(PART))
        return torch.cat(list(parts))
    x = cores.detach().double()
    gram = x.mT @ x
    finite = gram.isfinite().flatten(1).all(dim=-1)  # [n]
    # Indexing with a mask would make the host wait to count its entries.
    squares = torch.linalg.eigvalsh(torch.where(finite[:, None, None], gram, 0.0))
    return torch.where(finite[:, None], squares.clamp(min=0.0).sqrt().flip(-1), math.nan)


def svt_by_iteration(cores: Tensor, threshold: float, dtype: torch.dtype | None = None) -> Tensor:
    """Apply the same map using only batched matrix products, as on GPUs.

    With the polar factors ``X = Q S`` the result is ``Q (S - tau I)_+``, and the positive part is
    ``(Y + Y sign(Y)) / 2`` for ``Y = S - tau I``. Q and the sign come from scaled Newton-Schulz
    iterations (Chen and Chow, 2014). Their number is fixed, so the host never waits for the GPU.
    Removed singular values become rounding noise instead of exact zeros.

    Arguments, return value and errors are the same as for :func:`svt`. The products are computed in
    ``dtype``, by default (and always for float64 cores) in float64; in float32, errors are a few
    1e-6 of the largest singular value.
    """
    _check(cores, threshold)
    if cores.numel() == 0 or threshold == 0.0:
        return cores.detach().clone()
    dtype = torch.promote_types(dtype or torch.float64, cores.dtype)

    def shrink(cores: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        return (_iterate(cores, threshold[:, None, None], dtype),)

    # A CUDA graph would record a Python number as a constant.
    tau = torch.full(cores.shape[:1], threshold, dtype=dtype, device=cores.device)
    return replayed(("svt", dtype), shrink, cores.detach(), tau)[0]


def _iterate(cores: Tensor, threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """Shrink cores [n, r, r] by thresholds [n, 1, 1] in few kernels."""
    with torch.no_grad():
        scalings = _newton_schulz_scalings(_RESOLUTION)
        # [n, 1, 1]; NaN and infinity remain, and appear in the result as zero times their size.
        peak = torch.linalg.vector_norm(cores, math.inf, dim=(-2, -1), keepdim=True, dtype=dtype)
        peak = peak.clamp(min=torch.finfo(dtype).tiny)
        x = torch.where(peak < math.inf, cores / peak, 0.0)  # [n, r, r], entries <= 1
        # sigma_1 <= sqrt(||X^T X||_F), at most r^(1/4) too large; at least 1 unless X = 0.
        gram = x.mT @ x
        bound = torch.linalg.matrix_norm(gram, keepdim=True).sqrt().clamp(min=1.0)
        x, size = x / bound, peak * bound
        tau = threshold / size  # [n, 1, 1], in units of the bound
        q = _newton_schulz(x, scalings)
        s = q.mT @ x
        y = (s + s.mT) / 2
        y.diagonal(dim1=-2, dim2=-1).sub_(tau.clamp(max=1.0).squeeze(-1))
        positive = torch.baddbmm(y, y, _newton_schulz(y, scalings), beta=0.5, alpha=0.5)
        shrunk: Tensor = torch.where(tau < 1.0, q @ positive, 0.0) * size
        return shrunk.to(cores.dtype)


def _svt_by_gram(cores: Tensor, threshold: float) -> Tensor:
    x = cores.double()
    gram = x.mT @ x
    size = torch.linalg.matrix_norm(gram)  # [n], >= sigma_1^2
    finite = size.isfinite()
    nonzero = finite & (size > threshold * threshold)  # the others certainly become zero
    if bool(nonzero.all()):
        return _shrink(x, gram, threshold).to(cores.dtype)
    result = torch.zeros_like(cores)
    result[~finite] = math.nan
    if bool(nonzero.any()):
        result[nonzero] = _shrink(x[nonzero], gram[nonzero], threshold).to(cores.dtype)
    return result


def _shrink(x: Tensor, gram: Tensor, threshold: float) -> Tensor:
    squares, vectors = eigen_of_grams(gram)  # ascending [n, r], [n, r, r]
    values = squares.clamp(min=0.0).sqrt()
    kept = int((values > threshold).sum(dim=-1).max())
    first = values.shape[-1] - kept
    values, vectors = values[:, first:], vectors[:, :, first:]  # [n, k], [n, r, k]
    gains = 1.0 - threshold / values.clamp(min=threshold)  # exactly 0 for values <= tau
    return ((x @ vectors) * gains.unsqueeze(-2)) @ vectors.mT  # [n, r, k] x [n, k, r]


def eigen_of_grams(grams: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``torch.linalg.eigh`` of [n, r, r]; last bits depend on ``resources.threads``."""
    threads = min(torch.get_num_threads(), len(grams))
    if threads == 1:
        values, vectors = torch.linalg.eigh(grams)
        return values, vectors
    found = list(_threads(threads, os.getpid()).map(torch.linalg.eigh, grams.chunk(threads)))
    return torch.cat([values for values, _ in found]), torch.cat([vectors for _, vectors in found])


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Create threads in which PyTorch and LAPACK use one thread, per process."""
    return ThreadPoolExecutor(count, "svt", set_threads_of_thread, (1,))


def _newton_schulz_scalings(resolution: float) -> list[float]:
    """Compute scalings that map ``[resolution, 1]`` to within 1e-8 of 1, each optimal in turn."""
    lower, scalings = resolution, []
    while 1.0 - lower > 1e-8:
        best = math.sqrt(3.0 / (1.0 + lower + lower * lower))
        scaling = min(best, _LARGEST_SCALING)
        scalings.append(scaling)
        # Both ends of the interval map to its new lower end; the interior lies above them.
        lower = min(_step(lower, scaling), _step(1.0, scaling))
    return scalings


def _step(value: float, scaling: float) -> float:
    scaled = scaling * value
    return 0.5 * scaled * (3.0 - scaled * scaled)


def _newton_schulz(x: Tensor, scalings: list[float]) -> Tensor:
    """Drive every nonzero singular value (at most 1) of [n, r, r] to 1; zeros stay zero."""
    for c in scalings:
        x = torch.baddbmm(x, x, x.mT @ x, beta=1.5 * c, alpha=-0.5 * c**3)
    return x


def _check(cores: Tensor, threshold: float) -> None:
    assert cores.ndim == 3 and cores.shape[-1] == cores.shape[-2], cores.shape
    assert cores.dtype in (torch.float32, torch.float64), cores.dtype
    assert math.isfinite(threshold) and threshold >= 0.0, threshold
