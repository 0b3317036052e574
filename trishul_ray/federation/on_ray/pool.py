"""The executor of the Ray backend: a pool of client actors that run jobs as they become idle.

The result of a job does not depend on the actor, so any idle actor runs the next job. Ray never
restarts an actor: the pool replaces an actor that died, and gives its job to the next idle actor.
The pool does not create a placement group: inside a Ray Tune trial, the trial's bundles capture its
actors.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from trishul_ray.errors import InputError, RunError, first_line, typed_line
from trishul_ray.federation.messages import (
    MOST_CLIENTS,
    Arrays,
    EvalJob,
    Job,
    Outcome,
    TrainJob,
    Upload,
    WorkerSpec,
    changed_sources,
    units_of_work,
)
from trishul_ray.federation.on_ray.client_actor import FETCH_SECONDS
from trishul_ray.federation.on_ray.metrics import RunMetrics
from trishul_ray.federation.on_ray.process import RunRequest
from trishul_ray.federation.reduce import FAN_IN, Reducer, combine, groups, sum_groups
from trishul_ray.runtime.stack import Stack
from trishul_ray.stages import ArrayState, Partial


def cause_of(error: Exception) -> str:
    """Return the reason of an actor's failure in one line, without the remote traceback."""
    # A RayActorError raised in an actor is also a RayTaskError.
    if isinstance(error, RayTaskError):
        inner = error.cause
        if inner is None or type(inner).__module__.startswith("trishul_ray."):
            return first_line(inner or error)
        # The fault is in a plug-in or is a bug: report its type and location.
        frames = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        own = [(file, number) for file, number in frames if "site-packages" not in file]
        place = f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""
        return typed_line(inner) + place
    # The text of a RayActorError is long, and ends with a list of possible causes.
    detail = re.search(
        r"Worker exit detail: (.*?)\.?(?: There are| Some common|$)", str(error), re.M
    )
    return detail[1].strip() if detail else first_line(error)


def run_error(action: str, error: RayTaskError) -> Exception:
    """Return errors of this package and of Ray unchanged, and wrap others in a RunError.

    A Ray error means that an object was lost with its node, not that this package failed.
    """
    if isinstance(error.cause, InputError | RunError | RayError):
        return error.cause
    return RunError(f"{action}: {cause_of(error)}")


@dataclass
class Call:
    """A call that any actor can execute.

    Attributes:
        name: The action, for an error message.
        submit: Function that submits the call to an actor, and returns the reference of its result.
        ended: Function that receives the result, and returns subsequent calls, if any.
    """

    name: str
    submit: Callable[[Any], Any]
    ended: Callable[[Any], "Sequence[Call] | None"]


