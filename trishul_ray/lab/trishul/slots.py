"""Core heads that come and go during training, while layout and bases stay.

A layer has slots: the core heads that are trained at first, and spare ones, which are zero. Each
core head has a status:

* :data:`ACTIVE`: clients train it.
* :data:`SPARE`: it has never been trained, and is zero.
* t > 0: retired after round t. It stays in the forward pass, frozen at its value.

A change of status never changes the model's function, to the bit. The slots of a block have the
same status on each of its matrices.

Legend: n core heads over all layers, in the order of the layout; U units of the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trishul_ray.adapters.layout import Layout
from trishul_ray.adapters.targets import block_of
from trishul_ray.lab.trishul.allocation import reallocate
from trishul_ray.methods.messages import Round, Tensors
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

ACTIVE, SPARE = 0.0, -1.0

#: Largest share of the active heads that change place at a time.
SHARE_MOVED = 0.1

#: Smallest ratio of gain to loss at which a head changes place.
MARGIN = 1.1

#: Weight of the past in a running mean.
MEMORY = 0.9

#: Names of the running means [n]: see :func:`next_extra`. Only the server reads them.
MEANS = ("energy", "spread", "active")

#: Shares of the rounds before which, and after which, no head changes place.
WARM_UP, STOP = 0.2, 0.8


@dataclass(frozen=True)
class Block:
    """The slots of a block.

    Attributes:
        name: Its dotted path.
        slots: For each matrix, where its core heads are among the n: all of one length.
        cost: Entries of a core head on all matrices, the sum of r^2.
    """

    name: str
    slots: tuple[range, ...]
    cost: int

    def active(self, status: Tensor) -> list[int]:
        """Return the numbers of the active slots."""
        return self.with_status(status, ACTIVE)

    def with_status(self, status: Tensor, wanted: float) -> list[int]:
        """Return the numbers of the slots that have a status."""
        return [slot for slot, index in enumerate(self.slots[0]) if float(status[index]) == wanted]

    def entries(self, slot: int) -> list[int]:
        """Return where the core heads of a slot are among the n."""
        return [indices[slot] for indices in self.slots]

    def total(self, values: Tensor, slots: list[int]) -> float:
        """Return the sum of a value [n] over the core heads of some slots."""
        return float(values[[index for slot in slots for index in self.entries(slot)]].sum())


def blocks_of(layout: Layout) -> list[Block]:
    """Return the blocks that have core heads, in the order of the layout."""
    slots: dict[str, list[range]] = {}
    costs: dict[str, int] = {}
    first = 0
    for entry in layout.entries:
        if entry.kind == "core":
            heads, rank, _ = entry.shape
            block = block_of(entry.name.removesuffix(".core"))
            slots.setdefault(block, []).append(range(first, first + heads))
            costs[block] = costs.get(block, 0) + rank * rank
            first += heads
    return [Block(name, tuple(found), costs[name]) for name, found in slots.items()]


def first_extra(layout: Layout, spare: int) -> Tensors:
    """Return the status before round 1, and the running means that :func:`next_extra` moves."""
    zeros = torch.zeros(len(sizes(layout)), dtype=torch.float64)
    return {"status": first_status(layout, spare)} | {name: zeros.clone() for name in MEANS}


def first_status(layout: Layout, spare: int) -> Tensor:
    """Return the status [n] before round 1: the last ``spare`` slots of each matrix are spare."""
    parts = []
    for entry in layout.entries:
        if entry.kind == "core":
            status = torch.full((entry.shape[0],), ACTIVE)
            status[entry.shape[0] - spare :] = SPARE
            parts.append(status)
    return torch.cat(parts) if parts else torch.zeros(0)


def sizes(layout: Layout) -> Tensor:
    """Return the entries of each core head, int64 [n]."""
    cores = (entry.shape for entry in layout.entries if entry.kind == "core")
    return torch.tensor([r * r for heads, r, _ in cores for _ in range(heads)], dtype=torch.int64)


def active_units(status: Tensor, units: int) -> Tensor:
    """Return [U] bool, what clients train: the active core heads, and all other units."""
    active = torch.ones(units, dtype=torch.bool)
    active[: len(status)] = status.cpu() == ACTIVE  # core heads are the first units
    return active


def squared_changes(new: Mapping[str, Tensor], old: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """Return the squared norm of the change of each core head, float64 [n]."""
    cores = [entry.name for entry in layout.entries if entry.kind == "core"]
    return torch.cat([(new[n] - old[n]).double().square().sum(dim=(1, 2)) for n in cores])


def next_extra(
    before: Tensors, energy: Tensor, spread: Tensor, round_: Round, every: int, layout: Layout
) -> Tensors:
    """Return the status of each core head after a round, and the running means.

    They start at zero. Divided by that of being active, 1 - 0.9^k after k rounds, they are those of
    the rounds in which a core head was active: one that has just come is not taken for a weak one.

    Args:
        before: Means of the round before.
        energy: :func:`squared_changes` of the mean, [n].
        spread: The mean over clients of theirs, [n].
        round_: The round; its metrics get the heads of each block.
        every: Rounds from one change of places to the next.
        layout: Names of the trainables.
    """
    status, number, rounds = before["status"], round_.number, round_.rounds
    found = zip(MEANS, (energy, spread, (status == ACTIVE).double()), strict=True)
    means = {name: MEMORY * before[name] + (1 - MEMORY) * now for name, now in found}
    for block in blocks_of(layout):
        round_.metrics[f"heads/{block.name}"] = float(len(block.active(status)))
    if number % every == 0 and WARM_UP * rounds <= number <= STOP * rounds:
        weight = torch.where(means["active"] > 0, means["active"], 1.0)
        level, of_clients = means["energy"] / weight, means["spread"] / weight
        status = moved_status(status, level, of_clients, layout, number)
    return {"status": status, **means}


def moved_status(status: Tensor, energy: Tensor, spread: Tensor, layout: Layout, n: int) -> Tensor:
    """Return the status [n] after heads have changed place, where that is worth it.

    A block's score is a = e k: e is what the means of its active core heads have moved, and k, the
    consensus, that over what clients have moved on average, in (0, 1]: a block on which clients
    disagree scores low, however far they move. A block that gives retires its slot that has moved
    least.

    Args:
        status: [n] as it is.
        energy: [n] mean over its rounds of the squared norm of a core head's mean change.
        spread: [n] mean over its rounds of the mean over clients of the same.
        layout: Names of the trainables.
        n: The round after which heads move.
    """
    blocks, new = blocks_of(layout), status.clone()
    scores, heads, spare = [], [], []
    for block in blocks:
        active = block.active(status)
        moved, all_moved = (block.total(each, active) for each in (energy, spread))
        scores.append(moved * min(moved / all_moved, 1.0) if all_moved > 0 else 0.0)
        heads.append(len(active))
        spare.append(len(block.with_status(status, SPARE)))
    most = max(1, int(SHARE_MOVED * sum(heads)))
    moves = reallocate(scores, heads, spare, [b.cost for b in blocks], most, MARGIN)
    for giver, receiver in moves:
        block = blocks[giver]
        least = min(block.active(new), key=lambda slot: block.total(energy, [slot]))
        new[block.entries(least)] = float(n)
        block = blocks[receiver]
        new[block.entries(block.with_status(new, SPARE)[0])] = ACTIVE
    return new
