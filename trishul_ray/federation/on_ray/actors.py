"""Where a driver works, told to actors on other nodes. Imports nothing of weight; see client.py."""

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


@dataclass(frozen=True)
class Surroundings:
    """What paths and settings mean in the driver, for actors that a daemon started elsewhere."""

    folder: str
    variables: dict[str, str]

    @classmethod
    def here(cls) -> "Surroundings":
        """This process's working folder and its settings of this package and of the hub."""
        kept = {k: v for k, v in os.environ.items() if k.startswith(("TRISHUL_", "HF_"))}
        return cls(os.getcwd(), kept)

    def enter(self) -> None:
        """Take them over, as far as this machine has the folder."""
        os.environ.update(self.variables)
        if os.path.isdir(self.folder):
            os.chdir(self.folder)


set_environment()


def cap_device_memory(share: float) -> None:
    """Enforce a GPU slice on the device: Ray only keeps books of it.

    Args:
        share: of one GPU, 0 < share <= 1; above that, or 0, nothing is capped.
    """
    import torch

    if torch.cuda.is_available() and 0.0 < share < 1.0:
        torch.cuda.set_per_process_memory_fraction(share)


@ray.remote
class ClientActor:
    """Runs any client's round; every method gives the same result however often it is called.

    Ray may restart it after a crash (the first call then rebuilds everything) and repeat a call:
    no call leaves anything behind. Every method also gives its process, by which the pool sees
    restarts.
    """

    def __init__(
        self,
        experiment: dict[str, Any],
        prepared: "Prepared",
        gpu_share: float,
        surroundings: Surroundings,
    ) -> None:
        """Pin threads and kernels, cap the memory; what can fail comes with the first call."""
        from trishul_ray.experiment import Experiment

        surroundings.enter()
        self.settings = Experiment.model_validate(experiment)
        self.prepared = prepared
        # Never left: these are the settings of this process for as long as it lives.
        self._kernels = ExitStack()
        self._kernels.enter_context(deterministic(self.settings))
        cap_device_memory(gpu_share)
        self.pid = os.getpid()
        self._bench: Workbench | None = None

    @property
    def bench(self) -> "Workbench":
        """The workbench, built once.

        Not in the constructor: Ray turns what a constructor raises into text, and bad input
        must reach the person as what it is.
        """
        if self._bench is None:
            from trishul_ray.federation.workbench import build_workbench

            self._bench = build_workbench(self.settings, self.prepared)
        return self._bench

    def _adapted(self, survey: "Arrays") -> "Workbench":
        """The workbench, with the adapters that a survey decides."""
        from trishul_ray.federation.workbench import adapt_to

        adapt_to(self.bench, survey)
        return self.bench

    def describe(self, survey: "Arrays") -> "tuple[int, Blueprint]":
        """The blueprint of the workbench.

        Raises:
            InputError: the workbench cannot be built from this input.
        """
        from trishul_ray.federation.workbench import blueprint_of

        return self.pid, blueprint_of(self._adapted(survey))

    @ray.method(num_returns=2)
    def train(
        self, broadcast: "Arrays", job: "TrainJob"
    ) -> "tuple[tuple[int, TrainReport], Upload]":
        """Train one client; the upload is a return of its own, so that it can stay here."""
        from trishul_ray.federation.local import train_client
        from trishul_ray.federation.messages import survey_in

        upload, report = train_client(self._adapted(survey_in(broadcast)), broadcast, job)
        return (self.pid, report), upload

    def evaluate(self, broadcast: "Arrays", job: "EvalJob") -> "tuple[int, EvalReport]":
        """Evaluate the broadcast on one chunk of test rows."""
        from trishul_ray.federation.local import evaluate_chunk
        from trishul_ray.federation.messages import survey_in

        return self.pid, evaluate_chunk(self._adapted(survey_in(broadcast)), broadcast, job)

    def survey(self, job: "SurveyJob") -> "tuple[int, Arrays]":
        """One client's answer to the method's survey."""
        from trishul_ray.federation.local import survey_client

        return self.pid, survey_client(self.bench, job)

    def reduce(self, reducer: "Reducer", *uploads: "Upload") -> "tuple[int, Partial]":
        """Judge and sum one group of uploads, without their passing through the coordinator."""
        from trishul_ray.federation.reduce import partial_sum

        return self.pid, partial_sum(uploads, reducer)


def start_clients(
    experiment: dict[str, Any], prepared: Any, slices: Slices, surroundings: Surroundings
) -> list[Any]:
    """Ask for the client actors of a run; they come up by themselves, owned by this process.

    Args:
        experiment: what they build their workbenches from, as plain fields.
        prepared: a reference to a :class:`~trishul_ray.federation.prepare.Prepared` in the object
            store, so that one copy serves all.
        slices: how many actors, with what each.
        surroundings: what relative paths mean.
    """
    limit = experiment["resources"]["max_restarts"]
    remote = ClientActor.options(  # type: ignore[attr-defined]  # added by ray.remote
        num_cpus=slices.cpus, num_gpus=slices.gpus, max_restarts=limit, max_task_retries=limit
    )
    return [
        remote.remote(experiment, prepared, slices.gpus, surroundings) for _ in range(slices.actors)
    ]


set_environment()


@ray.remote
class Coordinator:
    """Samples, broadcasts through the object store, reduces, checkpoints."""

    def __init__(
        self, experiment: dict[str, Any], slices: Slices, attempt: str, surroundings: Surroundings
    ) -> None:
        """Keep what is needed; what can fail, or is large, comes with the calls.

        Args:
            experiment: the run, as plain fields.
            slices: how many client actors, with what each.
            attempt: names the run in the tracking server.
            surroundings: what relative paths mean.
        """
        surroundings.enter()
        self.experiment = experiment
        self.slices = slices
        self.attempt = attempt
        self.surroundings = surroundings
        self.pool: ActorPool | None = None
        self._server: Server | None = None

    def _run(self, prepared: list[Any]) -> "Server":
        """The run: started, or found in the newest checkpoint, by whichever call comes first.

        Args:
            prepared: a list around the reference to what the client actors get: this process
                passes it on unread.
        """
        if self._server is None:
            started = (
                start_clients(self.experiment, prepared[0], self.slices, self.surroundings)
                if self.pool is None
                else []
            )
            from trishul_ray.experiment import Experiment
            from trishul_ray.federation.checkpoint import open_checkpoints
            from trishul_ray.federation.on_ray.pool import ActorPool
            from trishul_ray.federation.server import Server

            settings = Experiment.model_validate(self.experiment)
            self.pool = self.pool or ActorPool(started)
            checkpoints = open_checkpoints(settings)
            self._server = Server(settings, self.pool, checkpoints, self.attempt)
        return self._server

    @ray.method(max_task_retries=-1)
    def begin(self, prepared: list[Any]) -> "RoundReport":
        """What is there already: records of a resumed run, the first events.

        Repeated by Ray, after a restart, as long as there are restarts.

        Raises:
            InputError: the client actors cannot be built from this input.
            RunError: no client actor came up.
        """
        server = self._run(prepared)
        return server.progress()

    def step(self, prepared: list[Any]) -> "RoundReport":
        """One round, or nothing if the run is finished."""
        server = self._run(prepared)
        return server.progress() if server.finished else server.step()

    @ray.method(max_task_retries=-1)
    def final(self, prepared: list[Any]) -> "RunResult":
        """The result."""
        server = self._run(prepared)
        return server.result()

    def processes(self) -> list[int]:
        """Operating-system processes: this one, then the client actors'."""
        return [os.getpid(), *(self.pool.processes() if self.pool else [])]
