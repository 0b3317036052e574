"""Thresholds of singular values that are estimated from cores, not set.

A core is taken as a signal plus noise of independent entries with standard deviation sigma:

* The singular values of pure noise fill [0, 2 sigma sqrt(r)], the edge, with density that of a
  quarter circle. Their median therefore estimates sigma, even beside a signal of low rank.
* :func:`hard_threshold` needs no sigma, and :func:`optimal_shrinkage` has the least squared error
  for a known one (Gavish and Donoho, arXiv 1305.5870 and 1405.7511; r to infinity, square).
* :func:`sure_threshold` minimizes Stein's unbiased estimate of the squared error of singular-value
  thresholding (Candes, Sing-Long and Trzasko, arXiv 1210.4139, real and square).

Singular values are float64 [n, r] in descending order. Legend: m clients, n cores, r rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from trishul_ray.runtime.lazy import torch
from trishul_ray.spectral.svt import SvtStats, singular_values

if TYPE_CHECKING:
    from torch import Tensor

#: Median of the singular values of square noise over sigma sqrt(r): that of the density
#: ``sqrt(4 - x^2) / pi`` on [0, 2]. Its square, 0.6528, is that of Marchenko and Pastur's law.
NOISE_MEDIAN = 0.8079455065990344

#: Gavish and Donoho's threshold of square cores with unknown noise, in medians: 2.858.
MEDIANS = 4 / math.sqrt(3) / NOISE_MEDIAN


def noise_level(values: Tensor) -> Tensor:
    """Return sigma [...], given the singular values [..., r], most of them of noise."""
    return values.quantile(0.5, dim=-1) / (NOISE_MEDIAN * math.sqrt(values.shape[-1]))


def hard_threshold(values: Tensor) -> Tensor:
    """Return the threshold [n] above which values [n, r] are kept as they are; unknown noise."""
    return MEDIANS * values.quantile(0.5, dim=-1)


def noise_edge(sigma: Tensor, rank: int) -> Tensor:
    """Return the largest singular value of pure noise, ``2 sigma sqrt(r)``."""
    return 2.0 * sigma * math.sqrt(rank)


def optimal_shrinkage(values: Tensor, sigma: Tensor) -> Tensor:
    """Return the values [n, r] shrunk for known noise [n]: ``sqrt(x^2 - 4 sigma^2 r)``, or zero."""
    edge = noise_edge(sigma, values.shape[-1])
    return (values.square() - edge.square()[:, None]).clamp(min=0.0).sqrt()


def client_noise(uploads: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the noise of clients' cores, and of their mean, from how clients differ.

    The estimate comes from the median singular value of each client's difference from the mean,
    because clients with different data also differ in a few large directions, which are no noise.
    ``X_c - sum_k w_k X_k`` has ``1 - 2 w_c + sum_k w_k^2`` times the variance of one client,
    (m - 1)/m for equal weights.

    Args:
        uploads: [m, n, r, r].
        weights: [m, n], at least 0; those of a core head sum to 1 over the clients that trained it.

    Returns:
        sigma of one client and of the mean, float64 [n] each; 0 where fewer than two trained.
    """
    x, w = uploads.double(), weights.double()
    squares = w.square().sum(dim=0)  # [n]
    differences = x - (w[..., None, None] * x).sum(dim=0)
    values = singular_values(differences.flatten(0, 1)).unflatten(0, x.shape[:2])  # [m, n, r]
    trained = w > 0
    share = torch.where(trained, 1.0 - 2.0 * w + squares, 1.0)
    known = trained.sum(dim=0) > 1  # the share of a single client is 0
    variance = torch.where(trained & known, noise_level(values).square() / share, 0.0)
    sigma = (variance.sum(dim=0) / trained.sum(dim=0).clamp(min=1)).sqrt()
    return sigma, sigma * squares.sqrt()


