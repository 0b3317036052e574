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
    Arrays,
    Blueprint,
    Job,
    Outcome,
    Upload,
    changed_sources,
)
from trishul_ray.federation.on_ray.process import Assignment, Process
from trishul_ray.federation.on_ray.ray_internals import draining_nodes, is_gone, is_restarting
from trishul_ray.federation.on_ray.work import RoundWork, Work
from trishul_ray.federation.reduce import FAN_IN, Reducer, combine, sum_groups
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
                Work(
                    lambda actor, _: actor.describe.remote(self._run, reference),
                    lambda _: "building adapters",
                )
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
        """Run all jobs on idle actors; see ``Executor.run``.

        Raises:
            RunError: A job failed, or no actor is left.
        """
        self._leave_draining_nodes()
        self._made_on.clear()
        work = RoundWork(self._run, broadcast, jobs, reducer, trained)
        answers = self._run_each(work)
        events, self._events = self._events, []
        return work.outcome(answers, events)

    def _run_each(self, work: Work) -> list[Any]:
        """Return the results of all calls, each made on any idle actor.

        A call that waits for others is made, once they have ended, before all else that waits.
        """
        waiting, idle = deque(range(work.count)), deque(self.actors)
        blocked = {work.count + i: {*needed} for i, needed in enumerate(work.after)}
        running: dict[Any, tuple[int, Any]] = {}  # reference -> (number, actor)
        results: dict[int, Any] = {}
        while waiting or running:
            while waiting and idle:
                number, actor = waiting.popleft(), idle.popleft()
                running[work.submit(actor, number)] = (number, actor)
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
            number, actor = running.pop(done)
            try:
                process, results[number] = ray.get(done)
            except RayActorError as error:
                self._note_death(actor, error)
                waiting.appendleft(number)
                continue
            except RayTaskError as error:
                self._check_if_late(error, work.describe(number))
                waiting.append(number)
                idle.append(actor)
                continue
            self._note_restart(actor, process)
            self._made_on.add(process.node)
            idle.append(actor)
            work.end(number)
            for later in list(blocked):
                blocked[later].discard(number)
                if not blocked[later]:
                    del blocked[later]
                    waiting.appendleft(later)
        return [results[number] for number in range(work.count + len(work.after))]

    def _note_death(self, actor: Any, error: RayActorError) -> None:
        if is_gone(actor):
            self._drop(actor, error)
        else:
            self._wait_for_restart(actor)

    def _check_if_late(self, error: RayTaskError, action: str) -> None:
        """Raise an error unless all that failed is that uploads came too late."""
        if not isinstance(error.cause, GetTimeoutError):
            raise run_error(f"{action} failed", error) from error
        self._check_nodes()
        self._events.append(f"{action} waited too long for uploads: again")

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

        self._run_each(Work(add, lambda _: "adding the sums of groups"))
        return totals[-1]

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Return uploads as read-only views of the object store."""
        fetched: list[Upload] = ray.get(uploads)
        return fetched

    def processes(self) -> list[int]:
        """Return the last known process ids of the started actors."""
        return [self._processes[actor].pid for actor in self.actors]
