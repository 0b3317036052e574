"""The actor that runs the rounds of clients.

It may outlive a run and work for the next one (see ``Workers``), so every call carries the
:class:`~trishul_ray.federation.on_ray.process.Assignment` of the run that it is for. Torch,
transformers and pydantic are imported inside the methods: a coordinator can request its clients
before it imports anything heavy, so that all of them start at the same time.
"""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import ray

from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.on_ray.process import Assignment, Process, WorkerEnvironment
from trishul_ray.federation.on_ray.slices import Slices, cap_device_memory

if TYPE_CHECKING:
    from trishul_ray.federation.messages import (
        Arrays,
        ArrayState,
        Blueprint,
        EvalJob,
        EvalReport,
        TrainJob,
        TrainReport,
        Upload,
    )
    from trishul_ray.federation.reduce import Partial, Reducer
    from trishul_ray.federation.workbench import Residents, Workbench


@ray.remote
class ClientActor:
    """Runs the rounds of any client. Every call is idempotent.

    Ray may restart the actor after a crash; the next call then rebuilds everything. Ray does not
    repeat jobs: the pool gives them to another actor, which need not be started first. Every method
    also returns its process, by which the pool notices restarts. The first call of another run
    replaces the workbench, but keeps the backbone if it is the same.
    """

    def __init__(self, gpu_share: float, environment: WorkerEnvironment) -> None:
        environment.apply()
        cap_device_memory(gpu_share)
        self.process = Process(os.getpid(), ray.get_runtime_context().get_node_id())
        self._token = ""  # of the run that this actor works for
        self._settings = ExitStack()
        self._bench: Workbench | None = None
        self._residents: Residents | None = None

    def _enter(self, run: Assignment) -> None:
        """Leave the previous run, if any, and apply the process-wide settings of this one."""
        if self._token == run.token:
            return
        from trishul_ray.experiment import Experiment

        if self._bench is not None:
            self._bench.close()
            self._bench = None
        self._settings.close()
        self.experiment = Experiment.model_validate(run.load())
        self._settings.enter_context(deterministic(self.experiment))
        self._token = run.token

    def _workbench(self, run: Assignment, survey: "Arrays | None" = None) -> "Workbench":
        """Return the workbench of a run, built once, with the adapters that a survey decides.

        Not built in the constructor: Ray turns an exception raised there into text, and an
        InputError must reach the user as it is.
        """
        from trishul_ray.federation.workbench import Residents, adapt_to, build_workbench

        self._enter(run)
        if self._bench is None:
            self._residents = self._residents or Residents()
            prepared = ray.get(run.prepared[0])
            self._bench = build_workbench(self.experiment, prepared, self._residents)
        if survey is not None:
            adapt_to(self._bench, survey)
        return self._bench

    def describe(self, run: Assignment, survey: "Arrays") -> "tuple[Process, Blueprint]":
        """Return the blueprint of the workbench."""
        from trishul_ray.federation.workbench import blueprint_of

        return self.process, blueprint_of(self._workbench(run, survey))

    @ray.method(num_returns=2, max_task_retries=0)
    def train(
        self, run: Assignment, broadcast: "ArrayState", job: "TrainJob"
    ) -> "tuple[tuple[Process, TrainReport], Upload]":
        """Train one client. The upload is a separate return value, so that it can stay here."""
        from trishul_ray.federation.local import train_client

        bench = self._workbench(run, broadcast.survey)
        upload, report = train_client(bench, broadcast, job)
        return (self.process, report), upload

    @ray.method(max_task_retries=0)
    def evaluate(
        self, run: Assignment, broadcast: "ArrayState", job: "EvalJob"
    ) -> "tuple[Process, EvalReport]":
        """Evaluate the broadcast on one chunk of test rows."""
        from trishul_ray.federation.local import evaluate_chunk

        bench = self._workbench(run, broadcast.survey)
        return self.process, evaluate_chunk(bench, broadcast, job)

    @ray.method(num_returns=2, max_task_retries=0)
    def reduce(
        self, run: Assignment, reducer: "Reducer", *uploads: "Upload"
    ) -> "tuple[tuple[Process, None], Partial]":
        """Validate and sum one group of uploads, so that they bypass the coordinator."""
        from trishul_ray.federation.reduce import partial_sum

        self._enter(run)
        return (self.process, None), partial_sum(uploads, reducer)

    @ray.method(num_returns=2, max_task_retries=0)
    def combine(self, run: Assignment, *sums: "Partial") -> "tuple[tuple[Process, None], Partial]":
        """Add the sums of groups, in the order given."""
        from trishul_ray.federation.reduce import combine

        self._enter(run)
        return (self.process, None), combine(sums)


def start_clients(limit: int, slices: Slices, environment: WorkerEnvironment) -> list[Any]:
    """Request client actors without waiting for them; this process owns them.

    ``limit`` is how often Ray restarts one of them.
    """
    remote = ClientActor.options(  # type: ignore[attr-defined]  # added by ray.remote
        num_cpus=slices.cpus, num_gpus=slices.gpus, max_restarts=limit, max_task_retries=limit
    )
    return [remote.remote(slices.gpus, environment) for _ in range(slices.actors)]