def sure_threshold(values: Tensor, sigma: Tensor) -> Tensor:
    """Return the threshold tau [n] of the least estimate of the squared error, which is exact.

    The estimate is ``-r^2 sigma^2 + sum_i min(tau, x_i)^2 + 2 sigma^2 divergence``.
    While k values are above tau, the estimate is a parabola of tau: its vertex, or the end of the
    interval next to it, is a candidate for every k, and so is the removal of everything.
    """
    variance = sigma.double().square()[:, None]  # [n, 1]
    constant, slope = divergences(values)  # [n, r + 1], by k
    none = torch.zeros_like(values[:, :1])
    upper, lower = torch.cat([values[:, :1], values], -1), torch.cat([values, none], -1)
    count = torch.arange(values.shape[-1] + 1, dtype=torch.float64)
    vertex = variance * slope / count.clamp(min=1)
    tau = torch.minimum(torch.maximum(vertex, lower), upper)
    squares = values.square().flip(-1).cumsum(-1).flip(-1)
    below = torch.cat([squares, none], -1)  # sum of x_i^2, i > k
    risk = count * tau.square() + below + 2 * variance * (constant - slope * tau)
    # Between equal values there is no interval, and the divergence is none.
    empty = upper - lower <= 1e-10 * values[:, :1]
    empty[:, 0] = False
    best = torch.where(empty, math.inf, risk).argmin(dim=-1, keepdim=True)
    return tau.gather(-1, best).squeeze(-1)


def divergences(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return c and d [n, r + 1] such that the divergence with k values above tau is c_k - d_k tau.

    The divergence is the sum of the derivatives of the thresholded entries by their own entries,
    ``k + 2 sum_{i<j<=k} (1 - tau/(x_i + x_j)) + 2 sum_{i<=k<j} x_i (x_i - tau)/(x_i^2 - x_j^2)``.
    Where k divides equal values, there is no such tau, and they mean nothing.
    """
    high, low = values[:, :, None], values[:, None, :]  # x_i, x_j
    both = (1.0 / (high + low)).triu(1).nan_to_num(posinf=0.0)  # i < j
    one = (high / (high.square() - low.square())).triu(1).nan_to_num(posinf=0.0)
    count = torch.arange(values.shape[-1] + 1, dtype=torch.float64)
    constant = count * count + 2 * _beyond(high * one)  # k + k (k - 1) = k^2
    return constant, 2 * (_within(both) + _beyond(one))


def _within(terms: Tensor) -> Tensor:
    """Return the sums [n, r + 1] of terms [n, r, r] over i < j <= k, for each k."""
    return torch.nn.functional.pad(terms.sum(dim=-2).cumsum(-1), (1, 0))


def _beyond(terms: Tensor) -> Tensor:
    """Return the sums [n, r + 1] of terms [n, r, r] over i <= k < j, for each k."""
    sums = terms.cumsum(-2).triu(1).sum(dim=-1)
    return torch.nn.functional.pad(sums, (1, 0))


def denoise(cores: Tensor, sigma: Tensor, how: Literal["edge", "sure"]) -> tuple[Tensor, SvtStats]:
    """Remove noise of known deviation [n] from finite cores [n, r, r], in float64.

    ``edge`` is :func:`optimal_shrinkage`, ``sure`` thresholding at :func:`sure_threshold`. A core
    without noise comes back as it is.
    """
    u, values, vt = torch.linalg.svd(cores.double())
    if how == "edge":
        tau, after = noise_edge(sigma, values.shape[-1]), optimal_shrinkage(values, sigma)
    else:
        tau = sure_threshold(values, sigma)
        after = (values - tau[:, None]).clamp(min=0.0)
    shrunk = (u * after.unsqueeze(-2)) @ vt
    shrunk = torch.where(sigma[:, None, None] > 0, shrunk, cores.double())
    return shrunk, SvtStats(before=values, after=after, threshold=tau)


def next_level(level: Tensor, rank: Tensor, target: float) -> Tensor:
    """Return the next logarithm of a threshold, by how far the effective rank is from its target.

    ``log tau <- log tau + (erank/r - target) / 2``: it stands still at the target.
    """
    return level + 0.5 * (rank - target)
