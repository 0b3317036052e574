"""The two kinds of Ray actors of a run: the coordinator and its client actors.

Both may outlive a run and work for the next one (see workers.py), so every call carries the
:class:`Assignment` of the run that it is for. Torch, transformers and pydantic are imported inside
the methods: a coordinator can request its clients before it imports anything heavy, so that all of
them start at the same time.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from trishul_ray.federation.determinism import deterministic, set_environment
from trishul_ray.federation.on_ray.slices import Slices, cap_device_memory

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
    from trishul_ray.federation.reduce import Partial, Reducer
    from trishul_ray.federation.residents import Residents
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


@dataclass(frozen=True)
class Assignment:
    """The run that an actor works for.

    Every call carries it, because a crashed actor is restarted with the arguments of its
    constructor, which are older than the run: the repeated call says what to rebuild.

    Attributes:
        token: Unique for every run of every process.
        experiment: The fields of the experiment.
        attempt: Name of the run in the tracking server.
        prepared: The object store reference of a
            :class:`~trishul_ray.federation.prepare.Prepared`, so that one copy serves all actors;
            in a list, so that an actor receives the reference and not the content.
    """

    token: str
    experiment: dict[str, Any]
    attempt: str
    prepared: list[Any]

    def load(self) -> dict[str, Any]:
        """Return the fields of the experiment, once this process has loaded its plug-ins.

        Raises:
            InputError: A plug-in cannot be loaded here.
        """
        from trishul_ray.plugins import Plugin, find_plugin

        for plugin in self.experiment.get("plugins", ()):
            find_plugin(Plugin(**plugin))
        return self.experiment


class Process(NamedTuple):
    """The process of an actor."""

    pid: int
    node: str  # id of its node


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
        from trishul_ray.federation.residents import Residents
        from trishul_ray.federation.workbench import adapt_to, build_workbench

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
        self, run: Assignment, broadcast: "Arrays", job: "TrainJob"
    ) -> "tuple[tuple[Process, TrainReport], Upload]":
        """Train one client. The upload is a separate return value, so that it can stay here."""
        from trishul_ray.federation.local import train_client
        from trishul_ray.federation.messages import survey_in

        bench = self._workbench(run, survey_in(broadcast))
        upload, report = train_client(bench, broadcast, job)
        return (self.process, report), upload

    @ray.method(max_task_retries=0)
    def evaluate(
        self, run: Assignment, broadcast: "Arrays", job: "EvalJob"
    ) -> "tuple[Process, EvalReport]":
        """Evaluate the broadcast on one chunk of test rows."""
        from trishul_ray.federation.local import evaluate_chunk
        from trishul_ray.federation.messages import survey_in

        bench = self._workbench(run, survey_in(broadcast))
        return self.process, evaluate_chunk(bench, broadcast, job)

    @ray.method(max_task_retries=0)
    def survey(self, run: Assignment, job: "SurveyJob") -> "tuple[Process, Arrays]":
        """Return one client's answer to the method's survey."""
        from trishul_ray.federation.local import survey_client

        return self.process, survey_client(self._workbench(run), job)

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


@ray.remote
class Coordinator:
    """Runs the server of a run: samples, broadcasts through the object store, reduces, saves.

    It does not read the data. The first call of another run opens the server of that run, on the
    same client actors unless one of them died.
    """

    def __init__(self, slices: Slices, environment: WorkerEnvironment) -> None:
        environment.apply()
        self.slices, self.environment = slices, environment
        self.clients: list[Any] = []
        self.pool: ActorPool | None = None
        self._token = ""  # of the run that the server is for
        self._server: Server | None = None

    def _open_server(self, run: Assignment) -> "Server":
        """Return the server; the first call starts the run or continues its newest checkpoint."""
        if self._server is None or self._token != run.token:
            if self.pool is not None and self.pool.losses:
                # Every run has all its actors, and all their restarts.
                for actor in self.clients:
                    ray.kill(actor)
                self.clients = []
            if not self.clients:  # before the imports: the actors start in the meantime
                limit = run.experiment["resources"]["max_restarts"]
                self.clients = start_clients(limit, self.slices, self.environment)
            from trishul_ray.experiment import Experiment
            from trishul_ray.federation.checkpoint import open_checkpoints
            from trishul_ray.federation.on_ray.pool import ActorPool
            from trishul_ray.federation.server import Server

            experiment = Experiment.model_validate(run.load())
            self.pool = ActorPool(self.clients, run)
            self._server = Server(experiment, self.pool, open_checkpoints(experiment), run.attempt)
            self._token = run.token
        return self._server

    @ray.method(max_task_retries=-1)
    def begin(self, run: Assignment) -> "RoundReport":
        """Return the records of the checkpoint, if any; Ray repeats the call after a restart."""
        return self._open_server(run).progress()

    def step(self, run: Assignment) -> "RoundReport":
        """Run one round, or none if the run is finished."""
        server = self._open_server(run)
        return server.progress() if server.finished else server.step()

    @ray.method(max_task_retries=-1)
    def final(self, run: Assignment) -> "RunResult":
        """Return the result of a finished run."""
        return self._open_server(run).result()

    def processes(self) -> list[int]:
        """Return the process ids of this actor and its client actors."""
        return [os.getpid(), *(self.pool.processes() if self.pool else [])]
