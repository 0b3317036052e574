"""The Ray backend: a pool of client actors that take jobs as they become free.

Which actor runs a job cannot change its result, so the pool hands the next job to whoever is idle,
beginning with the first actor that is up. A crashed actor is restarted by Ray up to
``max_restarts`` times and its call repeated; an actor beyond that is dropped and its job given to
another. The pool opens no placement group and names nothing: inside a Ray Tune trial its actors
are captured by the trial's own bundles.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from trishul_ray.errors import InputError, RunError
from trishul_ray.federation.messages import (
    Arrays,
    Blueprint,
    EvalJob,
    Job,
    Outcome,
    SurveyJob,
    TrainJob,
    Upload,
)
from trishul_ray.federation.reduce import FAN_IN, Partial, Reducer, combine, groups, partial_sum


def cause_of(error: Exception) -> str:
    """The line of an actor's failure that a person needs, without the remote traceback."""
    if isinstance(error, RayActorError):
        return _cause_of_death(error)
    inner = error.cause if isinstance(error, RayTaskError) and error.cause else error
    lines = [line for line in str(inner).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(inner).__name__


def _cause_of_death(error: RayActorError) -> str:
    text = str(error)
    if error.actor_init_failed:  # a traceback: its last line says it
        return text.strip().splitlines()[-1].strip()
    # Ray tells in one long line what it knows, then lists everything that could be.
    for pattern in (r"Worker exit detail: (.*?)(?:\. There are|$)", r"because (.*?)(?:\. |$)"):
        found = re.search(pattern, text, re.MULTILINE)
        if found:
            return found.group(1).strip().rstrip(".")
    return text.strip().splitlines()[0]


class ActorPool:
    """Client actors of one run, owned by the process that started them; they die with it."""

    def __init__(self, started: Sequence[Any]) -> None:
        """Wait for the first actor; the others join as they come up.

        So a run on a busy cluster starts with what it gets, and two runs that each hold a part
        of what both want never wait for each other.

        Args:
            started: of :func:`~trishul_ray.federation.on_ray.actors.start_clients`.

        Raises:
            InputError: an actor could not build its workbench from its input.
            RunError: no actor came up.
        """
        self.restarts = 0
        self._events: list[str] = []
        #: Actors that take jobs, in the order in which they came up.
        self.actors: list[Any] = []
        self._pids: dict[Any, int] = {}
        # The first call builds the workbench, so an actor that answers it is ready to work.
        self._starting: dict[Any, Any] = {actor.describe.remote({}): actor for actor in started}
        self._blueprint: Blueprint | None = None
        while not self.actors:
            if not self._starting:
                raise RunError(f"no client actor came up: {'; '.join(self._events)}")
            (ready, *_), _ = ray.wait(list(self._starting), num_returns=1)
            self._arrive(ready)

    def _arrive(self, ready: Any) -> bool:
        """Take in an actor that is up, or has failed to come up."""
        actor = self._starting.pop(ready)
        try:
            self._pids[actor], self._blueprint = ray.get(ready)
        except RayActorError as error:
            self._events.append(f"a client actor did not come up ({cause_of(error)})")
            ray.kill(actor)
            return False
        except RayTaskError as error:
            raise _own_or("a client actor could not start", error) from error
        self.actors.append(actor)
        return True

    def describe(self, survey: Arrays) -> Blueprint:
        """The blueprint, from the first actor that tells it (all build the same)."""
        if survey:
            reference = ray.put(survey)
            (found,) = self._each(
                1, lambda actor, _: actor.describe.remote(reference), lambda _: "building adapters"
            )
            self._blueprint = found
        assert self._blueprint is not None  # the constructor waits for it
        return self._blueprint

    def run(self, broadcast: Arrays, jobs: Sequence[Job]) -> Outcome:
        """Run all jobs; one ``ray.put`` of the broadcast serves them all.

        Raises:
            RunError: a job failed by itself, or every actor is gone.
        """
        reference = ray.put(broadcast)
        uploads: dict[int, Any] = {}

        def begin(actor: Any, index: int) -> Any:
            job = jobs[index]
            if isinstance(job, TrainJob):
                small, uploads[index] = actor.train.remote(reference, job)
                return small
            if isinstance(job, SurveyJob):
                return actor.survey.remote(job)
            return actor.evaluate.remote(reference, job)

        results = self._each(len(jobs), begin, lambda index: _describe_job(jobs[index]))
        order = range(len(jobs))
        return Outcome(
            uploads=[uploads[i] for i in order if i in uploads],
            reports=[results[i] for i in order if i in uploads],
            evaluations=[results[i] for i in order if isinstance(jobs[i], EvalJob)],
            surveys=[results[i] for i in order if isinstance(jobs[i], SurveyJob)],
            events=self.drain_events(),
        )

    def _each(
        self, count: int, begin: Callable[[Any, int], Any], say: Callable[[int], str]
    ) -> list[Any]:
        """Results of ``begin(actor, index)`` for every index, on whichever actor is idle."""
        waiting: deque[int] = deque(range(count))
        idle: deque[Any] = deque(self.actors)
        running: dict[Any, tuple[int, Any]] = {}  # reference -> (index, actor)
        results: dict[int, Any] = {}
        while waiting or running:
            while waiting and idle:
                index, actor = waiting.popleft(), idle.popleft()
                running[begin(actor, index)] = (index, actor)
            watched = [*running, *self._starting]
            if not watched:
                raise RunError(f"every client actor is gone: {'; '.join(self._events[-3:])}")
            (done, *_), _ = ray.wait(watched, num_returns=1)
            if done in self._starting:
                if self._arrive(done):
                    idle.append(self.actors[-1])
                continue
            index, actor = running.pop(done)
            try:
                pid, results[index] = ray.get(done)
            except RayActorError as error:
                self._drop(actor, error)
                waiting.appendleft(index)
                continue
            except RayTaskError as error:
                raise _own_or(f"{say(index)} failed", error) from error
            self._note_restart(actor, pid)
            idle.append(actor)
        return [results[index] for index in range(count)]

    def _note_restart(self, actor: Any, pid: int) -> None:
        if self._pids[actor] != pid:
            self.restarts += 1
            self._events.append(
                f"client actor {self._pids[actor]} died and was restarted as {pid} "
                f"(restart {self.restarts}); its work was repeated"
            )
            self._pids[actor] = pid

    def _drop(self, actor: Any, error: RayActorError) -> None:
        self.actors.remove(actor)
        # It may only be out of reach: its slice must be free either way.
        ray.kill(actor)
        pid = self._pids.pop(actor)
        self._events.append(f"client actor {pid} is gone for good ({cause_of(error)})")

    def drain_events(self) -> list[str]:
        """Restarts and losses since the last call, for people."""
        events, self._events = self._events, []
        return events

    def reduce(self, uploads: list[Any], reducer: Reducer) -> Partial:
        """Sum in groups of ``FAN_IN``: here if there is one group, else on the actors."""
        if len(uploads) <= FAN_IN:
            return partial_sum(self.fetch(uploads), reducer)
        shared, parts = ray.put(reducer), groups(uploads)

        def begin(actor: Any, index: int) -> Any:
            group = [uploads[i] for i in parts[index]]
            return actor.reduce.remote(shared, *group)

        return combine(self._each(len(parts), begin, lambda index: f"summing group {index}"))

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Uploads as read-only views of the object store."""
        found: list[Upload] = ray.get(uploads)
        return found

    def processes(self) -> list[int]:
        """Operating-system processes of the actors that are up, as last heard of."""
        return [self._pids[actor] for actor in self.actors]

    def close(self) -> None:
        """End the actors of this pool, and nothing else."""
        for actor in [*self.actors, *self._starting.values()]:
            ray.kill(actor)
        self.actors, self._starting = [], {}


def _own_or(what: str, error: RayTaskError) -> Exception:
    """An error of ours as it is, anything else as a failure of the run."""
    if isinstance(error.cause, InputError | RunError):
        return error.cause
    return RunError(f"{what}: {cause_of(error)}")


def _describe_job(job: Job) -> str:
    if isinstance(job, TrainJob):
        return f"client {job.client} in round {job.round}"
    if isinstance(job, SurveyJob):
        return f"the survey of client {job.client} before round 1"
    return f"evaluation of rows {job.start}:{job.stop} after round {job.round}"
