"""The two kinds of Ray actors of a run: the coordinator and its client actors.

Torch, transformers and pydantic are imported inside the methods: a coordinator can request its
clients before it imports anything heavy, so that all of them start at the same time.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from trishul_ray.federation.determinism import deterministic, set_environment
from trishul_ray.federation.on_ray.slices import Slices

if TYPE_CHECKING:
    from trishul_ray.federation.messages import (
        Arrays,
        Blueprint,
        EvalJob,
        EvalReport,
        SurveyJob,
        TrainJob,
        TrainReport,
        Upload,
    )
    from trishul_ray.federation.on_ray.pool import ActorPool
    from trishul_ray.federation.prepare import Prepared
    from trishul_ray.federation.reduce import Partial, Reducer
    from trishul_ray.federation.server import RoundReport, RunResult, Server
    from trishul_ray.federation.workbench import Workbench

set_environment()


@dataclass(frozen=True)
class WorkerEnvironment:
    """The driver's working directory and settings, applied in actors that start elsewhere."""

    directory: str
    variables: dict[str, str]

    @classmethod
    def of_this_process(cls) -> "WorkerEnvironment":
        """Capture the working directory and the ``TRISHUL_*`` and ``HF_*`` variables."""
        variables = {k: v for k, v in os.environ.items() if k.startswith(("TRISHUL_", "HF_"))}
        return cls(os.getcwd(), variables)

    def apply(self) -> None:
        """Set the variables, and change to the directory if this machine has it."""
        os.environ.update(self.variables)
        if os.path.isdir(self.directory):
            os.chdir(self.directory)


def cap_device_memory(share: float) -> None:
    """Limit this process to a share of one GPU's memory, if 0 < share < 1: Ray limits nothing."""
    import torch

    if torch.cuda.is_available() and 0.0 < share < 1.0:
        torch.cuda.set_per_process_memory_fraction(share)


@ray.remote
class ClientActor:
    """Runs the rounds of any client. Every call is idempotent.

    Ray may restart the actor after a crash (the next call then rebuilds everything) and repeat a
    call. Every method also returns its process id, by which the pool notices restarts.
    """

    def __init__(
        self,
        experiment: dict[str, Any],
        prepared: "Prepared",
        gpu_share: float,
        environment: WorkerEnvironment,
    ) -> None:
        from trishul_ray.experiment import Experiment

        environment.apply()
        self.experiment = Experiment.model_validate(experiment)
        self.prepared = prepared
        # Entered once and never left: these settings hold for the life of the process.
        self._determinism = ExitStack()
        self._determinism.enter_context(deterministic(self.experiment))
        cap_device_memory(gpu_share)
        self.pid = os.getpid()
        self._bench: Workbench | None = None

    def _workbench(self, survey: "Arrays | None" = None) -> "Workbench":
        """Return the workbench, built once, with the adapters that a survey decides.

        Not built in the constructor: Ray turns an exception raised there into text, and an
        InputError must reach the user as it is.
        """
        from trishul_ray.federation.workbench import adapt_to, build_workbench

        if self._bench is None:
            self._bench = build_workbench(self.experiment, self.prepared)
        if survey is not None:
            adapt_to(self._bench, survey)
        return self._bench

    def describe(self, survey: "Arrays") -> "tuple[int, Blueprint]":
        """Return the blueprint of the workbench."""
        from trishul_ray.federation.workbench import blueprint_of

        return self.pid, blueprint_of(self._workbench(survey))

    @ray.method(num_returns=2)
    def train(
        self, broadcast: "Arrays", job: "TrainJob"
    ) -> "tuple[tuple[int, TrainReport], Upload]":
        """Train one client. The upload is a separate return value, so that it can stay here."""
        from trishul_ray.federation.local import train_client
        from trishul_ray.federation.messages import survey_in

        upload, report = train_client(self._workbench(survey_in(broadcast)), broadcast, job)
        return (self.pid, report), upload

    def evaluate(self, broadcast: "Arrays", job: "EvalJob") -> "tuple[int, EvalReport]":
        """Evaluate the broadcast on one chunk of test rows."""
        from trishul_ray.federation.local import evaluate_chunk
        from trishul_ray.federation.messages import survey_in

        return self.pid, evaluate_chunk(self._workbench(survey_in(broadcast)), broadcast, job)

    def survey(self, job: "SurveyJob") -> "tuple[int, Arrays]":
        """Return one client's answer to the method's survey."""
        from trishul_ray.federation.local import survey_client

        return self.pid, survey_client(self._workbench(), job)

    def reduce(self, reducer: "Reducer", *uploads: "Upload") -> "tuple[int, Partial]":
        """Validate and sum one group of uploads, so that they bypass the coordinator."""
        from trishul_ray.federation.reduce import partial_sum

        return self.pid, partial_sum(uploads, reducer)


