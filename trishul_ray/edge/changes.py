"""The change that a client would upload, and the filters that it passes on its way to the sum.

Legend: W entries of the shared part, U units of aggregation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trishul_ray.adapters.layout import Unit
from trishul_ray.rng import numpy_rng

#: What filters count: the round's record has the sum over clients, and the mean of other numbers.
COUNTS = {"clipped_entries"}


@dataclass(frozen=True)
class Change:
    """What a client sends, as it is after the filters so far.

    Attributes:
        shared: [W], the trained minus the broadcast value of the shared part: float32, or int64 in
            fixed point; zero in units that the client did not train.
        extra: What the method adds, by name.
        uploaded_bytes: Bytes of the encoding; None while they are four for each number.
        kept: What filters leave with the client for its next round, by name.
        metrics: Numbers of the filters for the round's record, by name; see :data:`COUNTS`.
    """

    shared: np.ndarray
    extra: dict[str, np.ndarray]
    uploaded_bytes: int | None = None
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sender:
    """The client whose change it is, and its round.

    Attributes:
        weight: Its weight by ``federation.weighting``.
        units: The units of the shared part, in the order of the wire.
        active: [U] bool, the units that it trained; None means all.
        kept: What filters left with it in its last round; empty before its first.
        clip_norm: The norm to clip to, if the server sets one for the round.
        broadcast: [W] float32, the shared part that it was sent, which its change is relative to.
    """

    seed: int
    round: int
    client: int
    weight: float
    units: Sequence[Unit]
    active: np.ndarray | None = None
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    clip_norm: float | None = None
    broadcast: np.ndarray | None = None

    def rng(self, purpose: str) -> np.random.Generator:
        """Return the random stream of this client and round for a purpose."""
        return numpy_rng(self.seed, purpose, self.round, self.client)


def norm_of(arrays: Iterable[np.ndarray]) -> float:
    """Return the L2 norm of all entries together, summed in float64 in a fixed order."""
    return math.sqrt(math.fsum(float(np.square(a, dtype=np.float64).sum()) for a in arrays))


class UploadFilter(Protocol):
    """A pure function of a change and its sender."""

    def __call__(self, change: Change, sender: Sender) -> Change:
        """Return the change that goes on, without writing to the given one's arrays."""
