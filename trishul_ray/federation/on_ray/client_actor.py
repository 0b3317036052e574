"""The actor that runs the rounds of clients.

It may outlive a run and work for the next one (see ``Workers``), so every call carries the
:class:`~trishul_ray.federation.on_ray.process.Assignment` of the run that it is for. Torch,
transformers and pydantic are imported inside the methods: a coordinator can request its clients
before it imports anything heavy, so that all of them start at the same time.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from trishul_ray.errors import InputError
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.on_ray.process import Assignment, Process, WorkerEnvironment
from trishul_ray.federation.on_ray.slices import Slices
from trishul_ray.runtime.gpu import cap_device_memory, why_unusable
from trishul_ray.storage.integrity import take_remarks

if TYPE_CHECKING:
    from trishul_ray.federation.inline import InlineExecutor
    from trishul_ray.federation.messages import (
        Arrays,
        Blueprint,
        EvalJob,
        EvalReport,
        TrainJob,
        TrainReport,
        Upload,
    )
    from trishul_ray.federation.reduce import Reducer
    from trishul_ray.federation.workbench import Residents
    from trishul_ray.stages import ArrayState, Partial

#: After this many seconds an actor gives up to fetch what it is to add; the pool asks again.
FETCH_SECONDS = 60.0


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
        self._gpu_share = gpu_share
        self.process = Process(os.getpid(), ray.get_runtime_context().get_node_id())
        self._token = ""  # of the run that this actor works for
        self._settings = ExitStack()
        self._executor: InlineExecutor | None = None
        self._residents: Residents | None = None

    def _enter(self, run: Assignment) -> None:
        """Leave the previous run, if any, and apply the process-wide settings of this one."""
        if self._token == run.token:
            return
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        self._settings.close()
        self.experiment = run.load()
        self._settings.enter_context(deterministic(self.experiment))
        self._token = run.token

    def _work_for(self, run: Assignment) -> "InlineExecutor":
        """Return what runs the jobs of a run in this process, built once.

        Not built in the constructor: Ray turns an exception raised there into text, and an
        InputError must reach the user as it is.
        """
        from trishul_ray.federation.inline import InlineExecutor

        self._enter(run)
        on_gpu = self._gpu_share and self.experiment.resources.device != "cpu"
        if on_gpu and (reason := why_unusable()):
            # It would train on the CPU, with as many CPUs as feed a GPU.
            node = socket.gethostname()
            raise InputError(f"node {node} has a GPU for this actor, but {reason}")
        if self._executor is None:
            prepared = ray.get(run.prepared[0])
            self._executor = InlineExecutor(self.experiment, prepared, self._residents)
            self._residents = self._executor.residents
        return self._executor

    def describe(self, run: Assignment, survey: "Arrays") -> "tuple[Process, Blueprint]":
        """Return the blueprint of the workbench."""
        blueprint = self._work_for(run).describe(survey)
        return self.process, replace(blueprint, remarks=take_remarks())

    @ray.method(num_returns=2, max_task_retries=0)
    def train(
        self, run: Assignment, broadcast: "ArrayState", *jobs: "TrainJob"
    ) -> "tuple[tuple[Process, list[TrainReport]] | Upload, ...]":
        """Train one client, or several together; ``num_returns`` is one more than they are.

        The uploads are separate return values, so that they can stay here.
        """
        trained = self._work_for(run).train(broadcast, jobs)
        reports = [report for _, report in trained]
        return (self.process, reports), *(upload for upload, _ in trained)

    @ray.method(max_task_retries=0)
    def evaluate(
        self, run: Assignment, broadcast: "ArrayState", job: "EvalJob"
    ) -> "tuple[Process, EvalReport]":
        """Evaluate the broadcast on one chunk of test rows."""
        return self.process, self._work_for(run).evaluate(broadcast, job)

    @ray.method(num_returns=2, max_task_retries=0)
    def reduce(
        self, run: Assignment, reducer: "Reducer", uploads: Sequence[Any]
    ) -> "tuple[tuple[Process, None], Partial]":
        """Validate and sum one group of uploads, so that they bypass the coordinator.

        They are given as a list of references, which Ray does not wait for by itself: where a node
        is lost while its objects are on their way here, that takes it ten minutes.

        Raises:
            GetTimeoutError: One has not come in :data:`FETCH_SECONDS`.
        """
        from trishul_ray.federation.reduce import partial_sum

        self._enter(run)
        return (self.process, None), partial_sum(_fetched(uploads), reducer)

    @ray.method(num_returns=2, max_task_retries=0)
    def combine(
        self, run: Assignment, sums: Sequence[Any]
    ) -> "tuple[tuple[Process, None], Partial]":
        """Add the sums of groups, in the order given; they are fetched as uploads are."""
        from trishul_ray.federation.reduce import combine

        self._enter(run)
        return (self.process, None), combine(_fetched(sums))


def _fetched(references: Sequence[Any]) -> list[Any]:
    found: list[Any] = ray.get(list(references), timeout=FETCH_SECONDS)
    return found


def start_clients(limit: int, slices: Slices, environment: WorkerEnvironment) -> list[Any]:
    """Request client actors without waiting for them; this process owns them.

    ``limit`` is how often Ray restarts one of them.
    """
    remote = ClientActor.options(  # type: ignore[attr-defined]  # added by ray.remote
        num_cpus=slices.cpus, num_gpus=slices.gpus, max_restarts=limit, max_task_retries=limit
    )
    return [remote.remote(slices.gpus, environment) for _ in range(slices.actors)]
