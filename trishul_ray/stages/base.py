"""Base class of stages, and their registry.

Legend: W entries of the shared part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from trishul_ray.config.fields import OptimizerConfig
from trishul_ray.config.section import Section
from trishul_ray.methods.base import Method, MethodConfig, Settings
from trishul_ray.plugins.registry import Registry
from trishul_ray.stages.messages import (
    ArrayState,
    Change,
    ClientRound,
    Cohort,
    MeanChange,
    Memory,
    Partial,
    RunPlan,
    Sender,
    Sent,
)
from trishul_ray.storage.durable import Json

_Config = TypeVar("_Config", bound=Section)
_S = TypeVar("_S", bound="type[Stage]")


class StageSettings(Settings, Protocol):
    """The part of an experiment that a stage may read."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    @property
    def draw_seed(self) -> int:
        """The seed of which rows clients have, which clients take part, and how fast they are."""

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
        moves_beyond_mean: Whether the next state differs from the mean of the clients' models.
        hides_clients: Whether clients must be indistinguishable: a client without a finite loss
            sends zeros instead of ending the run, and no quorum is counted.
        reads_changes: Whether :meth:`aggregate` needs the change of each client; the server then
            keeps all uploads of a round.
        summed: Metrics of changes of which a round's record has the sum over clients; of others it
            has the mean.
        numbers: Names in a round's record, in addition to names that begin with the section's
            name, that MLflow shows in the section's group.
        registries: Fields that name a registered object, and its registry. The plug-ins of these
            objects are stored with the run.
        plan: Facts of the run, only on the server.
        memory: Values that the stage keeps between rounds, only on the server; hooks change them.
        config: The section.
        settings: The part of the experiment that a stage may read.
    """

    Config: ClassVar[type[Section]] = Section
    name: ClassVar[str] = ""
    example: ClassVar[Mapping[str, Any]] = {}
    wire: ClassVar[int] = 0
    moves_beyond_mean: ClassVar[bool] = False
    hides_clients: ClassVar[bool] = False
    reads_changes: ClassVar[bool] = False
    summed: ClassVar[frozenset[str]] = frozenset()
    numbers: ClassVar[frozenset[str]] = frozenset()
    registries: ClassVar[Mapping[str, Registry[Any]]] = {}

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

    def average(self, number: int, total: Partial) -> MeanChange | None:
        """Return the mean change of a round (from 1); None: the weighted mean (default).

        Args:
            number: The round.
            total: The sum of the valid uploads.
        """
        return None

    def aggregate(
        self, number: int, mean: MeanChange, changes: Mapping[int, np.ndarray]
    ) -> MeanChange:
        """Return what takes the place of the mean change of a round (from 1).

        It is called only with :attr:`reads_changes`.

        Args:
            number: The round.
            mean: The mean.
            changes: The valid changes of the shared part, [W] each, by ascending client.
        """
        return mean

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

        The command line and MLflow show the text ``sentence``, if there is one.
        ``memory`` is that of the end of the run, and ``plan`` is not set.

        Args:
            last: Numbers of stages in the last record, by name.
        """
        return None

    @classmethod
    def remark(cls, reports: Sequence[Json]) -> str:
        """Return what a reader of tables must know of runs with these reports (default: none)."""
        return ""


STAGES = Registry[type[Stage]]("stage", "section")

#: The names of the sections of all stages.
stage_names = STAGES.names


def register_stage(name: str) -> Callable[[_S], _S]:
    """Return a class decorator that makes a stage available as the section ``name``."""

    def add(cls: _S) -> _S:
        STAGES.add(name, cls)
        cls.name = name
        return cls

    return add
