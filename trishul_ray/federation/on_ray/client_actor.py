"""The actor that runs the rounds of clients.

It may outlive a run and work for the next one (see ``Workers``), so every call carries the
:class:`~trishul_ray.federation.on_ray.process.Assignment` of its run. Torch, transformers and
pydantic are imported inside the methods: a coordinator requests its clients before it imports
anything heavy, so that all of them start at the same time.
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
from trishul_ray.federation.on_ray.process import Assignment, WorkerEnvironment
from trishul_ray.federation.on_ray.slices import Slices
from trishul_ray.runtime.device import cap_device_memory, why_unusable
from trishul_ray.storage.integrity import take_remarks

if TYPE_CHECKING:
    from trishul_ray.federation.inline import InlineExecutor
    from trishul_ray.federation.messages import (
        Arrays,
        EvalJob,
        EvalReport,
        TrainJob,
        TrainReport,
        Upload,
        WorkerSpec,
    )
    from trishul_ray.federation.reduce import Reducer
    from trishul_ray.federation.worker.context import BackboneCache
    from trishul_ray.stages import ArrayState, Partial

#: After this many seconds, a missing upload counts as lost. If a node dies while its objects are on
#: their way, Ray itself notices only after ten minutes.
FETCH_SECONDS = 120.0


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor:
    """Runs the rounds of any client; its owner replaces it if it dies.

    The first call of another run replaces everything but an equal backbone.
    """

    def __init__(self, gpu_share: float, environment: WorkerEnvironment) -> None:
        environment.apply()
        cap_device_memory(gpu_share)
        self._gpu_share = gpu_share
        self._token = ""  # of the run that this actor works for
        self._settings = ExitStack()
        self._executor: InlineExecutor | None = None
        self._backbones: BackboneCache | None = None

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
        """Return the executor of a run in this process.

        The constructor cannot build it: Ray turns an exception of a constructor into text, and an
        InputError must reach the user unchanged.
        """
        from trishul_ray.federation.inline import InlineExecutor

        self._enter(run)
        on_gpu = self._gpu_share and self.experiment.resources.device != "cpu"
        if on_gpu and (reason := why_unusable()):
            # It would train on the CPU, with as many CPUs as feed a GPU.
            raise InputError(f"node {socket.gethostname()} has a GPU for this actor, but {reason}")
        if self._executor is None:
            prepared = ray.get(run.prepared[0])
            self._executor = InlineExecutor(self.experiment, prepared, self._backbones)
            self._backbones = self._executor.backbones
        return self._executor

    def describe(self, run: Assignment, survey: "Arrays") -> "tuple[int, WorkerSpec]":
        """Return the process id and the spec of the worker context."""
        spec = self._work_for(run).describe(survey)
        return os.getpid(), replace(spec, remarks=take_remarks())

    def train(
        self, run: Assignment, broadcast: "ArrayState", *jobs: "TrainJob"
    ) -> "tuple[list[TrainReport] | Upload, ...]":
        """Train one client, or several together; ``num_returns`` is one more than the jobs.

        The uploads are separate return values, so that they stay on this node.
        """
        trained = self._work_for(run).train(broadcast, jobs)
        return [report for _, report in trained], *(upload for upload, _ in trained)

    def evaluate(self, run: Assignment, broadcast: "ArrayState", job: "EvalJob") -> "EvalReport":
        """Evaluate the broadcast on one chunk of test rows."""
        return self._work_for(run).evaluate(broadcast, job)

    @ray.method(num_returns=2)
    def reduce(
        self, run: Assignment, reducer: "Reducer", uploads: Sequence[Any]
    ) -> "tuple[None, Partial]":
        """Validate and sum one group of uploads, so that they bypass the coordinator.

        Raises:
            GetTimeoutError: An upload has not come in :data:`FETCH_SECONDS`.
        """
        from trishul_ray.federation.reduce import partial_sum

        self._enter(run)
        return None, partial_sum(ray.get(list(uploads), timeout=FETCH_SECONDS), reducer)

    @ray.method(num_returns=2)
    def combine(self, run: Assignment, sums: Sequence[Any]) -> "tuple[None, Partial]":
        """Add the sums of groups, in the order given."""
        from trishul_ray.federation.reduce import combine

        self._enter(run)
        return None, combine(ray.get(list(sums), timeout=FETCH_SECONDS))


def start_client(slices: Slices, environment: WorkerEnvironment) -> Any:
    """Request a client actor without waiting for it; this process owns it."""
    options = ClientActor.options(  # type: ignore[attr-defined]  # added by ray.remote
        num_cpus=slices.cpus, num_gpus=slices.gpus
    )
    return options.remote(slices.gpus, environment)
