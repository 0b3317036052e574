"""The contract of a stage: one of the things that may stand between clients and the next state.

A stage is one file: a section of the configuration, and what happens to a round while that section
is set. Without the section, a run has the id, the bytes and the imports that it has without the
stage. A stage may encode what is sent, add noise to the mean or move it, or choose the clients::

    class FedAvgMConfig(Section):
        momentum: float = Field(0.0, ge=0, lt=1, description="of the mean change")

    @register_stage("fedavgm")
    class FedAvgM(Stage):
        Config = FedAvgMConfig
        config: FedAvgMConfig

        def mean(self, number: int, mean: MeanChange) -> MeanChange:
            before = self.memory.get("momentum", 0.0)
            self.memory["momentum"] = self.config.momentum * before + mean.state.shared
            return mean.with_shared(self.memory["momentum"])

A user then writes ``fedavgm.momentum=0.9``. All that a client sends passes :meth:`Stage.send` on
its worker, by ascending ``wire``; what the server makes of it passes :meth:`Stage.total` and
:meth:`Stage.mean` the other way. All of them act on changes of the shared part since the broadcast:
while a stage acts on changes, clients send these in place of values.

The hooks of a round, in order: :meth:`Stage.broadcast`, :meth:`Stage.cohort`,
:meth:`Stage.instruct`, :meth:`Stage.send`, :meth:`Stage.total`, :meth:`Stage.average`,
:meth:`Stage.mean`, :meth:`Stage.end`. A method's survey is round 0: :meth:`Stage.cohort`,
:meth:`Stage.instruct`, :meth:`Stage.answer`, :meth:`Stage.survey`.

Legend: W entries of the shared part, U units of aggregation, N clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from trishul_ray import plugins
from trishul_ray.adapters.layout import Layout, Unit
from trishul_ray.config import Noted, OptimizerConfig, Section
from trishul_ray.files import Json
from trishul_ray.methods.base import Method, MethodConfig, Settings, State
from trishul_ray.rng import numpy_rng

#: A state as it is sent and stored.
ArrayState: TypeAlias = State[np.ndarray]
#: What a stage keeps between rounds, a part of the checkpoint: arrays, and values of JSON, by name.
Memory: TypeAlias = dict[str, Any]

_Config = TypeVar("_Config", bound=Section)
_S = TypeVar("_S", bound="type[Stage]")


@dataclass(frozen=True)
class Change:
    """A client's upload, as it is after the stages so far.

    Attributes:
        shared: [W], the trained minus the broadcast value of the shared part, float32; zero in
            units that the client did not train.
        extra: What the method adds, by name.
        weighted: Whether a stage has multiplied all of it by the client's weight.
        uploaded_bytes: Bytes of the encoding; None while they are four for each number.
        kept: What stages leave with the client for its next round, by name.
        metrics: Numbers for the round's record, by name; see :attr:`Stage.summed`.
    """

    shared: np.ndarray
    extra: dict[str, np.ndarray]
    uploaded_bytes: int | None = None
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    weighted: bool = False


@dataclass(frozen=True)
class Sender:
    """The client and the round of a change.

    Attributes:
        weight: Its weight by ``federation.weighting``.
        units: The units of the shared part, in the order of the wire.
        active: [U] bool, the units that it trained; None means all.
        kept: What stages left with it in its last round; empty before its first.
        instructions: Numbers that stages sent with the broadcast, by name.
        broadcast: [W] float32, the shared part that it was sent, which its change is relative to.
    """

    seed: int
    round: int
    client: int
    weight: float
    units: Sequence[Unit]
    active: np.ndarray | None = None
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    instructions: Mapping[str, float] = field(default_factory=dict)
    broadcast: np.ndarray | None = None

    def rng(self, purpose: str) -> np.random.Generator:
        """Return the random stream of this client and round for a purpose."""
        return numpy_rng(self.seed, purpose, self.round, self.client)


@dataclass(frozen=True)
class Sent:
    """The broadcast of a round.

    Attributes:
        state: What the server has, which is scored.
        read: What clients read of it, and train from.
        size: Bytes of its encoding; None: four for each number.
    """

    state: ArrayState
    read: ArrayState
    size: int | None = None

    @property
    def is_exact(self) -> bool:
        """Whether clients read what the server has."""
        return self.read is self.state


class StepFlops(NamedTuple):
    """FLOPs of one local step: of the frozen model, and of all that is trained."""

    backbone: float
    adapter: float


class Traffic(NamedTuple):
    """Bytes that a client of a round is expected to transfer."""

    down: float  # of the broadcast
    first: float  # more of them at a client's first time
    up: float  # of an upload


@dataclass(frozen=True)
class Cohort:
    """The clients of a round.

    Attributes:
        clients: The clients that train, ascending.
        steps: Local steps of those that do not make all.
        missing: Why a client that was asked does not train, by client, ascending.
        wasted: Broadcasts that clients receive without training.
        repeated: Clients that have received what is downloaded once in a failed attempt.
        fixed: Whether no other stage may choose: a guarantee rests on how these were drawn.
        traffic: Return the traffic that is expected of each client.
    """

    clients: list[int]
    steps: Mapping[int, int] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    wasted: int = 0
    repeated: frozenset[int] = frozenset()
    fixed: bool = False
    traffic: Callable[[], Traffic] = lambda: Traffic(0, 0, 0)


class ClientRound(NamedTuple):
    """A client's part in a round."""

    client: int
    down_bytes: float  # received in it
    up_bytes: float
    loss: float  # means over the local steps
    squared_loss: float


