"""A pool of client actors that take jobs as they become idle: the executor of the Ray backend.

The actor that runs a job cannot change its result, so the pool hands the next job to any idle
actor, beginning with the first one that has started. Ray restarts a crashed actor up to
``max_restarts`` times. Its job goes to the next idle actor, so that a round need not wait until the
cluster has room for the restart. The pool opens no placement group and gives its actors no names:
inside a Ray Tune trial, the trial's bundles capture them.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)

from trishul_ray.errors import InputError, RunError, first_line, typed_line
from trishul_ray.federation.messages import (
    MOST_CLIENTS,
    Arrays,
    Blueprint,
    EvalJob,
    Job,
    Outcome,
    TrainJob,
    Upload,
    changed_sources,
    units_of_work,
)
from trishul_ray.federation.on_ray.process import Assignment, Process
from trishul_ray.federation.on_ray.ray_internals import draining_nodes, is_gone, is_restarting
from trishul_ray.federation.reduce import FAN_IN, Reducer, combine, groups, sum_groups
from trishul_ray.stages import ArrayState, Partial

#: After this many seconds without an answer, the pool looks for actors that wait for a restart.
SILENCE_SECONDS = 5.0


def cause_of(error: Exception) -> str:
    """Return the one line of an actor's failure that matters, without the remote traceback."""
    # Raised in an actor, a RayActorError is both.
    if isinstance(error, RayTaskError) or not isinstance(error, RayActorError):
        inner = error.cause if isinstance(error, RayTaskError) else None
        if inner is None:
            lines = [line for line in str(error).strip().splitlines() if line.strip()]
            return lines[-1].strip() if lines else type(error).__name__
        if type(inner).__module__.startswith("trishul_ray."):
            return first_line(inner)
        # A fault of a plug-in, or a bug: its type and place help.
        frames = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        own = [(file, number) for file, number in frames if "site-packages" not in file]
        place = f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""
        return typed_line(inner) + place
    text = str(error)
    if error.actor_init_failed:  # a traceback, whose last line names the error
        return text.strip().splitlines()[-1].strip()
    # Ray puts what it knows into one long line, then lists possible causes.
    for pattern in (r"Worker exit detail: (.*?)(?:\. There are|$)", r"because (.*?)(?:\. |$)"):
        match = re.search(pattern, text, re.MULTILINE)
        if match:
            return match.group(1).strip().rstrip(".")
    return text.strip().splitlines()[0]


def run_error(action: str, error: RayTaskError) -> Exception:
    """Return our own errors and those of Ray unchanged, and any other as a failure of the run.

    Ray's: an object was lost with its node, nothing failed in our code.
    """
    if isinstance(error.cause, InputError | RunError | RayError):
        return error.cause
    return RunError(f"{action}: {cause_of(error)}")