def start_clients(
    experiment: dict[str, Any], prepared: Any, slices: Slices, environment: WorkerEnvironment
) -> list[Any]:
    """Request the client actors of a run without waiting for them; this process owns them.

    ``prepared`` is the object store reference of a
    :class:`~trishul_ray.federation.prepare.Prepared`, so that one copy serves all actors.
    """
    limit = experiment["resources"]["max_restarts"]
    remote = ClientActor.options(  # type: ignore[attr-defined]  # added by ray.remote
        num_cpus=slices.cpus, num_gpus=slices.gpus, max_restarts=limit, max_task_retries=limit
    )
    return [
        remote.remote(experiment, prepared, slices.gpus, environment) for _ in range(slices.actors)
    ]


@ray.remote
class Coordinator:
    """Runs the server of a run: samples, broadcasts through the object store, reduces, saves.

    Every call takes ``prepared``, a list around the reference that the client actors get: Ray
    resolves a bare argument, and this process does not read the data.
    """

    def __init__(
        self,
        experiment: dict[str, Any],
        slices: Slices,
        attempt: str,
        environment: WorkerEnvironment,
    ) -> None:
        environment.apply()
        self.experiment, self.slices = experiment, slices
        self.attempt, self.environment = attempt, environment
        self.pool: ActorPool | None = None
        self._server: Server | None = None

    def _open_server(self, prepared: list[Any]) -> "Server":
        """Return the server; the first call starts the run or continues its newest checkpoint."""
        if self._server is None:
            clients: list[Any] = []
            if self.pool is None:  # before the imports: the actors start in the meantime
                clients = start_clients(self.experiment, prepared[0], self.slices, self.environment)
            from trishul_ray.experiment import Experiment
            from trishul_ray.federation.checkpoint import open_checkpoints
            from trishul_ray.federation.on_ray.pool import ActorPool
            from trishul_ray.federation.server import Server

            experiment = Experiment.model_validate(self.experiment)
            self.pool = self.pool or ActorPool(clients)
            checkpoints = open_checkpoints(experiment)
            self._server = Server(experiment, self.pool, checkpoints, self.attempt)
        return self._server

    @ray.method(max_task_retries=-1)
    def begin(self, prepared: list[Any]) -> "RoundReport":
        """Return the records of the checkpoint, if any; Ray repeats the call after a restart."""
        return self._open_server(prepared).progress()

    def step(self, prepared: list[Any]) -> "RoundReport":
        """Run one round, or none if the run is finished."""
        server = self._open_server(prepared)
        return server.progress() if server.finished else server.step()

    @ray.method(max_task_retries=-1)
    def final(self, prepared: list[Any]) -> "RunResult":
        """Return the result of a finished run."""
        return self._open_server(prepared).result()

    def processes(self) -> list[int]:
        """Return the process ids of this actor and its client actors."""
        return [os.getpid(), *(self.pool.processes() if self.pool else [])]
