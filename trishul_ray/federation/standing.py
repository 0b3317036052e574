"""What a run's server tells those who drive it: how far it is, what it brought, what it left."""

from dataclasses import dataclass
from typing import Any

from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import CheckpointStore, state_digest
from trishul_ray.federation.contract import Blueprint
from trishul_ray.federation.jobs import Arrays
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
    matrices: Arrays
    blueprint: Blueprint
    attempt: str
    broadcast: Arrays  # the global model as it would go out next


def open_checkpoints(experiment: Experiment) -> CheckpointStore:
    """The checkpoints of an experiment's run, under ``storage.runs``."""
    folder = run_folder(experiment).child("checkpoints")
    return CheckpointStore(folder, experiment.id, experiment.storage.keep_checkpoints)


def run_folder(experiment: Experiment) -> Store:
    """The folder of an experiment's run, under ``storage.runs``."""
    storage = experiment.storage
    return Store.open(storage.runs, storage.retry_seconds).child(experiment.id)


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
        matrices=server.matrices,
        blueprint=server.blueprint,
        attempt=server.attempt,
        broadcast=server.broadcast(),
    )
