"""All stages of a run, called in the order of their places.

Legend: W entries of the shared part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trishul_ray.config.section import stored_hash
from trishul_ray.stages.base import STAGES, Stage, StageSettings
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
    def read_changes(self) -> bool:
        """Whether a stage needs the change of each client."""
        return any(stage.reads_changes for stage in self)

    @property
    def hide_clients(self) -> bool:
        """Whether clients must be indistinguishable."""
        return any(stage.hides_clients for stage in self)

    @property
    def needs(self) -> frozenset[str]:
        """Facts of :class:`RunPlan` that a worker measures."""
        return frozenset().union(*(stage.needs for stage in self))

    @property
    def quorum(self) -> dict[str, int]:
        """How many valid uploads a round needs, by the field that says so."""
        return {name: least for stage in self for name, least in stage.quorum.items()}

    def begin(self, plan: RunPlan, memories: dict[str, Memory]) -> list[str]:
        """Prepare for the rounds of a run, on the server; return lines for its reader.

        Args:
            plan: Facts of the run.
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
        """Return the clients of a round, given the uniformly sampled clients."""
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

    def send(self, change: Change, sender: Sender) -> Change:
        """Pass a client's change through the stages, on its worker."""
        for stage in self:
            change = stage.send(change, sender)
        return change

    def average(self, number: int, total: Partial) -> MeanChange | None:
        """Return the mean change of a round by the first stage that has its own."""
        found = (stage.average(number, total) for stage in reversed(self._stages))
        return next((each for each in found if each is not None), None)

    def aggregate(
        self, number: int, mean: MeanChange, changes: Mapping[int, np.ndarray]
    ) -> MeanChange:
        """Pass the mean change of a round, and each client's, through the stages that read them."""
        for stage in reversed(self._stages):
            if stage.reads_changes:
                mean = stage.aggregate(number, mean, changes)
        return mean

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
        """Return the entries of stages in the summary of a run, by the stage's name.

        Args:
            memories: What each stage keeps at the end of the run, by name.
            last: Numbers of stages in the last record, by name.
        """
        for stage in self:
            stage.memory = memories.get(stage.name, {})
        found = {stage.name: stage.report(last) for stage in self}
        return {name: each for name, each in found.items() if each is not None}


def noted_hashes(stage: Stage) -> dict[str, str]:
    """Return the noted hashes of a stage's files, by field; a note on another path is none."""
    found = {}
    for name, path in stage.files.items():
        if found_hash := stored_hash(getattr(stage.config, f"{name}_content"), path):
            found[name] = found_hash
    return found
