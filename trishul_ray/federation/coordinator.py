"""The coordinator actor: owns the client actors of one run and drives its rounds.

It holds no state that is not in the newest checkpoint: killed and restarted, its first call starts
new client actors and continues after the last whole round.
"""

import os
from dataclasses import dataclass
from typing import Any

import ray
import torch

from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import CheckpointStore, state_digest
from trishul_ray.federation.cluster import Surroundings
from trishul_ray.federation.contract import Blueprint
from trishul_ray.federation.jobs import Arrays
from trishul_ray.federation.pool import ActorPool
from trishul_ray.federation.resources import Slices
from trishul_ray.federation.server import Server
from trishul_ray.storage import Store


@dataclass(frozen=True)
class Progressed:
    """What one step brought."""

    records: list[dict[str, Any]]  # complete records, oldest first
    events: list[str]
    round: int  # the last aggregated round
    finished: bool


@dataclass(frozen=True)
class Final:
    """What a finished run leaves."""

    state: Arrays
    digest: str
    records: list[dict[str, Any]]
    spectra: Arrays
    blueprint: Blueprint
    attempt: str
    broadcast: Arrays  # the global model as it would go out next


def open_checkpoints(experiment: Experiment) -> CheckpointStore:
    """The checkpoints of an experiment's run, under ``storage.runs``."""
    folder = Store.open(experiment.storage.runs).child(experiment.id).child("checkpoints")
    return CheckpointStore(folder, experiment.id, experiment.storage.keep_checkpoints)


def standing_of(server: Server) -> Progressed:
    """What a server has before its next step."""
    return Progressed(
        server.complete_records(), server.drain_events(), server.round, server.finished
    )


def progress_of(server: Server) -> Progressed:
    """Take one step and say what it brought."""
    records = server.step()
    return Progressed(records, server.drain_events(), server.round, server.finished)


def final_of(server: Server) -> Final:
    """The result of a finished server."""
    return Final(
        state=server.state,
        digest=state_digest(server.state),
        records=server.records,
        spectra=server.spectra,
        blueprint=server.blueprint,
        attempt=server.attempt,
        broadcast=server.broadcast(),
    )


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
        self.settings = Experiment.model_validate(experiment)
        # Sums of the server, too, depend on the number of threads.
        torch.set_num_threads(self.settings.resources.threads)
        self.slices = slices
        self.attempt = attempt
        self.surroundings = surroundings
        self.pool: ActorPool | None = None
        self._server: Server | None = None

    def _run(self, prepared: list[Any]) -> Server:
        """The run: started, or found in the newest checkpoint, by whichever call comes first.

        Args:
            prepared: a list around the reference to what the client actors get: this process
                passes it on unread.
        """
        if self._server is None:
            self.pool = self.pool or ActorPool(
                self.settings, prepared[0], self.slices, self.surroundings
            )
            checkpoints = open_checkpoints(self.settings)
            self._server = Server(self.settings, self.pool, checkpoints, self.attempt)
        return self._server

    @ray.method(max_task_retries=-1)
    def begin(self, prepared: list[Any]) -> Progressed:
        """What is there already: records of a resumed run, the first events.

        Repeated by Ray, after a restart, as long as there are restarts.

        Raises:
            InputError: the client actors cannot be built from this input.
            RunError: no client actor came up.
        """
        return standing_of(self._run(prepared))

    def step(self, prepared: list[Any]) -> Progressed:
        """One round, or nothing if the run is finished."""
        server = self._run(prepared)
        return standing_of(server) if server.finished else progress_of(server)

    @ray.method(max_task_retries=-1)
    def final(self, prepared: list[Any]) -> Final:
        """The result."""
        return final_of(self._run(prepared))

    def processes(self) -> list[int]:
        """Operating-system processes: this one, then the client actors'."""
        return [os.getpid(), *(self.pool.processes() if self.pool else [])]