@dataclass
class Partial:
    """The sum of a group of uploads.

    Attributes:
        sums: float64, or as a stage has encoded it; None without a valid upload.
        weight: Sum of w_c.
        unit_weight: [U] float64, sum of w_c m_cu.
        unit_clients: [U] int64, sum of m_cu.
        clients: The clients whose uploads are in it.
        refused: Why an upload was left out, by client.
        metrics: Numbers of stages for the round's record, by name.
    """

    sums: ArrayState | None
    weight: float
    unit_weight: np.ndarray
    unit_clients: np.ndarray
    clients: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeanChange:
    """The mean of a round's changes, as it is after the stages so far.

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
        method: The method.
        layout: The layout of a client's vector.
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

    method: Method
    layout: Layout
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


class StageSettings(Settings, Protocol):
    """The part of an experiment that a stage may read."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    @property
    def method(self) -> MethodConfig:
        """The section ``method``."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """The section ``optimizer``."""

    @property
    def stages(self) -> Mapping[str, Section]:
        """The sections of stages that are set, by name."""

    @property
    def surveys(self) -> int:
        """Number of surveys before round 1: one or none."""

    @property
    def method_as_set(self) -> str:
        """The method as messages name it, with the fields that differ from their defaults."""

    def section(self, kind: type[_Config]) -> _Config:
        """Return the section of a stage by its class, at its defaults if it is not set."""


class Stage:
    """Base class of stages: set ``Config``, override hooks.

    There is one object in each process of a run: on the server, and in every worker. Making one
    must be cheap, since an experiment is checked by its stages whenever it is read.

    Attributes:
        Config: The section's class. All its fields have defaults, at which the stage is off.
        name: The section's name; :func:`register_stage` sets it.
        example: Fields, with values other than the defaults, with which ``trishul check`` runs it.
        wire: The place in the row of stages; larger is nearer to the wire.
        moves_beyond_mean: Whether the next state is another one than the mean of what clients have.
        hides_clients: Whether no client may be told apart: a client without a finite loss sends
            zeros instead of ending the run, and no quorum is counted.
        summed: Metrics of changes of which a round's record has the sum over clients; of others it
            has the mean.
        registries: Fields that name something registered, and its registry. The plug-ins of what
            they name are noted with the run.
        plan: What is known of the run, on the server alone.
        memory: What the stage keeps between rounds, on the server alone; hooks change it in place.
        config: The section.
        settings: The part of the experiment that a stage may read.
    """

    Config: ClassVar[type[Section]] = Section
    name: ClassVar[str] = ""
    example: ClassVar[Mapping[str, Any]] = {}
    wire: ClassVar[int] = 0
    moves_beyond_mean: ClassVar[bool] = False
    hides_clients: ClassVar[bool] = False
    summed: ClassVar[frozenset[str]] = frozenset()
    registries: ClassVar[Mapping[str, plugins.Registry[Any]]] = {}

    def __init__(self, config: Section, settings: StageSettings) -> None:
        self.config, self.settings = config, settings
        self.plan: RunPlan
        self.memory: Memory = {}

    @classmethod
    def parts(cls, config: Section, settings: StageSettings) -> Sequence[Stage]:
        """Return the stages of a section that is set (default: one of this class).

        A section may have several stages, at different places in the row.
        """
        return [cls(config, settings)]

    @property
    def acts_on_changes(self) -> bool:
        """Whether it needs a method whose next state follows from the mean change."""
        return True

    def check(self, method: Method) -> None:
        """Refuse an experiment that the stage cannot be a part of (default: none).

        Raises:
            ValueError: Names the fields, their values, and what is allowed.
        """

    @property
    def remembered(self) -> tuple[str, ...]:
        """The fields, as ``field=value``, that add to a change what earlier rounds left."""
        return ()

    @property
    def files(self) -> dict[str, str]:
        """The files that fields of the section name, by field.

        The content of each is noted in the field ``<field>_content``, and replaces the path in ids.
        """
        return {}

    @property
    def versions(self) -> dict[str, int]:
        """Numbers by name that ids have beside the section, such as that of an algorithm."""
        return {}

    @property
    def reads_rounds(self) -> bool:
        """Whether what happens in a round depends on the number of rounds of the run."""
        return False

    def rounds(self, rounds: int) -> int:
        """Return how many rounds the run makes, given how many it is asked for."""
        return rounds

    def prepare(self) -> Sequence[str]:
        """Return remarks for the reader of a run that is about to begin, a line each.

        Raises:
            InputError: Something that the stage needs is missing; nothing has been written yet.
        """
        return ()

    @property
    def needs(self) -> frozenset[str]:
        """Facts of :class:`RunPlan` that a worker measures for it: ``flops``, ``shard_sizes``."""
        return frozenset()

    @property
    def quorum(self) -> dict[str, int]:
        """How many valid uploads a round needs, by the field that says so (default: none)."""
        return {}

    def begin(self) -> Sequence[str]:
        """Prepare for the rounds of a run, on the server; return lines for its reader.

        It is called again if the clients' answers to a survey change the adapters.
        """
        return ()

    def broadcast(self, number: int, sent: Sent) -> Sent:
        """Return the broadcast of a round (from 1), as clients read it."""
        return sent

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Return the clients of a round (0: of the survey); drawn uniformly, given no stage."""
        return cohort

    def instruct(self, number: int) -> dict[str, float]:
        """Return numbers for the clients of a round (0: of the survey), by name."""
        return {}

    def send(self, change: Change, sender: Sender) -> Change:
        """Return what goes on of a client's change, on its worker.

        A pure function: do not write to the given arrays, and draw from ``sender.rng`` alone.
        """
        return change

    def answer(
        self, answers: dict[str, np.ndarray], instructions: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Return what goes on of a client's answers to a survey, by name, on its worker."""
        return answers

    def survey(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Return the mean answers, given their sums; None: the sums over the clients (default)."""
        return None

    def total(self, total: Partial) -> Partial:
        """Return the sum of a round's uploads, decoded if :meth:`send` has encoded them."""
        return total

    def average(
        self, number: int, total: Partial, reported: Mapping[int, Mapping[str, float]]
    ) -> MeanChange | None:
        """Return the mean change of a round (from 1); None: the weighted mean (default).

        Args:
            number: The round.
            total: The sum of the valid uploads.
            reported: Metrics of each client's change, by client.
        """
        return None

    def mean(self, number: int, mean: MeanChange) -> MeanChange:
        """Return the mean change of a round (from 1) that goes on."""
        return mean

    def end(
        self, number: int, state: ArrayState, clients: Sequence[ClientRound]
    ) -> dict[str, float]:
        """Return numbers for the record of a round (from 1), given the state after it, by name."""
        return {}

    def report(self, last: Mapping[str, float]) -> Json | None:
        """Return what the summary of a run says of it; None for nothing (default).

        ``memory`` is that of the end of the run, and ``plan`` is not set.

        Args:
            last: Numbers of stages in the last record, by name.
        """
        return None

    def restore(self, shared: np.ndarray, weight: float) -> np.ndarray:
        """Return a client's change [W] as it was before :meth:`send` encoded it, for diagnostics.

        Args:
            shared: [W], as it was sent.
            weight: The client's weight by ``federation.weighting``.
        """
        return shared


STAGES = plugins.Registry[Stage]("stage", "section")

#: The names of the sections of all stages.
stage_names = STAGES.names


def register_stage(name: str) -> Callable[[_S], _S]:
    """Return a class decorator that makes a stage available as the section ``name``."""

    def add(cls: _S) -> _S:
        STAGES.add(name, cls)
        cls.name = name
        return cls

    return add


class Stages:
    """The stages of a run, in the order of their places.

    Args:
        stages: The stages.
    """

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._stages = tuple(sorted(stages, key=lambda each: (each.wire, each.name)))

    @classmethod
    def of(cls, settings: StageSettings) -> Stages:
        """Return the stages of an experiment."""
        sections = settings.stages.items()
        return cls([s for name, config in sections for s in STAGES[name].parts(config, settings)])

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    @property
    def act_on_changes(self) -> bool:
        """Whether clients send the change since the broadcast in place of the value."""
        return any(stage.acts_on_changes for stage in self)

    @property
    def move_beyond_mean(self) -> bool:
        """Whether the next state is another one than the mean of what clients have."""
        return any(stage.moves_beyond_mean for stage in self)

    @property
    def hide_clients(self) -> bool:
        """Whether no client may be told apart."""
        return any(stage.hides_clients for stage in self)

    @property
    def needs(self) -> frozenset[str]:
        """Facts of :class:`RunPlan` that a worker measures."""
        return frozenset().union(*(stage.needs for stage in self))

    @property
    def summed(self) -> frozenset[str]:
        """Metrics of changes that add up over clients."""
        return frozenset().union(*(stage.summed for stage in self))

    @property
    def quorum(self) -> dict[str, int]:
        """How many valid uploads a round needs, by the field that says so."""
        return {name: least for stage in self for name, least in stage.quorum.items()}

    def begin(self, plan: RunPlan, memories: dict[str, Memory]) -> list[str]:
        """Prepare for the rounds of a run, on the server; return lines for its reader.

        Args:
            plan: What is known of the run.
            memories: What each stage keeps, by name; the stages change it in place.
        """
        for stage in self:
            stage.plan, stage.memory = plan, memories.setdefault(stage.name, {})
        return [line for stage in self for line in stage.begin()]

    def broadcast(self, number: int, state: ArrayState) -> Sent:
        """Return the broadcast of a round, given that of the method."""
        sent = Sent(state, state)
        for stage in self:
            sent = stage.broadcast(number, sent)
        return sent

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Return the clients of a round, given those that were drawn uniformly."""
        for stage in reversed(self._stages):
            cohort = stage.cohort(number, cohort)
        return cohort

    def instruct(self, number: int) -> dict[str, float]:
        """Return numbers for the clients of a round, by name."""
        return {k: v for stage in self for k, v in stage.instruct(number).items()}

    def answer(
        self, answers: dict[str, np.ndarray], instructions: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Pass a client's answers to a survey through the stages, on its worker."""
        for stage in self:
            answers = stage.answer(answers, instructions)
        return answers

    def survey(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Return the mean answers to a survey by the first stage that has its own."""
        found = (stage.survey(sums) for stage in reversed(self._stages))
        return next((each for each in found if each is not None), None)

    def send(self, change: Change, sender: Sender) -> tuple[Change, dict[str, np.ndarray]]:
        """Pass a client's change through the stages, on its worker.

        Returns:
            What is sent; and by name what the server reads of ``extra`` where it is not what the
            method has sent: both sides must go on with the same numbers (see ``Method.mirrored``).
        """
        given = read = change.extra
        for stage in self:
            change = stage.send(change, sender)
            if not change.weighted:
                read = change.extra
        return change, {} if read is given else read

    def total(self, total: Partial) -> Partial:
        """Return the sum of a round's uploads, decoded."""
        for stage in reversed(self._stages):
            total = stage.total(total)
        return total

    def average(
        self, number: int, total: Partial, reported: Mapping[int, Mapping[str, float]]
    ) -> MeanChange | None:
        """Return the mean change of a round by the first stage that has its own."""
        found = (stage.average(number, total, reported) for stage in reversed(self._stages))
        return next((each for each in found if each is not None), None)

    def mean(self, number: int, mean: MeanChange) -> MeanChange:
        """Pass the mean change of a round through the stages."""
        for stage in reversed(self._stages):
            mean = stage.mean(number, mean)
        return mean

    def end(
        self, number: int, state: ArrayState, clients: Sequence[ClientRound]
    ) -> dict[str, float]:
        """Return numbers for the record of a round, by name."""
        each = [stage.end(number, state, clients) for stage in reversed(self._stages)]
        return {name: value for found in each for name, value in found.items()}

    def reports(self, memories: Mapping[str, Memory], last: Mapping[str, float]) -> dict[str, Json]:
        """Return what the summary of a run says of its stages, by the stage's name.

        Args:
            memories: What each stage keeps at the end of the run, by name.
            last: Numbers of stages in the last record, by name.
        """
        for stage in self:
            stage.memory = memories.get(stage.name, {})
        found = {stage.name: stage.report(last) for stage in self}
        return {name: each for name, each in found.items() if each is not None}

    def restore(self, shared: np.ndarray, weight: float) -> np.ndarray:
        """Return a client's change [W] as it was before it was encoded."""
        for stage in reversed(self._stages):
            shared = stage.restore(shared, weight)
        return shared


def noted_hashes(stage: Stage) -> dict[str, str]:
    """Return the noted hashes of a stage's files, by field; a note on another path is none."""
    found = {}
    for name, path in stage.files.items():
        note = getattr(stage.config, f"{name}_content")
        if isinstance(note, Noted) and (hash_ := note.hash_of(path)):
            found[name] = hash_
    return found
