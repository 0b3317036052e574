"""The Ray backend: a pool of client actors that take jobs as they become free.

Which actor runs a job cannot change its result, so the pool hands the next job to whoever is idle.
A crashed actor is restarted by Ray up to ``max_restarts`` times and its call repeated; an actor
beyond that is dropped and its job given to another. The pool opens no placement group and names
nothing: inside a Ray Tune trial its actors are captured by the trial's own bundles.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.client import ClientActor
from trishul_ray.federation.jobs import Arrays, Job, TrainJob, Upload
from trishul_ray.federation.reduce import FAN_IN, Expected, Partial, combine, groups, partial_sum
from trishul_ray.federation.resources import Slices
from trishul_ray.federation.server import Blueprint, Outcome
from trishul_ray.federation.world import Prepared


def cause_of(error: Exception) -> str:
    """The line of an actor's failure that a person needs, without the remote traceback."""
    inner = error.cause if isinstance(error, RayTaskError) else error
    lines = [line for line in str(inner or error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


class ActorPool:
    """Client actors of one run. Owned by the process that makes it; dies with it."""

    def __init__(self, experiment: Experiment, prepared: Any, slices: Slices) -> None:
        """Start the actors.

        Args:
            experiment: what they build their workbenches from.
            prepared: a :class:`Prepared`, or a reference to one in the object store.
            slices: how many actors, with what each.

        Raises:
            InputError: an actor could not build its workbench from this input.
            RunError: no actor came up.
        """
        self.restarts = 0
        self._events: list[str] = []
        limit = experiment.resources.max_restarts
        remote = ClientActor.options(  # type: ignore[attr-defined]  # added by ray.remote
            num_cpus=slices.cpus,
            num_gpus=slices.gpus,
            max_restarts=limit,
            max_task_retries=limit,
        )
        plain, reference = experiment.to_dict(), _in_store(prepared)
        self.actors = [
            remote.remote(plain, reference, slices.gpus) for _ in range(slices.actors)
        ]
        self._pids: dict[Any, int] = {}
        for actor in self.actors:
            try:
                self._pids[actor] = ray.get(actor.process_id.remote())
            except RayActorError as error:
                raise actor_failure(error) from error

    def describe(self) -> Blueprint:
        """The blueprint, from the first actor (all build the same)."""
        blueprint: Blueprint = ray.get(self.actors[0].describe.remote())
        return blueprint

    def run(self, broadcast: Arrays, jobs: Sequence[Job]) -> Outcome:
        """Run all jobs; one ``ray.put`` of the broadcast serves them all.

        Raises:
            RunError: a job failed by itself, or every actor is gone.
        """
        reference = ray.put(broadcast)
        waiting: deque[int] = deque(range(len(jobs)))
        idle: deque[Any] = deque(self.actors)
        running: dict[Any, tuple[int, Any]] = {}  # small result -> (job, actor)
        uploads: dict[int, Any] = {}
        results: dict[int, Any] = {}
        while waiting or running:
            while waiting and idle:
                index, actor = waiting.popleft(), idle.popleft()
                job = jobs[index]
                if isinstance(job, TrainJob):
                    small, uploads[index] = actor.train.remote(reference, job)
                else:
                    small = actor.evaluate.remote(reference, job)
                running[small] = (index, actor)
            if not running:
                raise RunError("every client actor is gone: " + "; ".join(self._events[-3:]))
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            index, actor = running.pop(done)
            try:
                pid, results[index] = ray.get(done)
            except RayActorError as error:
                self._drop(actor, error)
                waiting.appendleft(index)
                continue
            except RayTaskError as error:
                raise RunError(f"{_describe_job(jobs[index])} failed: {cause_of(error)}") from error
            self._note_restart(actor, pid)
            idle.append(actor)
        events, self._events = self._events, []
        order = range(len(jobs))
        return Outcome(
            uploads=[uploads[i] for i in order if i in uploads],
            reports=[results[i] for i in order if i in uploads],
            evaluations=[results[i] for i in order if i not in uploads],
            events=events,
        )

    def _note_restart(self, actor: Any, pid: int) -> None:
        if self._pids[actor] != pid:
            self.restarts += 1
            self._events.append(
                f"client actor {self._pids[actor]} died and was restarted as {pid} "
                f"(restart {self.restarts}); its work was repeated"
            )
            self._pids[actor] = pid

    def _drop(self, actor: Any, error: Exception) -> None:
        self.actors.remove(actor)
        pid = self._pids.pop(actor)
        self._events.append(f"client actor {pid} is gone for good ({cause_of(error)})")

    def reduce(self, uploads: list[Any], weighting: str, expected: Expected) -> Partial:
        """Sum in groups of ``FAN_IN``: here if there is one group, else on the actors."""
        if len(uploads) <= FAN_IN:
            return partial_sum(self.fetch(uploads), weighting, expected)
        shared = ray.put(expected)
        partials = [
            self.actors[n % len(self.actors)].reduce.remote(
                weighting, shared, *(uploads[i] for i in group)
            )
            for n, group in enumerate(groups(uploads))
        ]
        return combine(ray.get(partials))

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Uploads as read-only views of the object store."""
        found: list[Upload] = ray.get(uploads)
        return found

    def close(self) -> None:
        """End the actors of this pool, and nothing else."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def _in_store(prepared: Any) -> Any:
    return ray.put(prepared) if isinstance(prepared, Prepared) else prepared


def _describe_job(job: Job) -> str:
    if isinstance(job, TrainJob):
        return f"client {job.client} in round {job.round}"
    return f"evaluation of rows {job.start}:{job.stop} after round {job.round}"


def actor_failure(error: RayActorError) -> Exception:
    """An actor's death as the error a person should see: bad input stays bad input."""
    text = str(error)
    for line in text.splitlines():
        if "InputError:" in line:
            return InputError(line.split("InputError:", 1)[1].strip())
    return RunError(f"an actor of the run died: {cause_of(error)}")
