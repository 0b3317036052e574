"""The coordinator actor: owns the client actors of one run and drives its rounds.

It holds no state that is not in the newest checkpoint: killed and restarted, its constructor starts
new client actors and continues after the last whole round.
"""

from dataclasses import dataclass
from typing import Any

import ray

from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import CheckpointStore, state_digest
from trishul_ray.federation.jobs import Arrays
from trishul_ray.federation.pool import ActorPool
from trishul_ray.federation.resources import Slices
from trishul_ray.federation.server import Blueprint, Server
from trishul_ray.federation.world import Prepared
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
    )


@ray.remote
class Coordinator:
    """Samples, broadcasts through the object store, reduces, checkpoints."""

    def __init__(
        self, experiment: dict[str, Any], prepared: Prepared, slices: Slices, attempt: str
    ) -> None:
        """Start the client actors and find the newest checkpoint."""
        settings = Experiment.model_validate(experiment)
        # One copy in the object store serves all client actors.
        self.pool = ActorPool(settings, ray.put(prepared), slices)
        self.server = Server(settings, self.pool, open_checkpoints(settings), attempt)

    def begin(self) -> Progressed:
        """What is there already: records of a resumed run, the first events."""
        return standing_of(self.server)

    def step(self) -> Progressed:
        """One round; repeated after a crash it continues from the checkpoint."""
        if self.server.finished:
            return Progressed([], self.server.drain_events(), self.server.round, True)
        return progress_of(self.server)

    def processes(self) -> list[int]:
        """Operating-system processes of the client actors."""
        return [ray.get(actor.process_id.remote()) for actor in self.pool.actors]

    def final(self) -> Final:
        """The result."""
        return final_of(self.server)
