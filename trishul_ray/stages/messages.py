"""Messages between clients, stages and the server: changes, broadcasts, cohorts, sums and means.

Legend: W entries of the shared part, U units of aggregation, N clients, P trainables of a client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from trishul_ray.adapters.layout import Unit
from trishul_ray.methods.base.messages import State
from trishul_ray.runtime.random_streams import numpy_rng

if TYPE_CHECKING:
    from torch import Tensor

#: State in messages and files.
ArrayState: TypeAlias = State[np.ndarray]
#: State of a stage between rounds, part of the checkpoint: arrays and JSON values, keyed by name.
Memory: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A client's upload after the stages so far.

    Attributes:
        shared: [W] float32, the trained minus the broadcast value of the shared part; zero in units
            that the client did not train.
        extra: Additional tensors of the method, keyed by name.
        uploaded_bytes: Size of the encoding in bytes; None means 4 bytes per number.
        kept: State that stages keep on the client for its next round, keyed by name.
        metrics: Numbers for the round's record, keyed by name; see :attr:`Stage.summed`.
    """

    shared: np.ndarray
    extra: dict[str, np.ndarray]
    uploaded_bytes: int | None = None
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientRoundInfo:
    """The client and the round of a change.

    Attributes:
        seed: Seed of the run.
        round: The round, from 1.
        client: The client.
        weight: Weight of the client according to ``federation.weighting``.
        units: Units of the shared part, in the order of the upload.
        active: [U] bool, the units that the client trained; None means all.
        kept: State that stages kept on the client in its last round; empty in its first round.
        instructions: Numbers that stages sent with the broadcast, keyed by name.
    """

    seed: int
    round: int
    client: int
    weight: float
    units: Sequence[Unit]
    active: np.ndarray | None = None
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    instructions: Mapping[str, float] = field(default_factory=dict)

    def rng(self, purpose: str) -> np.random.Generator:
        """Create the random stream of this client and round for a purpose."""
        return numpy_rng(self.seed, purpose, self.round, self.client)


@dataclass(frozen=True)
class LocalStep:
    """A local step of a client, on its worker, whose gradient a stage computes.

    Attributes:
        seed: The seed of the run.
        round: The round, from 1.
        client: The client.
        step: The step, from 1.
        rows: int64 [n], the training rows of the client.
        batch_size: Examples per step: ``federation.batch_size``, or less with ``local_epochs``.
        grad: float32 [P], which the stage fills with the gradient that the optimizer reads.
        trained: float32 [P], 1 for entries that the client trains, or None if it trains all.
        instructions: Numbers that stages sent with the broadcast, by name.
        metrics: Numbers for the round's record, by name, which the steps of a client share.
        examples: Compute the losses [k] of k training rows, and the gradient of each, [k, P] in
            float32. Entries that the client does not train have gradient 0.
    """

    seed: int
    round: int
    client: int
    step: int
    rows: np.ndarray
    batch_size: int
    grad: Tensor
    trained: Tensor | None
    instructions: Mapping[str, float]
    metrics: dict[str, float]
    examples: Callable[[np.ndarray], tuple[Tensor, Tensor]]

    def rng(self, purpose: str) -> np.random.Generator:
        """Return the random stream of this step for a purpose."""
        return numpy_rng(self.seed, purpose, self.round, self.client, self.step)


@dataclass(frozen=True)
class BroadcastMessage:
    """The broadcast of a round.

    Attributes:
        state: State of the server, which evaluation scores.
        read: State that clients read and train from.
        size: Size of the encoding in bytes; None means 4 bytes per number.
    """

    state: ArrayState
    read: ArrayState
    size: int | None = None

    @property
    def is_exact(self) -> bool:
        """Whether clients read the exact state of the server."""
        return self.read is self.state


class StepFlops(NamedTuple):
    """FLOPs of one local step, for the frozen model and for all trained parameters."""

    backbone: float
    adapter: float


class Traffic(NamedTuple):
    """Expected traffic of k clients in a round, in bytes."""

    down: np.ndarray  # float64 [k], size of the broadcast
    first: np.ndarray  # float64 [k], one-time download in a client's first round; otherwise 0
    up: float  # size of one upload


def _no_traffic(clients: Sequence[int]) -> Traffic:
    return Traffic(np.zeros(len(clients)), np.zeros(len(clients)), 0.0)


