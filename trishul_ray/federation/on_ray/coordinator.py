"""The actor that serves a run: it owns the client actors, and outlives a run like them."""

import os
from functools import partial
from typing import TYPE_CHECKING

import ray

from trishul_ray.federation.on_ray.client_actor import start_client
from trishul_ray.federation.on_ray.process import Assignment, WorkerEnvironment
from trishul_ray.federation.on_ray.slices import Slices

if TYPE_CHECKING:
    from trishul_ray.federation.on_ray.pool import ActorPool
    from trishul_ray.federation.server import RoundReport, RunResult, Server


@ray.remote(max_restarts=0, max_task_retries=0)
class Coordinator:
    """Runs the server of a run: samples, broadcasts through the object store, reduces, saves.

    It does not read the data. The first call of another run opens the server of that run, on the
    same client actors.
    """

    def __init__(self, limit: int, slices: Slices, environment: WorkerEnvironment) -> None:
        environment.apply()
        self._limit, self._slices = limit * slices.actors, slices
        self._start = partial(start_client, slices, environment)
        # Before anything heavy is imported: they start in the meantime.
        self._clients = [self._start() for _ in range(slices.actors)]
        self._pool: ActorPool | None = None
        self._token = ""  # of the run that the server is for
        self._server: Server | None = None

    def _open_server(self, run: Assignment) -> "Server":
        """Return the server; the first call starts the run or continues its newest checkpoint."""
        if self._server is None or self._token != run.token:
            from trishul_ray.federation.checkpoint import open_checkpoints
            from trishul_ray.federation.on_ray.pool import ActorPool
            from trishul_ray.federation.server import Server

            if self._pool is not None:
                lost = self._slices.actors - len(self._pool.actors)
                self._clients = [*self._pool.actors, *(self._start() for _ in range(lost))]
            self._server = None  # the last run's
            experiment = run.load()
            self._pool = ActorPool(run, self._clients, self._start, self._limit)
            checkpoints = open_checkpoints(experiment)
            checkpoints.store.remove_unfinished()  # what a killed predecessor was writing
            self._server = Server(experiment, self._pool, checkpoints, run.attempt)
            self._token = run.token
        return self._server

    def check_fits(self, run: Assignment) -> None:
        """Raise an InputError if the parts of a run do not fit together."""
        from trishul_ray.experiment.fit import check_fits

        check_fits(run.load())

    def begin(self, run: Assignment) -> "RoundReport":
        """Return the records of the checkpoint, if any."""
        return self._open_server(run).progress()

    def step(self, run: Assignment) -> "RoundReport":
        """Run one round, or none if the run is finished."""
        from trishul_ray.runtime.memory import return_freed

        server = self._open_server(run)
        report = server.progress() if server.finished else server.step()
        return_freed()  # it waits for the clients of the next round
        return report

    def final(self, run: Assignment) -> "RunResult":
        """Return the result of a finished run."""
        return self._open_server(run).result()

    def processes(self) -> list[int]:
        """Return the process ids of this actor and its client actors."""
        return [os.getpid(), *(self._pool.processes() if self._pool else [])]
