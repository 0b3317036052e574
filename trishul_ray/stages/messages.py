"""Messages between clients, stages and server: changes, broadcasts, cohorts, sums, means.

Legend: W entries of the shared part, U units of aggregation, N clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trishul_ray.adapters.layout import Unit
from trishul_ray.methods.base.messages import State
from trishul_ray.runtime.random_streams import numpy_rng

#: A state in messages and files.
ArrayState: TypeAlias = State[np.ndarray]
#: What a stage keeps between rounds, a part of the checkpoint: arrays, and values of JSON, by name.
Memory: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A client's upload after the stages so far.

    Attributes:
        shared: [W], the trained minus the broadcast value of the shared part, float32; zero in
            units that the client did not train.
        extra: Tensors that the method adds, by name.
        uploaded_bytes: Bytes of the encoding; None while they are four for each number.
        kept: What stages leave with the client for its next round, by name.
        metrics: Numbers for the round's record, by name; see :attr:`Stage.summed`.
    """

    shared: np.ndarray
    extra: dict[str, np.ndarray]
    uploaded_bytes: int | None = None
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sender:
    """The client and the round of a change.

    Attributes:
        weight: Its weight by ``federation.weighting``.
        units: The units of the shared part, in the order of the wire.
        active: [U] bool, the units that it trained; None means all.
        kept: What stages left with it in its last round; empty before its first.
        instructions: Numbers that stages sent with the broadcast, by name.
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
        """Return the random stream of this client and round for a purpose."""
        return numpy_rng(self.seed, purpose, self.round, self.client)


@dataclass(frozen=True)
class Sent:
    """The broadcast of a round.

    Attributes:
        state: The state of the server, which is scored.
        read: The state that clients read and train from.
        size: Bytes of its encoding; None: four for each number.
    """

    state: ArrayState
    read: ArrayState
    size: int | None = None

    @property
    def is_exact(self) -> bool:
        """Whether clients read the exact state of the server."""
        return self.read is self.state


class StepFlops(NamedTuple):
    """FLOPs of one local step: of the frozen model, and of all trained parameters."""

    backbone: float
    adapter: float


class Traffic(NamedTuple):
    """Bytes that k clients of a round are expected to transfer."""

    down: np.ndarray  # float64 [k], of the broadcast
    first: np.ndarray  # float64 [k], further ones if it is the client's first round, otherwise 0
    up: float  # of an upload


def _no_traffic(clients: Sequence[int]) -> Traffic:
    return Traffic(np.zeros(len(clients)), np.zeros(len(clients)), 0.0)


@dataclass(frozen=True)
class Cohort:
    """The clients of a round.

    Attributes:
        clients: The clients that train, ascending.
        missing: Why a client that was asked does not train, by client, ascending.
        wasted: Clients that receive a broadcast without training, each as often as it does.
        repeated: Clients that have received the one-time download in a failed attempt.
        fixed: Whether no other stage may choose: a guarantee rests on how these were drawn.
        traffic: Return the traffic that is expected of the given clients.
    """

    clients: list[int]
    missing: Mapping[int, str] = field(default_factory=dict)
    wasted: Sequence[int] = ()
    repeated: frozenset[int] = frozenset()
    fixed: bool = False
    traffic: Callable[[Sequence[int]], Traffic] = _no_traffic


class ClientRound(NamedTuple):
    """A client's part in a round."""

    client: int
    down_bytes: float  # received in it
    up_bytes: float
    loss: float  # mean over the local steps


@dataclass
class Partial:
    """The sum of a group of uploads.

    Attributes:
        sums: float64; None without a valid upload.
        weight: Sum of w_c.
        unit_weight: [U] float64, sum of w_c m_cu.
        unit_clients: [U] int64, sum of m_cu.
        clients: The clients whose uploads are in it.
        refused: Reason why an upload was rejected, by client.
    """

    sums: ArrayState | None
    weight: float
    unit_weight: np.ndarray
    unit_clients: np.ndarray
    clients: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MeanChange:
    """The mean of a round's changes after the stages so far.

    Attributes:
        state: The mean; ``shared`` [W] is a change, and zero where ``trained`` is not.
        trained: [U] bool, the units that move.
        clients: How many clients are in it.
        metrics: Numbers of stages for the round's record, by name.
    """

    state: ArrayState
    trained: np.ndarray
    clients: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def with_shared(self, shared: np.ndarray) -> MeanChange:
        """Return the mean with another change of the shared part, [W]."""
        return replace(self, state=replace(self.state, shared=shared))


@dataclass(frozen=True)
class RunPlan:
    """Facts of a run that stages may read, on the server.

    Attributes:
        units: The units of the shared part, in the order of the wire.
        lengths: Numbers in each array that a client sends, by name: ``shared``, and the method's.
        participants: Clients that may take part, ascending int64.
        capacities: [N] float64, share of the budget that each client trains.
        quorum: Valid uploads that a round needs at least.
        unit_shares: Return the share of the clients that train a unit, on average, [U] float64.
        sent_units: Return the units that clients send in a round, [U] bool; None means all.
        flops: FLOPs of a local step; None unless a stage needs them.
        shard_sizes: int64 [N], training rows of the clients; None unless a stage needs them.
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
    """Return the L2 norm of all entries together, summed in float64 in a fixed order."""
    return math.sqrt(math.fsum(float(np.square(a, dtype=np.float64).sum()) for a in arrays))
