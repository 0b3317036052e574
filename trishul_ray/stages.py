"""The contract of a stage: one of the things that may stand between clients and the next state.

A stage is one file: a section of the configuration, and what happens to a round while that section
is set. Without the section, a run has the id, the bytes and the imports that it has without the
stage. A codec of uploads, differential privacy, sums in fixed point, a server optimizer and the
simulated clock are stages::

    class FedAvgMConfig(Section):
        momentum: float = Field(0.0, ge=0, lt=1, description="of the mean change")

    @register_stage("fedavgm")
    class FedAvgM(Stage):
        Config = FedAvgMConfig
        config: FedAvgMConfig

A user then writes ``fedavgm.momentum=0.9``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from trishul_ray import plugins
from trishul_ray.config import Noted, OptimizerConfig, Section
from trishul_ray.methods.base import Method, Settings

_Config = TypeVar("_Config", bound=Section)
_S = TypeVar("_S", bound="type[Stage]")


class StageSettings(Settings, Protocol):
    """The part of an experiment that a stage may read."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

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
        wire: The place in the row of stages; larger is nearer to the wire.
        registries: Fields that name something registered, and its registry. The plug-ins of what
            they name are noted with the run.
        config: The section.
        settings: The part of the experiment that a stage may read.
    """

    Config: ClassVar[type[Section]] = Section
    name: ClassVar[str] = ""
    wire: ClassVar[int] = 0
    registries: ClassVar[Mapping[str, plugins.Registry[Any]]] = {}

    def __init__(self, config: Section, settings: StageSettings) -> None:
        self.config, self.settings = config, settings

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


def noted_hashes(stage: Stage) -> dict[str, str]:
    """Return the noted hashes of a stage's files, by field; a note on another path is none."""
    found = {}
    for field, path in stage.files.items():
        note = getattr(stage.config, f"{field}_content")
        if isinstance(note, Noted) and (hash_ := note.hash_of(path)):
            found[field] = hash_
    return found
