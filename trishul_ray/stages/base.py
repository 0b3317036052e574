"""Base class and registry of stages.

Legend: W entries of the shared part, U units of aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from trishul_ray.config.fields import OptimizerConfig
from trishul_ray.config.section import Section
from trishul_ray.methods.base import Method, MethodConfig, Settings
from trishul_ray.plugins.registry import Registry
from trishul_ray.stages.messages import (
    ArrayState,
    BroadcastMessage,
    Change,
    ClientRound,
    ClientRoundInfo,
    Cohort,
    LocalStep,
    MeanChange,
    Memory,
    Partial,
    RunPlan,
    Start,
)
from trishul_ray.storage.durable import Json

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.tasks.base import Task

_Config = TypeVar("_Config", bound=Section)
_S = TypeVar("_S", bound="type[Stage]")


class StageSettings(Settings, Protocol):
    """Settings of an experiment that stages can read."""

    @property
    def seed(self) -> int:
        """Seed of the run."""

    @property
    def draw_seed(self) -> int:
        """Seed of the partition, of the client sampling and of the clients' speeds."""

    @property
    def method(self) -> MethodConfig:
        """The section ``method``."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """The section ``optimizer``."""

    @property
    def stages(self) -> Mapping[str, Section]:
        """The sections of the enabled stages, keyed by name."""

    @property
    def surveys(self) -> int:
        """Number of surveys before round 1: 0 or 1."""

    @property
    def method_as_set(self) -> str:
        """The method as displayed in messages, with its non-default fields."""

    def section(self, kind: type[_Config]) -> _Config:
        """Return the section of a stage, with default values if it is not set.

        Args:
            kind: Class of the section.

        Returns:
            The section of this class.
        """


class Stage:
    """Base class of stages.

    Subclasses set ``Config`` and override the hooks that they need; every hook has a default
    without an effect. Each process of a run, the server and every worker, creates its own instance.
    The constructor must be cheap, because every validation of an experiment creates its stages.

    Attributes:
        Config: Class of the section. All its fields have defaults, and the defaults disable the
            stage.
        name: Name of the section, set by :func:`register_stage`.
        example: Non-default fields with which ``trishul check`` tests the stage. Fields of other
            sections that the stage needs have their full names.
        wire: Position in the pipeline; stages with larger values are closer to the network.
        alters_mean: Whether the next state differs from the mean of the clients' models.
        protects_clients: Whether clients must be indistinguishable. If so, a client without a
            finite loss sends zeros instead of ending the run, and the quorum is not checked.
        needs_client_changes: Whether :meth:`aggregate` needs the change of each client. If so, the
            server stores all uploads of a round.
        computes_gradients: Whether :meth:`gradient` replaces the mean gradient of a mini-batch in
            every local step. At most one stage of a run may have it.
        summed: Metrics of :class:`Change` that the round's record sums over clients; it averages
            all others.
        numbers: Names in the round's record that MLflow shows in the section's group, in addition
            to names that start with the section's name.
        registries: Fields that name a registered object, and the registry of each. The plug-ins
            that define these objects are stored with the run.
        plan: Facts of the run; available only on the server.
        memory: Values that the stage keeps between rounds; available only on the server. Hooks
            modify it in place, and checkpoints include it.
        config: The section.
        settings: Settings of the experiment that stages can read.

    Args:
        config: The section.
        settings: Settings of the experiment that stages can read.

    Example:
        >>> class HalfConfig(Section):
        ...     factor: float = 1.0
        >>> class Half(Stage):
        ...     Config = HalfConfig
        ...     def mean(self, number, mean):
        ...         return mean.with_shared(self.config.factor * mean.state.shared)
    """

    Config: ClassVar[type[Section]] = Section
    name: ClassVar[str] = ""
    example: ClassVar[Mapping[str, Any]] = {}
    wire: ClassVar[int] = 0
    alters_mean: ClassVar[bool] = False
    protects_clients: ClassVar[bool] = False
    needs_client_changes: ClassVar[bool] = False
    computes_gradients: ClassVar[bool] = False
    summed: ClassVar[frozenset[str]] = frozenset()
    numbers: ClassVar[frozenset[str]] = frozenset()
    registries: ClassVar[Mapping[str, Registry[Any]]] = {}

    def __init__(self, config: Section, settings: StageSettings) -> None:
        self.config, self.settings = config, settings
        self.plan: RunPlan
        self.memory: Memory = {}

    @classmethod
    def parts(cls, config: Section, settings: StageSettings) -> Sequence[Stage]:
        """Create the stages of a section that is set.

        Override it if a section has several stages at different positions in the pipeline.

        Args:
            config: The section.
            settings: Settings of the experiment that stages can read.

        Returns:
            The stages; by default, one instance of this class.
        """
        return [cls(config, settings)]

    @property
    def transforms_changes(self) -> bool:
        """Whether the stage requires a method whose next state follows from the mean change."""
        return True

    def check(self, method: Method) -> None:
        """Validate the experiment; by default, accept it.

        Args:
            method: The method of the experiment.

        Raises:
            ValueError: The stage does not support the experiment. The message names the fields,
                their values and the allowed values.
        """

    @property
    def stateful_fields(self) -> tuple[str, ...]:
        """Fields, as ``field=value``, whose effect on a change depends on earlier rounds."""
        return ()

    @property
    def files(self) -> dict[str, str]:
        """Paths of the files that the section refers to, keyed by field.

        The hash of each file is stored in the field ``<field>_content``. It replaces the path in
        run ids.
        """
        return {}

    @property
    def reads_rounds(self) -> bool:
        """Whether the effect of the stage in a round depends on the total number of rounds."""
        return False

    def rounds(self, rounds: int) -> int:
        """Return the number of rounds of the run.

        Args:
            rounds: The requested number of rounds.

        Returns:
            The number of rounds that the run makes; by default, all requested rounds.
        """
        return rounds

    def prepare(self) -> Sequence[str]:
        """Check the prerequisites of a run before it starts.

        Returns:
            Notices for the user, one line each.

        Raises:
            InputError: A prerequisite is missing; no file has been written yet.
        """
        return ()

    def check_rows(self, task: Task, sizes: np.ndarray) -> None:
        """Reject a task or shards that the stage does not support (default: accept all).

        It is called on the driver before a run begins, when the rows are known.

        Args:
            task: The task.
            sizes: int64 [N], training rows of the clients.

        Raises:
            InputError: Names the fields, their values, and the allowed values.
        """

    @property
    def needs(self) -> frozenset[str]:
        """Fields of :class:`RunPlan` that a worker must measure: ``flops``, ``shard_sizes``."""
        return frozenset()

    @property
    def quorum(self) -> dict[str, int]:
        """Number of valid uploads that a round requires, keyed by the field that sets it."""
        return {}

    def begin(self) -> Sequence[str]:
        """Prepare the server for the rounds of a run.

        The server calls it again if the clients' responses to a survey change the adapters.

        Returns:
            Notices for the user, one line each.
        """
        return ()

    def broadcast(self, number: int, sent: BroadcastMessage) -> BroadcastMessage:
        """Transform the broadcast of a round on the server.

        Args:
            number: The round, from 1.
            sent: The broadcast after the stages so far.

        Returns:
            The broadcast as clients read it.
        """
        return sent

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Select the clients of a round on the server.

        Args:
            number: The round, from 1; 0 is the survey.
            cohort: The clients selected so far; initially a uniform sample.

        Returns:
            The clients of the round.
        """
        return cohort

    def instruct(self, number: int) -> dict[str, float]:
        """Return numbers to send to the clients of a round, keyed by name.

        Args:
            number: The round, from 1; 0 is the survey.

        Returns:
            The numbers; clients receive them as :attr:`ClientRoundInfo.instructions`.
        """
        return {}

    def gradient(self, step: LocalStep) -> Tensor:
        """Fill ``step.grad`` and return the loss of the step, a scalar on the device.

        It is called on the worker, only with :attr:`computes_gradients`. It chooses the rows of the
        step, and calls ``step.examples`` for losses and gradients per example. The method's
        correction of the gradient and the optimizer follow. Draw random numbers from ``step.rng``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define gradient()")

    def send(self, change: Change, sender: ClientRoundInfo) -> Change:
        """Transform a client's change on its worker.

        It must be a pure function: do not write to the given arrays, and draw random numbers only
        from ``sender.rng``.

        Args:
            change: The change after the stages so far.
            sender: The client and the round.

        Returns:
            The change to pass on.
        """
        return change

    def answer(
        self, answers: dict[str, np.ndarray], instructions: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Transform a client's responses to a survey on its worker.

        Args:
            answers: The responses after the stages so far, keyed by name.
            instructions: Numbers from :meth:`instruct` for round 0, keyed by name.

        Returns:
            The responses to pass on, keyed by name.
        """
        return answers

    def survey(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Compute the mean responses to a survey on the server.

        Args:
            sums: The sums of the responses over the clients, keyed by name.

        Returns:
            The mean responses, keyed by name; None (the default) to use the sums.
        """
        return None

    def rebase(self, total: Partial, start: Start, now: Start, *, changes: bool) -> Partial:
        """Transform the sum of uploads of clients that trained from the same broadcast.

        With :attr:`Cohort.earlier`, the clients of a round have read different broadcasts. The hook
        runs once per broadcast, and the server adds the returned sums.

        Args:
            total: Sum of the valid uploads.
            start: The clients, and the broadcast that they have read.
            now: The round, and its broadcast.
            changes: Whether the uploads are changes since ``start.read``, or values.

        Returns:
            The transformed sum; by default, ``total``.
        """
        return total

    def average(self, number: int, total: Partial) -> MeanChange | None:
        """Compute the mean change of a round on the server.

        Args:
            number: The round, from 1.
            total: The sum of the valid uploads.

        Returns:
            The mean change; None (the default) to use the weighted mean.
        """
        return None

    def aggregate(
        self, number: int, mean: MeanChange, changes: Mapping[int, np.ndarray]
    ) -> MeanChange:
        """Replace the mean change of a round by an aggregate of the single changes.

        The server calls it only if :attr:`needs_client_changes` is set.

        Args:
            number: The round, from 1.
            mean: The mean change.
            changes: The valid changes of the shared part, each [W] float32, in ascending order of
                clients.

        Returns:
            The aggregate.
        """
        return mean

    def mean(self, number: int, mean: MeanChange) -> MeanChange:
        """Transform the mean change of a round on the server.

        Args:
            number: The round, from 1.
            mean: The mean change after the stages so far.

        Returns:
            The mean change to pass on.
        """
        return mean

    def end(
        self, number: int, state: ArrayState, clients: Sequence[ClientRound]
    ) -> dict[str, float]:
        """Return numbers for the record of a round, keyed by name.

        Args:
            number: The round, from 1.
            state: The state of the server after the round.
            clients: The clients that took part.

        Returns:
            The numbers; by default none.
        """
        return {}

    def report(self, last: Mapping[str, float]) -> Json | None:
        """Return the stage's entry in the summary of a run.

        The command line and MLflow display the value of ``sentence``, if present. During the call,
        ``memory`` has its value at the end of the run, and ``plan`` is not set.

        Args:
            last: Numbers of stages in the last record, keyed by name.

        Returns:
            The entry; None (the default) to omit it.
        """
        return None

    @classmethod
    def remark(cls, reports: Sequence[Json]) -> str:
        """Return a remark that tables show for runs with this stage.

        Args:
            reports: The entries in the summaries of the runs, from :meth:`report`.

        Returns:
            The remark, or an empty string (the default).
        """
        return ""


STAGES = Registry[type[Stage]]("stage", "section")

#: Names of the sections of all stages.
stage_names = STAGES.names


def register_stage(name: str) -> Callable[[_S], _S]:
    """Register a stage as the section ``name``.

    Args:
        name: Name of the section.

    Returns:
        A class decorator. It also sets the class attribute ``name``.
    """

    def add(cls: _S) -> _S:
        STAGES.add(name, cls)
        cls.name = name
        return cls

    return add
