"""Drive a federation from outside: in this process, or through a coordinator actor.

Both drivers have the same methods: ``begin``, then ``step`` until finished, then ``final``.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trishul_ray.errors import RunError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.compatibility import check_fits
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.on_ray.coordinator import Coordinator
from trishul_ray.federation.on_ray.metrics import RunMetrics
from trishul_ray.federation.on_ray.pool import cause_of, run_error
from trishul_ray.federation.on_ray.process import RunRequest, WorkerEnvironment
from trishul_ray.federation.on_ray.session import joins_cluster
from trishul_ray.federation.on_ray.slices import Slices, plan_slices, slices_of_bundles
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.server import RoundReport, RunResult
from trishul_ray.federation.worker.context import BackboneCache
from trishul_ray.models.python_model import passed_model
from trishul_ray.runtime.device import oversubscription_warning, usable_cores
from trishul_ray.storage.store import Store

#: Seconds to wait for a response before reporting that clients are waiting for resources.
WAITING_NOTICE_SECONDS = 10.0


def slices_for_run(experiment: Experiment, held: Slices | None = None) -> Slices:
    """Return the slices of a run: the bundles of its trial, or a part of the cluster.

    ``held`` are slices of this process that the run may use.

    Raises:
        InputError: The requested resources are not available.
    """
    group = ray.util.get_current_placement_group()
    if group is not None:
        return slices_of_bundles(experiment, group.bundle_specs)
    free, total = ray.available_resources(), ray.cluster_resources()
    for kind, amount in (held.total() if held else {}).items():
        free[kind] = free.get(kind, 0.0) + amount
    return plan_slices(experiment, free, total, may_grow=joins_cluster())


def _in_trial() -> bool:
    return ray.util.get_current_placement_group() is not None


class Workers:
    """A coordinator and its client actors, which consecutive runs can reuse.

    A run reuses the actors, with their loaded backbones, if it needs the same slices and the same
    process-wide settings; otherwise new actors replace them. Reuse does not affect the bytes of a
    run. Runs with ``resources.backend=inline`` also keep their backbones here.

    Use it as a context manager while Ray runs (in a trial, or inside ``ray_session``), for one run
    at a time.
    """

    def __init__(self) -> None:
        self.backbones = BackboneCache()  # backbones of runs in this process
        self.slices: Slices | None = None  # slices of the actors
        self._coordinator: Any = None
        self._settings: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def coordinator(self, experiment: Experiment, slices: Slices) -> Any:
        """Return a coordinator actor for a run; reuse the current one if it fits."""
        local = Store.open(experiment.storage.runs).is_local
        environment, resources = WorkerEnvironment.of_this_process(), experiment.resources
        settings = (slices, environment, local, resources, experiment.model.precision == "tf32")
        if self._coordinator is None or settings != self._settings:
            self.close()
            node = None  # The actors of a trial run in its bundles.
            if local and not _in_trial():  # Place the coordinator next to the folder of the runs.
                id = ray.get_runtime_context().get_node_id()
                node = NodeAffinitySchedulingStrategy(id, soft=False)
            self._coordinator = Coordinator.options(  # type: ignore[attr-defined]  # by ray.remote
                num_cpus=0, scheduling_strategy=node
            ).remote(resources.max_restarts, slices, environment)
            self.slices, self._settings = slices, settings
        return self._coordinator

    def request(self, experiment: Experiment) -> None:
        """Start the actors of a run while its caller prepares it.

        Raises:
            InputError: The requested resources are not available.
        """
        self.coordinator(experiment, slices_for_run(experiment))

    def check_fits(self, experiment: Experiment) -> None:
        """Check in the coordinator that the adapters fit; see ``experiment/compatibility.py``.

        A coordinator has already imported them; in this process it would take seconds.
        """
        # Only this process has a model passed from Python.
        passed = passed_model(experiment.model) is not None
        if self._coordinator is None or passed:
            check_fits(experiment)
            return
        response = self._coordinator.check_fits.remote(experiment.to_dict(sources=True))
        try:
            _result_of(response.future())
        except RayError as error:
            raise RunError(f"the coordinator died ({cause_of(error)})") from error

    def close(self) -> None:
        """Terminate the coordinator and its client actors, and discard the backbones."""
        if self._coordinator is not None:
            with suppress(RayError):  # The cluster may already be gone.
                ray.kill(self._coordinator)
        self._coordinator, self.slices = None, None
        self.backbones = BackboneCache()


class RayDriver:
    """Drive a run on a coordinator actor and its client actors, which stay with ``workers``.

    If the coordinator dies, or objects are lost with a node, another coordinator resumes from the
    newest checkpoint, up to ``resources.max_restarts`` times between two rounds. ``notify`` is
    called once with a line of text if the clients have to wait for resources.
    """

    def __init__(
        self,
        experiment: Experiment,
        prepared: Prepared,
        attempt: str,
        workers: Workers,
        slices: Slices,
        notify: Callable[[str], None],
    ) -> None:
        self.slices = slices
        held = _in_trial() or workers.slices is not None  # The bundles of a trial are reserved.
        fits = held or slices.count_in(ray.available_resources())
        self._notify_waiting = None if fits else notify
        self._experiment, self._workers = experiment, workers
        self.actor = workers.coordinator(experiment, slices)
        self._losses = 0  # number of losses since the last round
        self._events: list[str] = []  # events since the last report
        self._last_round = -1  # last round whose record was returned
        self._run = RunRequest(experiment.to_dict(sources=True), attempt, [ray.put(prepared)])

    def begin(self) -> RoundReport:
        """Start the run or resume its checkpoint, once one client actor has started.

        Raises:
            InputError: The run cannot be built from this input.
            RunError: No actor started, or ``resources.max_restarts`` are used up.
        """
        while True:
            try:
                return self._report(self.actor.begin.remote(self._run))
            except RayError as error:
                self._replace_coordinator(error)

    def step(self) -> RoundReport:
        """Run one round, or begin again with another coordinator if the coordinator dies.

        Raises:
            RunError: The round failed, or ``resources.max_restarts`` are used up.
        """
        try:
            report = self._report(self.actor.step.remote())
        except RayError as error:
            self._replace_coordinator(error)
            # The round may have been saved, and its record lost with the report.
            return self.begin()
        self._losses = 0
        return report

    def final(self) -> RunResult:
        """Return the result of a finished run."""
        while True:
            try:
                result: RunResult = self._wait(self.actor.final.remote())
                return result
            except RayError as error:
                self._replace_coordinator(error)
                self.begin()

    def processes(self) -> list[int]:
        """Return the process ids of the coordinator and its client actors."""
        pids: list[int] = ray.get(self.actor.processes.remote())
        return pids

    def _replace_coordinator(self, error: RayError) -> None:
        """Start another coordinator, or raise a RunError after too many losses."""
        limit = self._experiment.resources.max_restarts
        loss = f"the coordinator died or lost objects ({cause_of(error)})"
        if self._losses >= limit:
            used_up = f"resources.max_restarts={limit} are used up"
            raise RunError(f"{loss}; {used_up}") from error
        self._losses += 1
        RunMetrics(self._experiment).update("trishul_restarts")
        self._events.append(f"{loss}; another one continues from the checkpoint")
        self._workers.close()
        self.actor = self._workers.coordinator(self._experiment, self.slices)

    def _report(self, reference: Any) -> RoundReport:
        """Wait for a report; drop the records that an earlier coordinator returned."""
        report: RoundReport = self._wait(reference)
        new = [record for record in report.records if record.round > self._last_round]
        self._last_round = max([self._last_round, *(record.round for record in new)])
        events, self._events = self._events, []
        return replace(report, records=new, events=[*events, *report.events])

    def _wait(self, reference: Any) -> Any:
        """Wait for the coordinator's result; the first time, report that it waits for resources."""
        future = reference.future()
        if self._notify_waiting and not futures.wait([future], WAITING_NOTICE_SECONDS).done:
            self._notify_waiting(f"waiting for resources on the cluster for {self.slices}")
        self._notify_waiting = None
        return _result_of(future)


