"""Clients that train a part of every core: its leading rows and columns.

A client that can compute a share of the budget trains the first ``r_c = sqrt(share) r`` rows and
columns of each core, so that its bases are the first columns of those of all. An entry is averaged
over the clients that hold it: dividing by all of them would shrink what only few hold, round after
round (raFLoRA, arXiv 2602.13486).

Legend: P trainables of a client, r rank of a core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trishul_ray.adapters.layout import Layout
from trishul_ray.config import COMPUTE_LEVELS
from trishul_ray.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def leading_rank(rank: int, share: float) -> int:
    """Return how many rows and columns of a core a client of that share trains, at least one."""
    return max(1, math.floor(rank * math.sqrt(share)))


@dataclass(frozen=True)
class Leading:
    """What a limited client trains.

    Attributes:
        share: Its share of the budget.
        entries: [P] bool, the entries that it trains: not the scalars, which would scale all of a
            core.
        start: [P], the vector before the first step.
    """

    share: float
    entries: Tensor
    start: Tensor

    @classmethod
    def of(cls, layout: Layout, vector: Tensor, share: float) -> Leading:
        """Return what a client of that share trains of a vector [P]."""
        every = torch.ones_like(vector)
        for name, view in layout.views(every).items():
            kind = layout.entry(name).kind
            if kind == "core":
                lead = leading_rank(view.shape[-1], share)
                view[:, lead:] = 0
                view[:, :, lead:] = 0
            elif kind == "scale":
                view.zero_()
        return cls(share, every > 0, vector.clone())

    def rank(self, rank: int) -> int:
        """Return the leading rank of a core."""
        return leading_rank(rank, self.share)


def level_of(share: float) -> Tensor:
    """Return which of the levels of compute a client has, as 1 among zeros."""
    return torch.tensor([float(level == share) for level in COMPUTE_LEVELS])


def over_holders(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], levels: Tensor, layout: Layout
) -> None:
    """Divide the mean change of each entry of a core by the share of clients that hold it.

    Args:
        new: Means over all clients by name; those of cores are changed in place.
        old: What was broadcast, by name.
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
        before = old[name].double()
        moved = before + (mean.double() - before) / torch.where(share > 0, share, 1.0)
        moved = torch.where(share > 0, moved, before)
        mean.copy_(torch.where(share == 1, mean.double(), moved))
