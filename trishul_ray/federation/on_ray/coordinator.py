"""The actor that runs the server of a run and owns the client actors; all of them outlive runs."""

import os
from functools import partial
from typing import TYPE_CHECKING

import ray

from trishul_ray.federation.on_ray.client_actor import ClientActor
from trishul_ray.federation.on_ray.process import RunRequest, WorkerEnvironment
from trishul_ray.federation.on_ray.slices import Slices
from trishul_ray.storage.durable import Json

if TYPE_CHECKING:
    from trishul_ray.federation.on_ray.metrics import RunMetrics
    from trishul_ray.federation.on_ray.pool import ActorPool
    from trishul_ray.federation.server import RoundReport, RunResult, Server


@ray.remote(max_restarts=0, max_task_retries=0)
class Coordinator:
    """Run the server: sample clients, broadcast through the object store, reduce, save.

    It does not read the data. ``begin`` opens a run; the next run uses the same client actors.
    """

    _server: "Server"
    _metrics: "RunMetrics"

    def __init__(self, limit: int, slices: Slices, environment: WorkerEnvironment) -> None:
        environment.apply()
        self._actors, self._limit = slices.actors, limit * slices.actors
        actor_class = ClientActor.options(  # type: ignore[attr-defined]  # added by ray.remote
            num_cpus=slices.cpus, num_gpus=slices.gpus
        )
        self._start = partial(actor_class.remote, slices.gpus, environment)
        # Start the clients first, so that they overlap with the heavy imports.
        self._clients = [self._start() for _ in range(slices.actors)]
        self._pool: ActorPool | None = None

    def check_fits(self, experiment: Json) -> None:
        """Raise an InputError if the parts of an experiment are not compatible."""
        from trishul_ray.experiment.compatibility import check_fits
        from trishul_ray.experiment.experiment import received

        check_fits(received(experiment))

    def begin(self, run: RunRequest) -> "RoundReport":
        """Start a run or resume its newest checkpoint, and return the records so far."""
        from trishul_ray.federation.checkpoint import open_checkpoints
        from trishul_ray.federation.on_ray.metrics import RunMetrics
        from trishul_ray.federation.on_ray.pool import ActorPool
        from trishul_ray.federation.server import Server

        if self._pool is not None:
            lost = self._actors - len(self._pool.actors)
            self._clients = [*self._pool.actors, *(self._start() for _ in range(lost))]
        experiment = run.load()
        self._metrics = RunMetrics(experiment)
        self._pool = ActorPool(run, self._clients, self._start, self._limit, self._metrics)
        checkpoints = open_checkpoints(experiment)
        checkpoints.store.remove_unfinished()  # A killed predecessor may have left files.
        self._server = Server(experiment, self._pool, checkpoints, run.attempt)
        return self._server.progress()

    def step(self) -> "RoundReport":
        """Run one round."""
        from trishul_ray.runtime.memory import return_freed

        report = self._server.step()
        self._metrics.add_rounds(report.records)
        return_freed()  # The process now waits for the clients of the next round.
        return report

    def final(self) -> "RunResult":
        """Return the result of a finished run."""
        return self._server.result()

    def processes(self) -> list[int]:
        """Return the process ids of this actor and its client actors."""
        return [os.getpid(), *(self._pool.processes() if self._pool else [])]
