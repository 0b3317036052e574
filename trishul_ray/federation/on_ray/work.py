"""The work of a round as calls that any idle client actor can take."""

from collections.abc import Callable, Sequence
from typing import Any

import ray

from trishul_ray.federation.messages import (
    MOST_CLIENTS,
    EvalJob,
    Job,
    Outcome,
    TrainJob,
    units_of_work,
)
from trishul_ray.federation.on_ray.process import Assignment
from trishul_ray.federation.reduce import FAN_IN, Reducer, groups
from trishul_ray.stages import ArrayState


class Work:
    """Calls by number: the first ``count`` at any time, the next ones each after some of them.

    Args:
        submit: ``submit(actor, number)`` makes a call, which answers ``(process, result)``.
        describe: What a call is for, in an error.
        count: Calls that wait for no other.
    """

    #: The calls that each call from ``count`` on waits for.
    after: Sequence[set[int]] = ()

    def __init__(
        self, submit: Callable[[Any, int], Any], describe: Callable[[int], str], count: int = 1
    ) -> None:
        self.submit, self.describe, self.count = submit, describe, count

    def end(self, number: int) -> None:
        """Note that a call has ended."""


class RoundWork(Work):
    """The jobs of a round, whose uploads are summed in groups as they come.

    Clients that are stacked train in one call. A group of uploads is summed by the next idle actor,
    and then given up; see ``Executor.run`` for ``reducer`` and ``trained``.
    """

    def __init__(
        self,
        run: Assignment,
        broadcast: ArrayState,
        jobs: Sequence[Job],
        reducer: Reducer | None,
        trained: Callable[[Sequence[Any]], None] | None,
    ) -> None:
        self._run, self._jobs, self._trained = run, jobs, trained
        self._broadcast = ray.put(broadcast)  # one for all jobs
        self._units = units_of_work(jobs, run.experiment["federation"]["stacked"])
        super().__init__(self._submit, self._describe, len(self._units))
        self._train = [index for index, job in enumerate(jobs) if isinstance(job, TrainJob)]
        self._kept = self._train[:MOST_CLIENTS]
        self._parts: list[list[int]] = []  # jobs whose uploads are summed, by group
        if reducer is not None and len(self._train) > FAN_IN:
            self._parts = [[self._train[i] for i in group] for group in groups(self._train)]
            self._reducer = ray.put(reducer)
        unit_of = {index: number for number, unit in enumerate(self._units) for index in unit}
        self.after = [{unit_of[index] for index in part} for part in self._parts]
        self._training = {unit_of[index] for index in self._train}
        self._uploads: dict[int, Any] = {}
        self._sums: dict[int, Any] = {}

    def _submit(self, actor: Any, number: int) -> Any:
        if number >= self.count:
            part = [self._uploads[index] for index in self._parts[number - self.count]]
            answer, self._sums[number] = actor.reduce.remote(self._run, self._reducer, part)
            return answer
        unit = self._units[number]
        own = [self._jobs[index] for index in unit]
        if isinstance(own[0], EvalJob):
            return actor.evaluate.remote(self._run, self._broadcast, own[0])
        train = actor.train.options(num_returns=1 + len(own))
        reports, *sent = train.remote(self._run, self._broadcast, *own)
        self._uploads.update(zip(unit, sent, strict=True))
        return reports

    def _describe(self, number: int) -> str:
        if number >= self.count:
            return f"summing group {number - self.count}"
        return " and ".join(_describe_job(self._jobs[index]) for index in self._units[number])

    def end(self, number: int) -> None:
        """Give up uploads that are summed; say when all clients have trained."""
        for index in self._parts[number - self.count] if number >= self.count else ():
            if index not in self._kept:
                del self._uploads[index]
        if number in self._training:
            self._training.remove(number)
            if not self._training and self._trained is not None:
                self._trained([self._uploads[index] for index in self._kept])

    def outcome(self, answers: Sequence[Any], events: list[str]) -> Outcome:
        """Return the results of all jobs, given those of all calls."""
        results: dict[int, Any] = {}
        for unit, found in zip(self._units, answers, strict=False):  # sums follow
            in_training = isinstance(self._jobs[unit[0]], TrainJob)
            results |= zip(unit, found if in_training else [found], strict=True)
        evaluated = [i for i, job in enumerate(self._jobs) if isinstance(job, EvalJob)]
        return Outcome(
            uploads=[self._uploads[i] for i in self._train if i in self._uploads],
            reports=[results[i] for i in self._train],
            evaluations=[results[i] for i in evaluated],
            events=events,
            sums=[self._sums[number] for number in sorted(self._sums)],
        )


def _describe_job(job: Job) -> str:
    if isinstance(job, TrainJob):
        return f"client {job.client} in round {job.round}"
    return f"evaluation of rows {job.start}:{job.stop} after round {job.round}"
