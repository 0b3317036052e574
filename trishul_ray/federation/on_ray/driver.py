"""Driving a federation from outside: in this process, or through a coordinator actor.

Both drivers have the same methods: ``begin``, then ``step`` until finished, then ``final``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.on_ray.actors import Coordinator, WorkerEnvironment
from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.federation.on_ray.session import driver_node_affinity, fits_now, slices_for_run
from trishul_ray.federation.on_ray.slices import Slices, oversubscription_warning, usable_cores
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.server import RoundReport, RunResult
from trishul_ray.storage import Store

#: Seconds to wait for an answer before reporting that clients are waiting for resources.
WAITING_NOTICE_SECONDS = 10.0


class RayDriver:
    """A coordinator actor and its client actors. Ray restarts a coordinator that dies.

    ``attempt`` names the run in the tracking server; ``notify`` is called once with a line of text
    if the clients have to wait for resources.
    """

    def __init__(
        self,
        experiment: Experiment,
        prepared: Prepared,
        attempt: str,
        slices: Slices,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.slices = slices
        self._notify_waiting = notify if notify and not fits_now(slices) else None
        self.limit = experiment.resources.max_restarts
        self.losses = 0
        self._last_round = -1  # the last round whose record was returned
        local = Store.open(experiment.storage.runs).is_local
        self.actor: Any = Coordinator.options(  # type: ignore[attr-defined]  # by ray.remote
            num_cpus=0,
            max_restarts=self.limit,
            scheduling_strategy=driver_node_affinity() if local else None,
        ).remote(experiment.to_dict(), slices, attempt, WorkerEnvironment.of_this_process())
        # In a list, so that the coordinator receives the reference and not the content.
        self._prepared = [ray.put(prepared)]

    def begin(self) -> RoundReport:
        """Start the run, or continue its checkpoint, once one client actor has started.

        Raises:
            InputError: The run cannot be built from this input.
            RunError: No actor started, or ``resources.max_restarts`` are used up.
        """
        try:
            return self._without_repeats(self._wait(self.actor.begin.remote(self._prepared)))
        except RayError as error:
            raise self._failure(error) from error

    def step(self) -> RoundReport:
        """Run one round. If the coordinator dies in it, return where its successor starts.

        Raises:
            RunError: The round failed, or ``resources.max_restarts`` are used up.
        """
        try:
            return self._without_repeats(self._wait(self.actor.step.remote(self._prepared)))
        except RayError as error:
            # Ray counts restarts, too: after an ActorDiedError there will be none.
            if isinstance(error, ActorDiedError) or self.losses >= self.limit:
                raise self._failure(error) from error
            self.losses += 1
            event = (
                f"{_describe_loss(error)}; loss {self.losses} of at most {self.limit}, going on "
                "from the checkpoint"
            )
        # The round may have been aggregated and its record lost with the answer, so ask for all
        # records. Ray holds this call back until the coordinator has restarted.
        recovered = self.begin()
        return replace(recovered, events=[event, *recovered.events])

    def final(self) -> RunResult:
        """Return the result of a finished run."""
        try:
            result: RunResult = self._wait(self.actor.final.remote(self._prepared))
        except RayError as error:
            raise self._failure(error) from error
        return result

    def processes(self) -> list[int]:
        """Return the process ids of the coordinator and its client actors."""
        pids: list[int] = ray.get(self.actor.processes.remote())
        return pids

    def close(self) -> None:
        """End the coordinator; its client actors end with it."""
        with suppress(RayError):  # the cluster may already be gone
            ray.kill(self.actor)

    def _wait(self, answer: Any) -> Any:
        """Return the coordinator's answer, and raise its errors as they were raised there."""
        if self._notify_waiting and not ray.wait([answer], timeout=WAITING_NOTICE_SECONDS)[0]:
            self._notify_waiting(f"waiting for resources on the cluster for {self.slices}")
        self._notify_waiting = None
        try:
            return ray.get(answer)
        except RayTaskError as error:
            # A RayError as cause: an object or actor was lost, nothing failed in our code.
            if isinstance(error.cause, InputError | RunError | RayError):
                raise error.cause from error
            raise RunError(f"the coordinator failed: {cause_of(error)}") from error

    def _without_repeats(self, report: RoundReport) -> RoundReport:
        """Drop records that were returned before: a successor of the coordinator repeats them."""
        new = [record for record in report.records if record["round"] > self._last_round]
        self._last_round = max([self._last_round, *(record["round"] for record in new)])
        return replace(report, records=new)

    def _failure(self, error: RayError) -> RunError:
        used_up = f"resources.max_restarts={self.limit} are used up"
        return RunError(f"{_describe_loss(error)}; {used_up}")


def _describe_loss(error: RayError) -> str:
    return f"the coordinator died or lost what it needs ({cause_of(error)})"


Driver = InlineDriver | RayDriver


@contextmanager
def open_driver(
    experiment: Experiment,
    prepared: Prepared,
    attempt: str,
    notify: Callable[[str], None] | None = None,
) -> Iterator[Driver]:
    """Open the driver of ``resources.backend``, which calls ``notify`` about the run's resources.

    Raises:
        InputError: The requested resources are not available.
    """
    notify = notify or (lambda line: None)
    threads = experiment.resources.threads
    if experiment.resources.backend == "inline":
        if warning := oversubscription_warning(1, threads, usable_cores()):
            notify(warning)
        yield InlineDriver(experiment, prepared, attempt)
        return
    slices = slices_for_run(experiment)
    cores = ray.cluster_resources().get("CPU", 0.0)
    if warning := oversubscription_warning(slices.actors, threads, cores):
        notify(warning)
    driver = RayDriver(experiment, prepared, attempt, slices, notify)
    try:
        yield driver
    finally:
        driver.close()
