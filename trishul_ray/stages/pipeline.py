"""The pipeline of stages of a run, called in the order of their positions.

Legend: W entries of the shared part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trishul_ray.config.section import stored_hash
from trishul_ray.stages.base import STAGES, Stage, StageSettings
from trishul_ray.stages.messages import (
    ArrayState,
    BroadcastMessage,
    Change,
    ClientRound,
    ClientRoundInfo,
    Cohort,
    MeanChange,
    Memory,
    Partial,
    RunPlan,
    Start,
)
from trishul_ray.storage.durable import Json


class Stages:
    """The stages of a run, in ascending order of ``wire``.

    Args:
        stages: The stages, in any order.
    """

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._stages = tuple(sorted(stages, key=lambda each: (each.wire, each.name)))

    @classmethod
    def of(cls, settings: StageSettings) -> Stages:
        """Create the stages of an experiment."""
        sections = settings.stages.items()
        return cls([s for name, config in sections for s in STAGES[name].parts(config, settings)])

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    @property
    def act_on_changes(self) -> bool:
        """Whether clients send the change since the broadcast instead of the value."""
        return any(stage.transforms_changes for stage in self)

    @property
    def read_changes(self) -> bool:
        """Whether a stage needs the change of each client."""
        return any(stage.needs_client_changes for stage in self)

    @property
    def hide_clients(self) -> bool:
        """Whether clients must be indistinguishable."""
        return any(stage.protects_clients for stage in self)

    @property
    def of_gradients(self) -> Stage | None:
        """The stage that computes the gradients of local steps, or None."""
        return next((stage for stage in self if stage.computes_gradients), None)

    @property
    def needs(self) -> frozenset[str]:
        """Fields of :class:`RunPlan` that a worker must measure."""
        return frozenset().union(*(stage.needs for stage in self))

    @property
    def quorum(self) -> dict[str, int]:
        """Number of valid uploads that a round requires, keyed by the field that sets it."""
        return {name: least for stage in self for name, least in stage.quorum.items()}

    def begin(self, plan: RunPlan, memories: dict[str, Memory]) -> list[str]:
        """Prepare the server for the rounds of a run.

        Args:
            plan: Facts of the run.
            memories: State of each stage, keyed by stage name; stages modify it in place.

        Returns:
            Notices for the user, one line each.
        """
        for stage in self:
            stage.plan, stage.memory = plan, memories.setdefault(stage.name, {})
        return [line for stage in self for line in stage.begin()]

    def broadcast(self, number: int, state: ArrayState) -> BroadcastMessage:
        """Pass the method's broadcast through the stages."""
        sent = BroadcastMessage(state, state)
        for stage in self:
            sent = stage.broadcast(number, sent)
        return sent

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Let the stages select the clients of a round from the uniformly sampled clients."""
        for stage in reversed(self._stages):
            cohort = stage.cohort(number, cohort)
        return cohort

    def instruct(self, number: int) -> dict[str, float]:
        """Collect the numbers to send to the clients of a round, keyed by name."""
        return {k: v for stage in self for k, v in stage.instruct(number).items()}

    def answer(
        self, answers: dict[str, np.ndarray], instructions: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Pass a client's responses to a survey through the stages, on its worker."""
        for stage in self:
            answers = stage.answer(answers, instructions)
        return answers

    def survey(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Compute the mean responses with the first stage that overrides them, or return None."""
        found = (stage.survey(sums) for stage in reversed(self._stages))
        return next((each for each in found if each is not None), None)

    def send(self, change: Change, sender: ClientRoundInfo) -> Change:
        """Pass a client's change through the stages, on its worker."""
        for stage in self:
            change = stage.send(change, sender)
        return change

    def rebase(self, total: Partial, start: Start, now: Start) -> Partial:
        """Pass the sum of the uploads of clients that started together through the stages."""
        for stage in reversed(self._stages):
            total = stage.rebase(total, start, now, changes=self.act_on_changes)
        return total

    def average(self, number: int, total: Partial) -> MeanChange | None:
        """Compute the mean change with the first stage that overrides it, or return None."""
        found = (stage.average(number, total) for stage in reversed(self._stages))
        return next((each for each in found if each is not None), None)

    def aggregate(
        self, number: int, mean: MeanChange, changes: Mapping[int, np.ndarray]
    ) -> MeanChange:
        """Pass the mean change and the clients' changes through the stages that read them."""
        for stage in reversed(self._stages):
            if stage.needs_client_changes:
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
        """Collect the stages' numbers for the record of a round, keyed by name."""
        each = [stage.end(number, state, clients) for stage in reversed(self._stages)]
        return {name: value for found in each for name, value in found.items()}

    def reports(self, memories: Mapping[str, Memory], last: Mapping[str, float]) -> dict[str, Json]:
        """Collect the stages' entries in the summary of a run, keyed by stage name.

        Args:
            memories: State of each stage at the end of the run, keyed by stage name.
            last: Numbers of stages in the last record, keyed by name.
        """
        for stage in self:
            stage.memory = memories.get(stage.name, {})
        found = {stage.name: stage.report(last) for stage in self}
        return {name: each for name, each in found.items() if each is not None}


def noted_hashes(stage: Stage) -> dict[str, str]:
    """Return the stored hashes of a stage's files, keyed by field; ignore hashes of other paths."""
    found = {}
    for name, path in stage.files.items():
        if found_hash := stored_hash(getattr(stage.config, f"{name}_content"), path):
            found[name] = found_hash
    return found
