"""The actor that runs the rounds of clients.

Torch, transformers and pydantic are imported inside the methods: a coordinator requests its clients
before its heavy imports, so that all of them start at the same time.
"""

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from trishul_ray.errors import InputError
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.on_ray.process import RunRequest, WorkerEnvironment
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

#: Seconds after which a missing upload counts as lost. If a node dies while its objects are being
#: transferred, Ray itself notices only after ten minutes.
FETCH_SECONDS = 120.0


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor:
    """Run the rounds of any client of the open run; the owner replaces the actor if it dies.

    The actor may outlive a run. The next run reuses its backbone if it is the same.
    """

    _executor: "InlineExecutor"

    def __init__(self, gpu_share: float, environment: WorkerEnvironment) -> None:
        environment.apply()
        cap_device_memory(gpu_share)
        self._gpu_share = gpu_share
        self._backbones: BackboneCache | None = None

    def open(self, run: RunRequest) -> "tuple[int, list[str], WorkerSpec]":
        """Prepare for a run; return the process id, repairs of files, and the worker's spec.

        The constructor cannot do this: Ray turns an exception of a constructor into text, and an
        InputError must reach the user unchanged.
        """
        from trishul_ray.federation.inline import InlineExecutor

        if self._backbones is not None:
            self._executor.close()
        experiment = run.load()
        on_gpu = self._gpu_share and experiment.resources.device != "cpu"
        if on_gpu and (reason := why_unusable()):
            # Otherwise it would train on the CPU, with only the CPUs meant to feed a GPU.
            raise InputError(f"node {socket.gethostname()} has a GPU for this actor, but {reason}")
        self._executor = InlineExecutor(experiment, ray.get(run.prepared[0]), self._backbones)
        self._backbones = self._executor.backbones
        return os.getpid(), [*take_remarks()], self._executor.describe({})

    def describe(self, survey: "Arrays") -> "WorkerSpec":
        """Return the worker's spec, given the survey."""
        return self._executor.describe(survey)

    def train(
        self, broadcast: "ArrayState", *jobs: "TrainJob"
    ) -> "tuple[list[TrainReport] | Upload, ...]":
        """Train one client, or several together; ``num_returns`` is the number of jobs plus one.

        The uploads are separate return values, so that they stay on this node.
        """
        trained = self._executor.train(broadcast, jobs)
        return [report for _, report in trained], *(upload for upload, _ in trained)

    def evaluate(self, broadcast: "ArrayState", job: "EvalJob") -> "EvalReport":
        """Evaluate the broadcast on one chunk of test rows."""
        return self._executor.evaluate(broadcast, job)

    @ray.method(num_returns=2)
    def reduce(self, reducer: "Reducer", uploads: Sequence[Any]) -> "tuple[None, Partial]":
        """Validate and sum one group of uploads, so that they bypass the coordinator.

        Raises:
            GetTimeoutError: An upload has not arrived within :data:`FETCH_SECONDS`.
        """
        from trishul_ray.federation.reduce import partial_sum

        with deterministic(self._executor.experiment):
            return None, partial_sum(ray.get(list(uploads), timeout=FETCH_SECONDS), reducer)
