"""Driving one federation from outside: inline, or through a coordinator actor.

Both drivers speak alike: ``begin``, then ``step`` until finished, then ``final``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.on_ray.actors import Coordinator, Surroundings
from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.federation.on_ray.session import beside_driver, room_for, slices_here
from trishul_ray.federation.on_ray.slices import Slices, crowding, usable_cores
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.server import RoundReport, RunResult
from trishul_ray.storage import Store

#: Seconds after which a person is told that the clients wait for resources.
PATIENCE = 10.0


class Driver(Protocol):
    """A federation under way."""

    def begin(self) -> RoundReport:
        """What a checkpoint already holds."""
        ...

    def step(self) -> RoundReport:
        """One more round."""
        ...

    def final(self) -> RunResult:
        """The result of a finished federation."""
        ...


class RayDriver:
    """A coordinator actor and its clients. A coordinator that dies is restarted by Ray."""

    def __init__(
        self,
        experiment: Experiment,
        prepared: Prepared,
        attempt: str,
        slices: Slices,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Start the coordinator, which asks for its clients with the first call.

        Args:
            experiment: what to run.
            prepared: its data and partition.
            attempt: names the run in the tracking server.
            slices: how many client actors, with what each; see
                :func:`~trishul_ray.federation.on_ray.session.slices_here`.
            tell: told, once, if the clients have to wait for resources.
        """
        self.slices = slices
        self._tell_waiting = tell if tell and not room_for(slices) else None
        self.limit = experiment.resources.max_restarts
        self.losses = 0
        self._told = -1  # the last round whose record was given out
        local = Store.open(experiment.storage.runs).is_local
        self.actor: Any = Coordinator.options(  # type: ignore[attr-defined]  # by ray.remote
            num_cpus=0,
            max_restarts=self.limit,
            scheduling_strategy=beside_driver() if local else None,
        ).remote(experiment.to_dict(), slices, attempt, Surroundings.here())
        # Inside a list, so that the coordinator is given the reference and not the content.
        self._prepared = [ray.put(prepared)]

    def begin(self) -> RoundReport:
        """See :class:`Driver`; returns as soon as one client actor is up."""
        return self._progress("begin")

    def step(self) -> RoundReport:
        """See :class:`Driver`; if the coordinator dies in it, what its successor starts from."""
        return self._progress("step")

    def final(self) -> RunResult:
        """See :class:`Driver`."""
        found: RunResult = self._call("final")
        return found

    def processes(self) -> list[int]:
        """Operating-system processes: the coordinator's, then the client actors'."""
        found: list[int] = ray.get(self.actor.processes.remote())
        return found

    def close(self) -> None:
        """End the coordinator; its client actors die with their owner."""
        with suppress(RayError):  # the cluster may have been ended before us
            ray.kill(self.actor)

    def _progress(self, method: str) -> RoundReport:
        events: list[str] = []
        while True:
            try:
                found: RoundReport = self._call(method)
            except RayError as error:
                events.append(self._survive(error, method))
                # A round may have been aggregated and its record lost with the answer. Ray holds
                # this call back until the coordinator is up again.
                method = "begin"
                continue
            new = [record for record in found.records if record["round"] > self._told]
            self._told = max([self._told, *(record["round"] for record in new)])
            return replace(found, records=new, events=events + found.events)

    def _call(self, method: str) -> Any:
        answer = getattr(self.actor, method).remote(self._prepared)
        if self._tell_waiting and not ray.wait([answer], timeout=PATIENCE)[0]:
            self._tell_waiting(f"waiting for room on the cluster for {self.slices}")
        self._tell_waiting = None
        try:
            return ray.get(answer)
        except RayTaskError as error:
            if isinstance(error.cause, InputError | RunError):
                raise error.cause from error
            if isinstance(error.cause, RayError):
                raise error.cause from error  # something of Ray's was lost, not ours
            raise RunError(f"the coordinator failed: {cause_of(error)}") from error

    def _survive(self, error: RayError, method: str) -> str:
        """Say what was lost in a call, if a new beginning from the checkpoint makes it good.

        Raises:
            RunError: ``resources.max_restarts`` are used up.
        """
        what = f"the coordinator died or lost what it needs ({cause_of(error)})"
        # Ray itself counts restarts and tells when there will be no more.
        over = isinstance(error, ActorDiedError) or self.losses >= self.limit
        if method == "begin" or over:
            raise RunError(f"{what}; resources.max_restarts={self.limit} are used up") from error
        self.losses += 1
        return f"{what}; loss {self.losses} of at most {self.limit}, going on from the checkpoint"


@contextmanager
def open_driver(
    experiment: Experiment,
    prepared: Prepared,
    attempt: str,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Driver]:
    """The driver that ``resources.backend`` asks for, ended at the end.

    Raises:
        InputError: the resources asked for are not to be had.
    """
    tell = tell or (lambda line: None)
    threads = experiment.resources.threads
    if experiment.resources.backend == "inline":
        if line := crowding(1, threads, usable_cores()):
            tell(line)
        yield InlineDriver(experiment, prepared, attempt)
        return
    slices = slices_here(experiment)
    if line := crowding(slices.actors, threads, ray.cluster_resources().get("CPU", 0.0)):
        tell(line)
    driver = RayDriver(experiment, prepared, attempt, slices, tell)
    try:
        yield driver
    finally:
        driver.close()
