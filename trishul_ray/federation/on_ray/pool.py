"""A pool of client actors that take jobs as they become idle: the executor of the Ray backend.

The actor that runs a job cannot change its result, so any idle actor takes the next job. Ray never
restarts an actor: the pool replaces one that died, and gives its job to the next idle actor. The
pool opens no placement group: inside a Ray Tune trial, the trial's bundles capture its actors.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from trishul_ray.federation.on_ray.process import Assignment
from trishul_ray.federation.reduce import FAN_IN, Reducer, combine, groups, sum_groups
from trishul_ray.stages import ArrayState, Partial


def cause_of(error: Exception) -> str:
    """Return the reason of an actor's failure in one line, without the remote traceback."""
    # Raised in an actor, a RayActorError is both.
    if isinstance(error, RayTaskError):
        inner = error.cause
        if inner is None or type(inner).__module__.startswith("trishul_ray."):
            return first_line(inner or error)
        # A fault of a plug-in, or a bug: its type and place help.
        frames = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        own = [(file, number) for file, number in frames if "site-packages" not in file]
        place = f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""
        return typed_line(inner) + place
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not isinstance(error, RayActorError) or error.actor_init_failed:
        return lines[-1] if lines else type(error).__name__  # the last line of a traceback
    # Ray writes one long line, with a list of possible causes at its end.
    end_of_detail = r"(?:\. (?:There are|Some common)|$)"
    for pattern in (rf"Worker exit detail: (.*?){end_of_detail}", r"because (.*?)(?:\. |$)"):
        if match := re.search(pattern, str(error), re.MULTILINE):
            return match.group(1).strip().rstrip(".")
    return lines[0]


def run_error(action: str, error: RayTaskError) -> Exception:
    """Return our own errors and errors of Ray unchanged, and any other as a failure of the run.

    An error of Ray says that an object was lost with its node: nothing failed in our code.
    """
    if isinstance(error.cause, InputError | RunError | RayError):
        return error.cause
    return RunError(f"{action}: {cause_of(error)}")


@dataclass
class Call:
    """A call that any actor may take, after the calls of some numbers.

    Attributes:
        submit: Makes the call on an actor; returns the reference of its answer.
        name: What it does, for an error message.
        after: Numbers of the calls that must have ended before.
        ended: Called when it has ended.
    """

    submit: Callable[[Any], Any]
    name: str
    after: set[int] = field(default_factory=set)
    ended: Callable[[], None] = lambda: None


