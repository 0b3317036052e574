"""Rules for the threshold of singular values that the server takes part in (``method.rule``).

``entropy`` moves the threshold of each core head toward a target of effective rank; ``edge`` and
``sure`` take the noise off the mean that the spread of the uploads tells. All are our own choice.

Legend: n core heads over all layers, in the order of the layout; P trainables of a client, W
entries of the shared part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.messages import ClientUpload, Tensors
from trishul_ray.runtime.lazy import torch
from trishul_ray.spectral.diagnostics import effective_rank
from trishul_ray.spectral.svt import SvtStats, singular_values
from trishul_ray.spectral.thresholds import client_noise, denoise, next_level

if TYPE_CHECKING:
    from torch import Tensor

#: Defaults of ``method.level`` by rule. ρ is also where the rule ``entropy`` starts.
LEVELS = {"relative": 0.03, "entropy": 0.35, "continuation": 1.0}

#: Factor of λ after a round, with continuation.
DECAY = 0.9


def rank_shares(layout: Layout, vector: Tensor) -> Tensor:
    """Return the effective rank over r of each core in a vector [P], float64 [n] on the host."""
    banks = layout.core_banks(vector.cpu())
    return torch.cat([effective_rank(singular_values(x)) / x.shape[-1] for x in banks])


def next_shares(before: Tensor, mean: Tensors, target: float) -> Tensor:
    """Return log ρ of each core head [n] for the next round.

    Args:
        before: Shares of this round.
        mean: Means over clients: ``trained``, the share that trained a core head, and ``rank``,
            its :func:`rank_shares` where it was trained and 0 elsewhere.
        target: Target of the effective rank over r. A core head that nobody trained keeps its ρ.
    """
    trained = mean["trained"]
    known = trained > 0
    rank = mean["rank"] / torch.where(known, trained, 1.0)
    return next_level(before, torch.where(known, rank.clamp(0.0, 1.0), target), target)


def denoised(
    mean: Tensor,
    before: Tensor,
    uploads: Sequence[ClientUpload],
    layout: Layout,
    rule: Literal["edge", "sure"],
    on_change: bool,
) -> tuple[Tensor, list[SvtStats]]:
    """Return the mean [W] without the noise that the spread of the uploads tells, and spectra.

    Args:
        mean: Mean of the uploads, [W].
        before: Broadcast, [W].
        uploads: Uploads of clients that do not shrink: shrunk cores spread less than the noise.
        layout: Names of the trainables; cores come first in [P] and in [W].
        rule: See :func:`~trishul_ray.spectral.thresholds.denoise`.
        on_change: Whether the change since the broadcast is denoised, not the core.
    """

    def cores_of(shared: Tensor) -> list[Tensor]:
        return layout.core_banks(torch.nn.functional.pad(shared, (0, layout.size - len(shared))))

    banks, origins = cores_of(mean), cores_of(before)
    sent = [cores_of(upload.arrays.shared) for upload in uploads]
    heads = [len(bank) for bank in banks]
    weights = torch.zeros(len(sent), sum(heads), dtype=torch.float64)
    for row, upload in zip(weights, uploads, strict=True):
        row += upload.weight
        if upload.trained is not None:
            row *= upload.trained[: len(row)]
    weights /= weights.sum(dim=0).clamp(min=1e-300)
    parts, stats = [], []
    for number, (bank, shares) in enumerate(zip(banks, weights.split(heads, 1), strict=True)):
        _, sigma = client_noise(torch.stack([cores[number] for cores in sent]), shares)
        origin = origins[number].double() if on_change else torch.zeros_like(bank).double()
        shrunk, found = denoise(bank.double() - origin, sigma, rule)
        denoised = torch.where(sigma[:, None, None] > 0, origin + shrunk, bank.double())
        parts.append(denoised.float().flatten())
        stats.append(found)
    rest = sum(len(part) for part in parts)
    return torch.cat([*parts, mean[rest:]]), stats