class ActorPool:
    """The client actors during one run, owned by the process that started them; they end with it.

    Every call to an actor carries ``run``. The constructor waits for the first actor; the others
    join as they start. A run on a busy cluster thus begins with the actors it gets, and two runs
    that each hold a part of the resources both need never wait for each other.

    Raises:
        InputError: An actor could not build its workbench from its input.
        RunError: No actor started.
    """

    def __init__(self, started: Sequence[Any], run: Assignment) -> None:
        self._run = run
        self.restarts = 0
        self.losses = 0  # actors that died, restarted or not
        self.actors: list[Any] = []  # those that take jobs, in the order in which they started
        self._events: list[str] = []
        self._processes: dict[Any, Process] = {}
        self._made_on: set[str] = set()  # nodes that hold results of this round
        self._left: dict[Any, Process] = {}  # those that were killed because their node drains
        # The first call builds the workbench, so an actor that answers it is ready to work.
        self._starting: dict[Any, Any] = {
            actor.describe.remote(run, {}): actor for actor in started
        }
        self._blueprint: Blueprint | None = None
        while not self.actors:
            if not self._starting:
                raise RunError(f"no client actor started: {'; '.join(self._events)}")
            (ready, *_), _ = ray.wait(list(self._starting), num_returns=1)
            self._add_started(ready)

    def _add_started(self, ready: Any) -> bool:
        """Add the actor that answered; return False if it has not started."""
        actor = self._starting.pop(ready)
        try:
            process, blueprint = ray.get(ready)
        except RayActorError as error:
            self._drop(actor, error)
            return False
        except RayTaskError as error:
            raise run_error("a client actor could not start", error) from error
        if process == self._left.get(actor):  # Ray kills it later: it may still answer
            self._starting[actor.describe.remote(self._run, {})] = actor
            return False
        if self._blueprint is None:
            self._blueprint = blueprint
        elif other := changed_sources(self._blueprint.sources, blueprint.sources):
            raise InputError(
                f"the nodes of the cluster have different {other}: they must be the same on all"
            )
        self._events += blueprint.remarks
        self._note_restart(actor, process)
        self.actors.append(actor)
        return True

    def describe(self, survey: Arrays) -> Blueprint:
        """Return the blueprint of the first actor that answers; all build the same."""
        if survey:
            reference = ray.put(survey)
            (self._blueprint,) = self._run_each(
                1,
                lambda actor, _: actor.describe.remote(self._run, reference),
                lambda _: "building adapters",
            )
        assert self._blueprint is not None  # the constructor waits for it
        return self._blueprint

    def run(
        self,
        broadcast: ArrayState,
        jobs: Sequence[Job],
        reducer: Reducer | None = None,
        trained: Callable[[Sequence[Any]], None] | None = None,
    ) -> Outcome:
        """Run all jobs; one ``ray.put`` of the broadcast serves them all.

        A group of uploads is summed by the next idle actor, and then given up; see
        ``Executor.run``.

        Raises:
            RunError: A job failed, or no actor is left.
        """
        self._leave_draining_nodes()
        self._made_on.clear()
        reference = ray.put(broadcast)
        uploads: dict[int, Any] = {}
        sums: dict[int, Any] = {}
        units = units_of_work(jobs, self._run.experiment["federation"]["stacked"])
        train = [index for index, job in enumerate(jobs) if isinstance(job, TrainJob)]
        parts: list[list[int]] = []
        if reducer is not None and len(train) > FAN_IN:
            parts = [[train[i] for i in group] for group in groups(train)]
        shared = ray.put(reducer) if parts else None
        unit_of = {index: number for number, unit in enumerate(units) for index in unit}
        kept = train[:MOST_CLIENTS]
        training = {unit_of[index] for index in train}

        def submit(actor: Any, number: int) -> Any:
            if number >= len(units):
                part = [uploads[index] for index in parts[number - len(units)]]
                answer, sums[number] = actor.reduce.remote(self._run, shared, part)
                return answer
            unit = units[number]
            own = [jobs[index] for index in unit]
            if isinstance(own[0], EvalJob):
                return actor.evaluate.remote(self._run, reference, own[0])
            train = actor.train.options(num_returns=1 + len(own))
            reports, *sent = train.remote(self._run, reference, *own)
            uploads.update(zip(unit, sent, strict=True))
            return reports

        def describe(number: int) -> str:
            if number >= len(units):
                return f"summing group {number - len(units)}"
            return " and ".join(_describe_job(jobs[index]) for index in units[number])

        def note_end(number: int) -> None:
            """Give up uploads that are summed; say when all clients have trained."""
            for index in parts[number - len(units)] if number >= len(units) else ():
                if index not in kept:
                    del uploads[index]
            if number in training:
                training.remove(number)
                if not training and trained is not None:
                    trained([uploads[index] for index in kept])

        after = [{unit_of[index] for index in part} for part in parts]
        answers = self._run_each(len(units), submit, describe, after, note_end)
        results: dict[int, Any] = {}
        for unit, found in zip(units, answers, strict=False):  # sums follow
            in_training = isinstance(jobs[unit[0]], TrainJob)
            results |= zip(unit, found if in_training else [found], strict=True)
        events, self._events = self._events, []
        return Outcome(
            uploads=[uploads[i] for i in train if i in uploads],
            reports=[results[i] for i in train],
            evaluations=[results[i] for i in range(len(jobs)) if isinstance(jobs[i], EvalJob)],
            events=events,
            sums=[sums[number] for number in sorted(sums)],
        )

    def _run_each(
        self,
        count: int,
        submit: Callable[[Any, int], Any],
        describe: Callable[[int], str],
        after: Sequence[set[int]] = (),
        done_with: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Return the results of ``submit(actor, index)`` for every index, on any idle actor.

        Indices from ``count`` on are those of work that is there, before all else that waits, once
        all of its element of ``after`` are done.
        """
        waiting, idle = deque(range(count)), deque(self.actors)
        blocked = {count + i: {*needed} for i, needed in enumerate(after)}
        running: dict[Any, tuple[int, Any]] = {}  # reference -> (index, actor)
        results: dict[int, Any] = {}
        while waiting or running:
            while waiting and idle:
                index, actor = waiting.popleft(), idle.popleft()
                running[submit(actor, index)] = (index, actor)
            watched = [*running, *self._starting]
            if not watched:
                raise RunError(f"every client actor is gone: {'; '.join(self._events[-3:])}")
            ready, _ = ray.wait(watched, num_returns=1, timeout=SILENCE_SECONDS)
            if not ready:
                waiting.extendleft(self._take_back(running))
                continue
            (done,) = ready
            if done in self._starting:
                if self._add_started(done):
                    idle.append(self.actors[-1])
                continue
            index, actor = running.pop(done)
            try:
                process, results[index] = ray.get(done)
            except RayActorError as error:
                if is_gone(actor):
                    self._drop(actor, error)
                else:
                    self._wait_for_restart(actor)
                waiting.appendleft(index)
                continue
            except RayTaskError as error:
                if not isinstance(error.cause, GetTimeoutError):
                    raise run_error(f"{describe(index)} failed", error) from error
                self._check_nodes()
                self._events.append(f"{describe(index)} waited too long for uploads: again")
                waiting.append(index)
                idle.append(actor)
                continue
            self._note_restart(actor, process)
            self._made_on.add(process.node)
            idle.append(actor)
            done_with(index)
            for later in list(blocked):
                blocked[later].discard(index)
                if not blocked[later]:
                    del blocked[later]
                    waiting.appendleft(later)
        return [results[index] for index in range(count + len(after))]

    def _check_nodes(self) -> None:
        """Raise a RayError if results of this round are lost with a node."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if lost := self._made_on - alive:
            raise NodeDiedError(f"{len(lost)} of the nodes that hold uploads are lost")

    def _take_back(self, running: dict[Any, tuple[int, Any]]) -> list[int]:
        """Take the work of actors that died unseen, which would wait for their restarts.

        Such as one whose node is lost between two rounds; there may be no room for it elsewhere.
        """
        lost = [call for call, (_, actor) in running.items() if is_restarting(actor)]
        for call in lost:
            ray.cancel(call)
            self._wait_for_restart(running[call][1])
        return [running.pop(call)[0] for call in lost]

    def _note_restart(self, actor: Any, process: Process) -> None:
        before = self._processes.setdefault(actor, process)
        if before != process:
            self.restarts += 1
            self.losses += 1
            self._events.append(
                f"client actor {before.pid} was restarted as {process.pid} "
                f"(restart {self.restarts})"
            )
            self._processes[actor] = process

    def _wait_for_restart(self, actor: Any) -> None:
        self.losses += 1
        pid = self._processes[actor].pid
        self._events.append(f"client actor {pid} died; its work goes to an idle one")
        self._wait_for_start(actor)

    def _wait_for_start(self, actor: Any) -> None:
        """Give no jobs to an actor until it answers."""
        self.actors.remove(actor)
        self._starting[actor.describe.remote(self._run, {})] = actor

    def _leave_draining_nodes(self) -> None:
        """Restart the actors that are on draining nodes; they join again as they start elsewhere.

        Nothing is done inside a trial, whose actors are bound to its bundles: it moves as a whole.
        """
        if ray.util.get_current_placement_group() is not None:
            return
        draining = draining_nodes()
        for actor in [a for a in self.actors if self._processes[a].node in draining]:
            self.losses += 1
            process = self._left[actor] = self._processes.pop(actor)
            ray.kill(actor, no_restart=False)
            self._wait_for_start(actor)
            self._events.append(f"client actor {process.pid} moves: its node is being drained")

    def _drop(self, actor: Any, error: RayActorError) -> None:
        self.losses += 1
        ray.kill(actor)  # it may only be unreachable: free its resources in any case
        if actor in self.actors:
            self.actors.remove(actor)
        process = self._processes.pop(actor, None)
        loss = "a client actor did not start"
        if process is not None:
            loss = f"client actor {process.pid} is gone for good"
        self._events.append(f"{loss} ({cause_of(error)})")

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

        def add(actor: Any, _: int) -> Any:
            answer, total = actor.combine.remote(self._run, list(sums))
            totals.append(total)
            return answer

        self._run_each(1, add, lambda _: "adding the sums of groups")
        return totals[-1]

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Return uploads as read-only views of the object store."""
        fetched: list[Upload] = ray.get(uploads)
        return fetched

    def processes(self) -> list[int]:
        """Return the last known process ids of the started actors."""
        return [self._processes[actor].pid for actor in self.actors]


def _describe_job(job: Job) -> str:
    if isinstance(job, TrainJob):
        return f"client {job.client} in round {job.round}"
    return f"evaluation of rows {job.start}:{job.stop} after round {job.round}"