class ActorPool:
    """The client actors of one run, owned by the process that started them; they end with it.

    The constructor waits for the first actor; the others join as they start. So a run on a busy
    cluster begins with the actors it gets, and two runs that each have a part of the resources that
    both need never wait for each other.

    Args:
        run: The run, which every call carries.
        actors: Actors that were requested.
        start: Requests another actor.
        replacements: How many dead actors are replaced between the ends of two rounds.

    Raises:
        InputError: An actor could not build its worker context from its input.
        RunError: No actor started.
    """

    def __init__(
        self,
        run: Assignment,
        actors: Collection[Any],
        start: Callable[[], Any],
        replacements: int,
    ) -> None:
        self._run, self._start = run, start
        self._replacements = self._left = replacements
        self._pids: dict[Any, int] = {}  # of the actors that take jobs, as they started
        self._starting: dict[Any, Any] = {}  # reference of the first answer -> actor
        self._events: list[str] = []
        self._spec: WorkerSpec | None = None
        for actor in actors:
            self._request(actor)
        while not self._pids:
            (ready, *_), _ = ray.wait(list(self._starting), num_returns=1)
            self._admit(ready)

    @property
    def actors(self) -> list[Any]:
        """All actors that are not known to be dead."""
        return [*self._pids, *self._starting.values()]

    def processes(self) -> list[int]:
        """Return the process ids of the actors that have started."""
        return list(self._pids.values())

    def _request(self, actor: Any) -> None:
        # The first call builds the worker context: an actor that answers it is ready to work.
        self._starting[actor.describe.remote(self._run, {})] = actor

    def _admit(self, ready: Any) -> Any | None:
        """Add the actor that answered, and return it, or None if it died."""
        actor = self._starting.pop(ready)
        try:
            pid, spec = ray.get(ready)
        except RayActorError as error:
            self._replace(actor, error)
            return None
        except RayTaskError as error:
            raise run_error("a client actor could not start", error) from error
        if self._spec is None:
            self._spec = spec
        elif other := changed_sources(self._spec.sources, spec.sources):
            raise InputError(
                f"the nodes of the cluster have different {other}: they must be the same on all"
            )
        self._events += spec.remarks
        self._pids[actor] = pid
        return actor

    def _replace(self, actor: Any, error: RayActorError) -> None:
        """Start another actor for a dead one, unless the replacements are used up.

        Raises:
            RunError: No actor is left.
        """
        ray.kill(actor)  # it may only be unreachable: free its resources
        pid = self._pids.pop(actor, None)
        loss = "a client actor did not start" if pid is None else f"client actor {pid} died"
        self._events.append(f"{loss} ({cause_of(error)})")
        if self._left > 0:
            self._left -= 1
            self._events[-1] += "; another one replaces it"
            self._request(self._start())
        if not self._pids and not self._starting:
            raise RunError(
                f"every client actor died, and resources.max_restarts is used up: "
                f"{'; '.join(self._events[-3:])}"
            )

    def _run_calls(self, calls: Sequence[Call]) -> list[Any]:
        """Return the answers of all calls, each made on any idle actor.

        A call that waits for others is made, once they have ended, before all else that waits.
        """
        blocked = {number: {*call.after} for number, call in enumerate(calls) if call.after}
        waiting = deque(number for number in range(len(calls)) if number not in blocked)
        idle = deque(self._pids)
        running: dict[Any, tuple[int, Any]] = {}  # reference -> (number, actor)
        answers: dict[int, Any] = {}
        while len(answers) < len(calls):
            while waiting and idle:
                number, actor = waiting.popleft(), idle.popleft()
                running[calls[number].submit(actor)] = number, actor
            (done, *_), _ = ray.wait([*running, *self._starting], num_returns=1)
            if done in self._starting:
                if (started := self._admit(done)) is not None:
                    idle.append(started)
                continue
            number, actor = running.pop(done)
            try:
                answers[number] = ray.get(done)
            except RayActorError as error:
                waiting.appendleft(number)
                self._replace(actor, error)
                continue
            except RayTaskError as error:
                raise run_error(f"{calls[number].name} failed", error) from error
            idle.append(actor)
            calls[number].ended()
            for later in list(blocked):
                blocked[later].discard(number)
                if not blocked[later]:
                    del blocked[later]
                    waiting.appendleft(later)
        self._left = self._replacements
        return [answers[number] for number in range(len(calls))]

    def describe(self, survey: Arrays) -> WorkerSpec:
        """Return the spec of the first actor that answers; all build the same."""
        if survey:
            reference = ray.put(survey)
            call = Call(lambda actor: actor.describe.remote(self._run, reference), "an adapter")
            ((_, self._spec),) = self._run_calls([call])
        assert self._spec is not None  # the constructor waits for it
        return self._spec

    def run(
        self,
        broadcast: ArrayState,
        jobs: Sequence[Job],
        reducer: Reducer | None = None,
        trained: Callable[[Sequence[Any]], None] | None = None,
    ) -> Outcome:
        """Run all jobs on idle actors; see ``Executor.run``.

        Clients that are stacked train in one call. A group of uploads is summed by the next idle
        actor; the uploads are then released.

        Raises:
            RunError: A job failed, or no actor is left.
        """
        units = units_of_work(jobs, self._run.experiment["federation"]["stacked"])
        clients = [index for index, job in enumerate(jobs) if isinstance(job, TrainJob)]
        kept = clients[:MOST_CLIENTS]
        unit_of = {index: number for number, unit in enumerate(units) for index in unit}
        untrained = {unit_of[index] for index in clients}
        uploads: dict[int, Any] = {}
        sums: dict[int, Any] = {}
        sent = ray.put(broadcast)  # once for all jobs

        def evaluate(unit: list[int], actor: Any) -> Any:
            return actor.evaluate.remote(self._run, sent, jobs[unit[0]])

        def train(unit: list[int], actor: Any) -> Any:
            method = actor.train.options(num_returns=1 + len(unit))
            reports, *made = method.remote(self._run, sent, *(jobs[index] for index in unit))
            uploads.update(zip(unit, made, strict=True))
            return reports

        def end_training(number: int) -> None:
            untrained.discard(number)
            if not untrained and trained is not None:
                trained([uploads[index] for index in kept])

        def add(number: int, part: list[int], actor: Any) -> Any:
            made = [uploads[index] for index in part]
            answer, sums[number] = actor.reduce.remote(self._run, shared_reducer, made)
            return answer

        def release(part: list[int]) -> None:
            for index in {*part} - {*kept}:
                del uploads[index]

        calls = []
        for number, unit in enumerate(units):
            name = " and ".join(_name_of(jobs[index]) for index in unit)
            if isinstance(jobs[unit[0]], EvalJob):
                calls.append(Call(partial(evaluate, unit), name))
            else:
                ended = partial(end_training, number)
                calls.append(Call(partial(train, unit), name, ended=ended))
        if reducer is not None and len(clients) > FAN_IN:
            shared_reducer = ray.put(reducer)
            for number, group in enumerate(groups(clients)):
                part = [clients[i] for i in group]
                after, ended = {unit_of[index] for index in part}, partial(release, part)
                name = f"summing group {number}"
                calls.append(Call(partial(add, number, part), name, after, ended))
        results: dict[int, Any] = {}
        for unit, answer in zip(units, self._run_calls(calls), strict=False):  # sums follow
            found = answer if isinstance(jobs[unit[0]], TrainJob) else [answer]
            results |= zip(unit, found, strict=True)
        events, self._events = self._events, []
        return Outcome(
            uploads=[uploads[index] for index in clients if index in uploads],
            reports=[results[index] for index in clients],
            evaluations=[results[i] for i, job in enumerate(jobs) if isinstance(job, EvalJob)],
            events=events,
            sums=[sums[number] for number in sorted(sums)],
        )

    def reduce(self, outcome: Outcome, reducer: Reducer) -> Partial:
        """Add the sums of groups on the actors, so that this process receives only the total.

        Uploads that no actor has summed are summed here.
        """
        if not outcome.sums:
            return combine(sum_groups(self.fetch(outcome.uploads), reducer))
        left = outcome.sums
        while len(left) > 1:  # in order: the sum so far is the first of the next ones
            left = [self._combine(left[:FAN_IN]), *left[FAN_IN:]]
        total: Partial = ray.get(left[0])
        return total

    def _combine(self, sums: Sequence[Any]) -> Any:
        """Return the reference of the sum of sums, which an actor adds."""
        totals: list[Any] = []

        def add(actor: Any) -> Any:
            answer, total = actor.combine.remote(self._run, list(sums))
            totals.append(total)
            return answer

        self._run_calls([Call(add, "adding the sums of groups")])
        return totals[-1]

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Return uploads as read-only views of the object store."""
        fetched: list[Upload] = ray.get(uploads)
        return fetched


def _name_of(job: Job) -> str:
    if isinstance(job, TrainJob):
        return f"client {job.client} in round {job.round}"
    return f"evaluation of rows {job.start}:{job.stop} after round {job.round}"
