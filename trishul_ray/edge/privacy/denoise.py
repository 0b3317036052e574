"""Shrink the singular values of a noisy core; after the noise, this costs no privacy.

For X = signal + noise, a square matrix of rank r with independent entries of deviation sigma, the
singular values of noise alone end at 2 sigma sqrt r. With y = singular value / (sigma sqrt r)::

    shrink   eta(y) = sqrt(y^2 - 4) for y > 2, else 0   the least squared error (Gavish and Donoho,
             "Optimal Shrinkage of Singular Values", IEEE Trans. Inf. Theory 2017, eq. 7)
    hard     y where y > 4 / sqrt 3, else 0             (the same, 2014, square matrices)

Legend: n cores in a stack, r rank, W entries of the shared part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from trishul_ray.adapters.layout import Unit
from trishul_ray.lazy import torch
from trishul_ray.spectral.svt import eigen_of_grams
from trishul_ray.spectral.thresholds import noise_edge, optimal_shrinkage

if TYPE_CHECKING:
    from torch import Tensor


def shrink_cores(cores: Tensor, deviations: Tensor, how: Literal["shrink", "hard"]) -> Tensor:
    """Return each core with its singular values shrunk for noise of its own deviation.

    Args:
        cores: [n, r, r] float64.
        deviations: [n] float64, sigma of the noise on each entry; 0 leaves a core as it is.
        how: The map of the singular values.
    """
    x = cores
    squares, vectors = eigen_of_grams(x.mT @ x)  # [n, r], [n, r, r]
    values = squares.clamp(min=0.0).sqrt()
    if how == "shrink":
        kept = optimal_shrinkage(values, deviations)
    else:
        edge = noise_edge(deviations, cores.shape[-1]).unsqueeze(-1)  # [n, 1], 2 sigma sqrt r
        kept = torch.where(values > 2 / 3**0.5 * edge, values, 0.0)
    gains = torch.where(kept > 0, kept / values, 0.0)
    shrunk = (x @ vectors * gains.unsqueeze(-2)) @ vectors.mT  # without dividing by small values
    return torch.where(deviations[:, None, None] > 0, shrunk, x)


def denoise(
    noisy: np.ndarray,
    units: Sequence[Unit],
    deviations: np.ndarray,
    how: Literal["shrink", "hard"],
) -> np.ndarray:
    """Return [W] float64 with every core denoised, and all else as it is.

    Args:
        noisy: [W] float64.
        units: The units of the shared part, in the order of the wire.
        deviations: [U] float64, sigma of the noise on the entries of each unit.
        how: As :func:`shrink_cores`.
    """
    found = noisy.copy()
    by_rank: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        if unit.rank is not None:
            by_rank.setdefault(unit.rank, []).append(index)
    for rank, members in by_rank.items():
        stack = np.stack([noisy[units[i].wire].reshape(rank, rank) for i in members])
        shrunk = shrink_cores(torch.from_numpy(stack), torch.from_numpy(deviations[members]), how)
        for index, core in zip(members, shrunk.numpy(), strict=True):
            found[units[index].wire] = core.reshape(-1)
    return found
