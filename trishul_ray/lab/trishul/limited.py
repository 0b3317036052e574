"""Clients of limited compute that train a part of every core, or of every factor.

A client that can compute a share of the budget trains the first ``r_c = sqrt(share) r`` rows and
columns of each core, so that its bases are the first columns of those of all. An entry is averaged
over the clients that hold it: dividing by all of them would shrink what only few hold, round after
round (raFLoRA, arXiv 2602.13486).

Legend: P trainables of a client, r rank of a core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trishul_ray.adapters.layout import Layout
from trishul_ray.config.fields import COMPUTE_LEVELS
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def over_holders(mean: Tensor, old: Tensor, share: Tensor) -> Tensor:
    """Return the mean over the clients that hold an entry, given the mean over all of them.

    All clients have the ``old`` value of what they do not hold. ``share`` is that of the clients
    that hold an entry, and broadcasts to the shape of the others; where it is 0, nothing moves.
    """
    moved = torch.where(share > 0, old + (mean - old) / share, old)
    return torch.where(share == 1, mean, moved)


def leading_rank(rank: int, share: float) -> int:
    """Return how many rows and columns of a core a client of that share trains, at least one."""
    return max(1, math.floor(rank * math.sqrt(share)))


def leading_entries(layout: Layout, vector: Tensor, share: float) -> Tensor:
    """Return [P] bool, what a client of that share trains of a vector [P].

    Scalars are left out: they would scale all of a core.
    """
    every = torch.ones_like(vector)
    for name, view in layout.views(every).items():
        kind = layout.entry(name).kind
        if kind == "core":
            lead = leading_rank(view.shape[-1], share)
            view[:, lead:] = 0
            view[:, :, lead:] = 0
        elif kind == "scale":
            view.zero_()
    return every > 0


def level_of(share: float) -> Tensor:
    """Return which of the levels of compute a client has, as 1 among zeros."""
    return torch.tensor([float(level == share) for level in COMPUTE_LEVELS])


def average_leading(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], levels: Tensor, layout: Layout
) -> None:
    """Average each entry of a core over the clients that hold it.

    Args:
        new: Means over all clients by name; means of cores are changed in place.
        old: Broadcast tensors by name.
        levels: Share of the clients at each level of compute.
        layout: Names of the trainables.
    """
    for name, mean in new.items():
        if layout.entry(name).kind != "core":
            continue
        rank, shares = mean.shape[-1], torch.zeros(mean.shape[-1], dtype=torch.float64)
        for level, share in zip(COMPUTE_LEVELS, levels.double(), strict=True):
            shares[: leading_rank(rank, level)] += share
        share = torch.minimum(shares[:, None], shares[None, :])  # of the larger index
        mean.copy_(over_holders(mean.double(), old[name].double(), share))