class ActorPool:
    """The client actors of one run, owned by the process that started them; they end with it.

    The constructor waits for the first actor; the others join as they start. Thus a run on a busy
    cluster starts with the available actors, and two runs that each have a part of the resources
    that both need never wait for each other.

    Args:
        run: The run.
        actors: Actors that were requested.
        start: Function that requests another actor.
        replacements: Maximum number of dead actors to replace between the ends of two rounds.
        metrics: The metrics of the run.

    Raises:
        InputError: An actor could not build its worker context from its input.
        RunError: No actor started.
    """

    def __init__(
        self,
        run: RunRequest,
        actors: Collection[Any],
        start: Callable[[], Any],
        replacements: int,
        metrics: RunMetrics,
    ) -> None:
        self._run, self._start, self._metrics = run, start, metrics
        self._replacements = self._left = replacements
        # process ids of the actors that run jobs, in starting order
        self._pids: dict[Any, int] = {}
        self._opening: dict[Any, Any] = {}  # reference of the result of open() -> actor
        self._events: list[str] = []
        self._spec: WorkerSpec | None = None
        self.stacks: list[Stack] = []
        for actor in actors:
            self._open(actor)
        while not self._pids:
            (ready, *_), _ = ray.wait(list(self._opening), num_returns=1)
            self._admit(ready)

    @property
    def actors(self) -> list[Any]:
        """All actors that are not known to be dead."""
        return [*self._pids, *self._opening.values()]

    def processes(self) -> list[int]:
        """Return the process ids of the actors that have started."""
        return list(self._pids.values())

    def _open(self, actor: Any) -> None:
        self._opening[actor.open.remote(self._run)] = actor

    def _admit(self, ready: Any) -> Any | None:
        """Add the actor that has opened the run, and return it, or None if it died."""
        actor = self._opening.pop(ready)
        try:
            pid, remarks, spec = ray.get(ready)
        except RayActorError as error:
            self._replace(actor, error)
            return None
        except RayTaskError as error:
            raise run_error("a client actor could not start", error) from error
        self._spec = self._spec or spec
        if other := changed_sources(self._spec.sources, spec.sources):
            raise InputError(
                f"the nodes of the cluster have different {other}: provide the same on every node"
            )
        if spec.stack not in self.stacks:
            self.stacks.append(spec.stack)
            if len(self.stacks) > 1 and not self._run.experiment["resources"]["mixed_stack"]:
                raise InputError(
                    f"a node of the cluster has {spec.stack.difference(self.stacks[0])} as others "
                    "do: bytes may differ; use equal nodes, or set resources.mixed_stack=true"
                )
        self._events += remarks
        self._pids[actor] = pid
        return actor

    def _replace(self, actor: Any, error: RayActorError) -> None:
        """Start another actor for a dead one, unless the replacements are used up.

        Raises:
            RunError: No actor is left.
        """
        ray.kill(actor)  # It may only be unreachable: free its resources.
        pid = self._pids.pop(actor, None)
        loss = "a client actor did not start" if pid is None else f"client actor {pid} died"
        self._events.append(f"{loss} ({cause_of(error)})")
        if self._left > 0:
            self._left -= 1
            self._metrics.update("trishul_restarts")
            self._events[-1] += "; another one replaces it"
            self._open(self._start())
        if not self.actors:
            raise RunError(
                f"every client actor died, and resources.max_restarts is used up: "
                f"{'; '.join(self._events[-3:])}"
            )

    def _run_calls(self, calls: Sequence[Call]) -> None:
        """Execute each call on an idle actor, and the calls that follow it before all others."""
        waiting, idle = deque(calls), deque(self._pids)
        running: dict[Any, tuple[Call, Any]] = {}  # reference -> call and actor
        while waiting or running:
            while waiting and idle:
                call, actor = waiting.popleft(), idle.popleft()
                running[call.submit(actor)] = call, actor
            self._metrics.update("trishul_waiting_jobs", len(waiting))
            (done, *_), _ = ray.wait([*running, *self._opening], num_returns=1)
            if done in self._opening:
                if (started := self._admit(done)) is not None:
                    idle.append(started)
                continue
            call, actor = running.pop(done)
            try:
                result = ray.get(done)
            except RayActorError as error:
                waiting.appendleft(call)
                self._replace(actor, error)
                continue
            except RayTaskError as error:
                raise run_error(f"{call.name} failed", error) from error
            idle.append(actor)
            waiting.extendleft(call.ended(result) or ())
        self._left = self._replacements

    def describe(self, survey: Arrays) -> WorkerSpec:
        """Return the spec of the first actor that responds; all actors build the same spec."""
        found = [self._spec]
        if survey:
            sent = ray.put(survey)
            self._run_calls(
                [Call("an adapter", lambda actor: actor.describe.remote(sent), found.append)]
            )
        self._spec = found[-1]
        assert self._spec is not None  # The constructor waits for it.
        return self._spec

    def run(
        self,
        broadcast: ArrayState,
        jobs: Sequence[Job],
        reducer: Reducer | None = None,
        trained: Callable[[Sequence[Any]], None] | None = None,
    ) -> Outcome:
        """Run all jobs on idle actors; see ``Executor.run``.

        Stacked clients train in one call. The next idle actor sums a group of uploads, which are
        then released.

        Raises:
            RunError: A job failed, or no actor is left.
        """
        train = [job for job in jobs if isinstance(job, TrainJob)]
        scored = [job for job in jobs if isinstance(job, EvalJob)]
        units = units_of_work(train, self._run.experiment["federation"]["stacked"])
        summed = reducer is not None and len(train) > FAN_IN
        parts = dict(enumerate(groups(train))) if summed else {}
        first = range(len(train))[:MOST_CLIENTS]
        # references; keyed by the position of the job, like the following dictionaries
        uploads: dict[int, Any] = {}
        reports: dict[int, Any] = {}
        evaluations: dict[int, Any] = {}
        sums: dict[int, Any] = {}  # references, keyed by group
        sent = ray.put(broadcast)  # only once for all jobs
        shared = ray.put(reducer) if summed else None

        def train_unit(unit: list[int]) -> Call:
            def submit(actor: Any) -> Any:
                method = actor.train.options(num_returns=1 + len(unit))
                result, *made = method.remote(sent, *(train[index] for index in unit))
                uploads.update(zip(unit, made, strict=True))
                return result

            def ended(found: Sequence[Any]) -> list[Call]:
                reports.update(zip(unit, found, strict=True))
                if len(reports) == len(train) and trained is not None:
                    trained([uploads[index] for index in first])
                ready = [number for number, part in parts.items() if reports.keys() >= {*part}]
                return [sum_group(number, parts.pop(number)) for number in ready]

            clients = " and ".join(str(train[index].client) for index in unit)
            return Call(f"client {clients} in round {train[unit[0]].round}", submit, ended)

        def sum_group(number: int, part: list[int]) -> Call:
            def submit(actor: Any) -> Any:
                result, sums[number] = actor.reduce.remote(shared, [uploads[i] for i in part])
                return result

            def ended(_: None) -> None:
                for index in {*part} - {*first}:
                    del uploads[index]

            return Call(f"summing group {number}", submit, ended)

        def evaluate(number: int, job: EvalJob) -> Call:
            name = f"evaluation of rows {job.start}:{job.stop} after round {job.round}"
            return Call(
                name,
                lambda actor: actor.evaluate.remote(sent, job),
                lambda found: evaluations.update({number: found}),
            )

        self._run_calls([*map(train_unit, units), *map(evaluate, range(len(scored)), scored)])
        events, self._events = self._events, []
        return Outcome(
            uploads=[uploads[index] for index in sorted(uploads)],
            reports=[reports[index] for index in sorted(reports)],
            evaluations=[evaluations[number] for number in sorted(evaluations)],
            events=events,
            sums=[sums[number] for number in sorted(sums)],
        )

    def reduce(self, outcome: Outcome, reducer: Reducer) -> Partial:
        """Add the sums of groups; sum uploads here that no actor has summed."""
        if outcome.sums:
            return combine(ray.get(outcome.sums, timeout=FETCH_SECONDS))
        return combine(sum_groups(self.fetch(outcome.uploads), reducer))

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Return uploads as read-only views of the object store."""
        fetched: list[Upload] = ray.get(uploads)
        return fetched