def _result_of(future: futures.Future[Any]) -> Any:
    """Return a coordinator's result, and raise its errors unchanged.

    A signal interrupts a future immediately; ``ray.get`` checks for signals once per second.
    """
    try:
        return future.result()
    except RayTaskError as error:
        raise run_error("the coordinator failed", error) from error


Driver = InlineDriver | RayDriver


@contextmanager
def open_driver(
    experiment: Experiment,
    prepared: Prepared,
    attempt: str,
    notify: Callable[[str], None] | None = None,
    workers: Workers | None = None,
) -> Iterator[Driver]:
    """Open the driver of ``resources.backend``, which calls ``notify`` about the run's resources.

    With ``workers``, the actors (inline: the backbone) come from there, and stay there unless the
    run fails.

    Raises:
        InputError: The requested resources are not available.
    """
    notify = notify or (lambda line: None)
    driver: Driver
    with ExitStack() as stack:
        workers = workers or stack.enter_context(Workers())
        try:
            if experiment.resources.backend == "inline":
                driver = InlineDriver(experiment, prepared, attempt, workers.backbones)
                stack.callback(driver.close)
                actors, cores = 1, float(usable_cores())
            else:
                slices = slices_for_run(experiment, workers.slices)
                driver = RayDriver(experiment, prepared, attempt, workers, slices, notify)
                # Count nodes that an autoscaler will add for this run.
                cpus = ray.cluster_resources().get("CPU", 0.0)
                actors, cores = slices.actors, max(cpus, slices.total()["CPU"])
            threads = experiment.resources.threads
            if warning := oversubscription_warning(actors, threads, cores):
                notify(warning)
            yield driver
        except GeneratorExit:
            raise  # The run was stopped between two rounds, so no call is pending.
        except BaseException:
            workers.close()
            raise