@dataclass(frozen=True)
class Start:
    """Clients of a round that train from the same broadcast.

    Attributes:
        round: The round of the broadcast; it also names the random streams of the clients.
        read: The broadcast that they have read.
        clients: The clients, ascending.
    """

    round: int
    read: ArrayState
    clients: Sequence[int]


@dataclass(frozen=True)
class Cohort:
    """The clients of a round.

    Attributes:
        clients: Clients that train, ascending.
        missing: Reasons why selected clients do not train, keyed by client, ascending.
        wasted: Clients that receive the broadcast without training, once per transfer.
        repeated: Clients that received the one-time download in a failed attempt.
        fixed: Whether other stages must not change the selection, because a guarantee depends on
            how the clients were sampled.
        earlier: Clients, among ``clients``, that train from the broadcast of an earlier round, by
            ascending round. All other clients train from the broadcast of this round.
        discarded: Numbers that clients upload in this round and the server does not use.
        traffic: Function that returns the expected traffic of the given clients.
    """

    clients: list[int]
    missing: Mapping[int, str] = field(default_factory=dict)
    wasted: Sequence[int] = ()
    repeated: frozenset[int] = frozenset()
    fixed: bool = False
    earlier: Sequence[Start] = ()
    discarded: int = 0
    traffic: Callable[[Sequence[int]], Traffic] = _no_traffic


class ClientRound(NamedTuple):
    """Transfers and training loss of a client in a round."""

    client: int
    down_bytes: float  # received in the round
    up_bytes: float  # sent in the round
    loss: float  # mean over the local steps


@dataclass
class Partial:
    """The sum of a group of uploads.

    Attributes:
        sums: Weighted sums in float64; None without a valid upload.
        weight: Sum of w_c.
        unit_weight: [U] float64, sum of w_c m_cu.
        unit_clients: [U] int64, sum of m_cu.
        clients: Clients whose uploads are included.
        refused: Reasons for rejected uploads, keyed by client.
    """

    sums: ArrayState | None
    weight: float
    unit_weight: np.ndarray
    unit_clients: np.ndarray
    clients: list[int] = field(default_factory=list)
    # prose: pet-verb: the name of a field
    refused: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MeanChange:
    """The mean of a round's changes after the stages so far.

    Attributes:
        state: The mean. ``shared`` [W] is a change, and zero in units that are not ``trained``.
        trained: [U] bool, the units that change.
        clients: Number of clients in the mean.
        metrics: Numbers of stages for the round's record, keyed by name.
    """

    state: ArrayState
    trained: np.ndarray
    clients: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def with_shared(self, shared: np.ndarray) -> MeanChange:
        """Replace the change of the shared part.

        Args:
            shared: [W] float32, the new change.

        Returns:
            A copy of the mean with this change.
        """
        return replace(self, state=replace(self.state, shared=shared))


@dataclass(frozen=True)
class RunPlan:
    """Facts of a run that stages can read on the server.

    Attributes:
        units: Units of the shared part, in the order of the upload.
        lengths: Number of entries of each uploaded array, keyed by name: ``shared``, and the
            method's arrays.
        participants: int64, clients that may take part, ascending.
        capacities: [N] float64, fraction of the budget that each client trains.
        quorum: Minimum number of valid uploads per round.
        unit_shares: Function that returns the average fraction of clients that train each unit, [U]
            float64.
        sent_units: Function that returns the units that clients send in a round, [U] bool; None
            means all.
        flops: FLOPs of a local step; None unless a stage needs them.
        shard_sizes: int64 [N], number of training rows per client; None unless a stage needs them.
    """

    units: tuple[Unit, ...]
    lengths: Mapping[str, int]
    participants: np.ndarray
    capacities: np.ndarray
    quorum: int
    unit_shares: Callable[[], np.ndarray]
    sent_units: Callable[[int], np.ndarray | None]
    flops: StepFlops | None = None
    shard_sizes: np.ndarray | None = None


def norm_of(arrays: Iterable[np.ndarray]) -> float:
    """Compute the L2 norm over all entries of the arrays, summed in float64 in a fixed order."""
    return math.sqrt(math.fsum(float(np.square(a, dtype=np.float64).sum()) for a in arrays))
