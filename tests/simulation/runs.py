"""Whole runs in a simulated cluster, and the audit of what they leave."""

import functools
import hashlib
import json
import random
import shutil
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation.world import DriverKilled, Handle, Hang, World, methods_of

import trishul_ray.federation.on_ray.coordinator as coordinator_module
import trishul_ray.federation.on_ray.driver as driver_module
import trishul_ray.federation.on_ray.pool as pool_module
import trishul_ray.federation.on_ray.work as work_module
from trishul_ray.contract.methods import untimed
from trishul_ray.errors import RunError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import CheckpointStore, open_checkpoints
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.on_ray.client_actor import ClientActor
from trishul_ray.federation.on_ray.process import Assignment, Process
from trishul_ray.federation.on_ray.slices import Slices
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.reduce import combine, partial_sum
from trishul_ray.federation.server import Server
from trishul_ray.methods.messages import State
from trishul_ray.storage.store import Store

#: Restarts of an actor, and losses of a coordinator in one round, that a run gets over.
RESTARTS = 3
#: Kinds of runs: what differs for a pool, a coordinator and a server.
KINDS = {
    "plain": ["method=trishul", "evaluation.diagnostics_every=1"],
    "many uploads": [
        *("method=trishul", "federation.clients=40", "federation.clients_per_round=36"),
        *("federation.rounds=3", "evaluation.diagnostics_every=2"),
    ],
    "client state": ["method=scaffold", "optimizer.name=sgd", "optimizer.lr=0.1"],
    "every upload": ["method=fedex"],
    "survey": ["method=fedsb"],
    "stages": [
        *("method=trishul", "uploads.codec=int4", "uploads.error_feedback=true"),
        *("server.optimizer=adam", "server.lr=0.01"),
    ],
    "stacked": ["method=trishul", "federation.stacked=2"],
}
BASE = [
    "model.init=random", "federation.clients=6", "federation.clients_per_round=4",
    "federation.rounds=4", "federation.local_steps=1", "federation.batch_size=2", "budget=1",
    "evaluation.limit=16", "evaluation.batch_size=8", "evaluation.every=2",
    "evaluation.diagnostics_every=0", f"resources.max_restarts={RESTARTS}", "tracking.mlflow=false",
    "storage.retry_seconds=0", "optimizer.lr=0.01",
]  # fmt: skip

#: The real class, and what it says of its methods.
COORDINATOR = driver_module.Coordinator.__ray_metadata__.modified_class
COORDINATOR_METHODS = methods_of(driver_module.Coordinator)


@dataclass
class Undisturbed:
    """A run of a kind without trouble, and the answers to all jobs that it has had."""

    experiment: Any
    prepared: Any
    executor: InlineExecutor
    answers: dict[str, Any]
    digest: str = ""
    records: Any = None


def _key(broadcast: Any, *jobs: Any) -> str:
    """Name jobs by their content, and that of the broadcast."""
    parts = hashlib.sha256(broadcast.shared.tobytes())
    for part in (broadcast.extra, broadcast.base, broadcast.survey):
        for name, array in sorted(part.items()):
            parts.update(name.encode() + array.tobytes())
    for job in jobs:
        arrays = {**getattr(job, "state", {}), **getattr(job, "kept", {})}
        for name, array in sorted(arrays.items()):
            parts.update(name.encode() + array.tobytes())
        fields = {k: v for k, v in vars(job).items() if k not in ("state", "kept")}
        parts.update(json.dumps([type(job).__name__, fields], default=dict).encode())
    return parts.hexdigest()


def client_class(world: World, reference: Undisturbed) -> Any:
    """Return the client actor of a world: the jobs of the real one, each done once for all."""

    def fetched(refs: Any) -> list[Any]:
        if any(ref.is_lost for ref in refs):
            raise pool_module.GetTimeoutError("Get timed out")
        return world.get(list(refs))

    class Client:
        def __init__(self, pid: int, node: str) -> None:
            self.process = Process(pid, node)

        def _answer(self, key: str, work: Any) -> Any:
            if key not in reference.answers:
                reference.answers[key] = work()
            return reference.answers[key]

        def describe(self, run: Any, survey: Any) -> Any:
            key = _key(State(np.zeros(0), survey))
            blueprint = self._answer(key, lambda: reference.executor.describe(survey))
            return self.process, replace(blueprint, remarks=())

        def train(self, run: Any, broadcast: Any, *jobs: Any) -> Any:
            work = functools.partial(reference.executor.train, broadcast, jobs)
            trained = self._answer(_key(broadcast, *jobs), work)
            return (self.process, [report for _, report in trained]), *(up for up, _ in trained)

        def evaluate(self, run: Any, broadcast: Any, job: Any) -> Any:
            work = functools.partial(reference.executor.evaluate, broadcast, job)
            return self.process, self._answer(_key(broadcast, job), work)

        def reduce(self, run: Any, reducer: Any, uploads: Any) -> Any:
            return (self.process, None), partial_sum(fetched(uploads), reducer)

        def combine(self, run: Any, sums: Any) -> Any:
            return (self.process, None), combine(fetched(sums))

    return Client


@functools.cache
def undisturbed(kind: str, folder: Path) -> Undisturbed:
    """Run a kind in this process, once."""
    words = [*BASE, *KINDS[kind], f"storage.runs={folder}/inline"]
    experiment = load_experiment(None, words)
    prepared = prepare_run(experiment)
    executor = InlineExecutor(experiment, prepared)
    found = Undisturbed(experiment, prepared, executor, {})
    server = Server(experiment, executor, open_checkpoints(experiment), "attempt")
    while not server.finished:
        server.step()
    found.digest = server.result().digest
    found.records = untimed(server.checkpoint.records)
    return found


@contextmanager
def in_world(world: World, reference: Undisturbed, done: Counter[str]) -> Any:
    """Let pool, coordinator, driver and store act in a world within the block.

    ``done`` counts the checkpoints that are saved, and the steps that are done.
    """

    def start_clients(limit: int, slices: Slices, environment: Any) -> list[Handle]:
        options = {"num_cpus": 1, "max_restarts": limit, "max_task_retries": limit}
        made = client_class(world, reference)
        methods = methods_of(ClientActor)
        return [world.create(made, options, methods) for _ in range(slices.actors)]

    class Coordinators:
        """The class of the coordinator, as ``ray.remote`` makes it."""

        def options(self, num_cpus: int, max_restarts: int, scheduling_strategy: Any) -> Any:
            asked = {"num_cpus": num_cpus, "max_restarts": max_restarts}

            def remote(*args: Any) -> Handle:
                def make(pid: int, node: str) -> Any:
                    return COORDINATOR(*args)

                return world.create(make, asked, COORDINATOR_METHODS)

            return type("Asked", (), {"remote": staticmethod(remote)})

    def at_points(method: Any) -> Any:
        def wrapped(self: Any, *args: Any) -> Any:
            world.point()
            answer = method(self, *args)
            world.point()
            return answer

        return wrapped

    def saved(self: CheckpointStore, checkpoint: Any, save: Any = CheckpointStore.save) -> str:
        name: str = save(self, checkpoint)
        done[name] += 1
        return name

    def stepped(self: Server, step: Any = Server.step) -> Any:
        round_number = self.checkpoint.round
        report = step(self)
        done[f"step after round {round_number}"] += 1
        return report

    with pytest.MonkeyPatch.context() as patch:
        for module in (pool_module, work_module, coordinator_module, driver_module):
            patch.setattr(module, "ray", world.verbs)
        patch.setattr(pool_module, "is_restarting", lambda a: world.state_of(a) == "RESTARTING")
        for module in (pool_module, driver_module):
            patch.setattr(module, "is_gone", lambda a: world.state_of(a) == "DEAD")
        patch.setattr(pool_module, "draining_nodes", lambda: set(world.draining))
        patch.setattr(coordinator_module, "start_clients", start_clients)
        patch.setattr(driver_module, "Coordinator", Coordinators())
        patch.setattr(driver_module, "driver_node_affinity", lambda: None)
        patch.setattr(driver_module, "fits_now", lambda slices: True)
        patch.setattr(Store, "write", at_points(Store.write))
        patch.setattr(Store, "remove", at_points(Store.remove))
        patch.setattr(CheckpointStore, "save", saved)
        patch.setattr(Server, "step", stepped)
        experiment = reference.experiment
        patch.setattr(Assignment, "load", lambda self: experiment_of(self.experiment, experiment))
        try:
            yield
        finally:
            world.close()


def experiment_of(fields: Any, reference: Any) -> Any:
    """Return an experiment that differs from another one in its place alone."""
    storage = reference.storage.model_copy(update={"runs": fields["storage"]["runs"]})
    return reference.model_copy(update={"storage": storage})


def play(seed: int, kind: str, folder: Path) -> Counter[str]:
    """Run a kind to its end in a world of a seed, audit it, and return the trouble that it had.

    A driver that was killed, or that says why it ends, is started again, with less trouble.

    Raises:
        AssertionError: It has no end, or what it leaves is not what it would have left without
            trouble.
    """
    rng = random.Random(seed)
    reference = undisturbed(kind, folder)
    runs = Path(tempfile.mkdtemp(dir=folder))
    experiment = experiment_of({"storage": {"runs": str(runs)}}, reference.experiment)
    done, trouble, records = Counter[str](), Counter[str](), {}
    slices = Slices(actors=rng.choice([1, 2, 3, 5]), cpus=1, gpus=0)
    grows = rng.random() < 0.5
    try:
        for drivers in range(1, 20):
            room = {"n0": rng.choice([0, 1, 2])}
            room |= {f"n{i}": rng.choice([1, 2]) for i in range(1, rng.choice([1, 2, 4]))}
            budget = rng.choice([0, 1, 2, 4]) if drivers < 10 else 0
            kinds = ("client", "client", "node", "drain", "coordinator", "driver", "disk")
            asked = Counter(rng.choice(kinds) for _ in range(budget))
            world = World(rng.randrange(2**32), room, asked, grows=grows)
            ended = ""
            with in_world(world, reference, done):
                try:
                    result = _drive(experiment, reference, slices, records)
                except DriverKilled:
                    ended = "killed"
                except Hang as hang:
                    raise AssertionError(f"{hang}; so far {dict(world.said)}") from None
                except (RunError, OSError) as error:
                    ended = str(error)
                    enough = world.said["disk"] or world.said.total() > RESTARTS
                    assert enough, f"gives up after {dict(world.said)}: {error}"
                trouble += world.said
            if not ended:
                break
        else:
            raise AssertionError(f"no end after {drivers} drivers: {ended}")
        assert result.digest == reference.digest, "another state"
        assert untimed(result.checkpoint.records) == reference.records, "other records"
        told = untimed([records[number] for number in sorted(records)])
        assert told == reference.records, "the drivers were told other records"
        assert {name for name, times in done.items() if times > 1} == set(), "done twice"
        left = sorted(path.name for path in runs.rglob("*") if path.name.startswith("."))
        assert left == [] or trouble["disk"] or trouble["driver"], f"left: {left}"
        return trouble
    finally:
        shutil.rmtree(runs)


def _drive(experiment: Any, reference: Undisturbed, slices: Slices, records: Any) -> Any:
    """Run to the end, as a trial does; note the records, of which a driver tells each once."""
    workers = driver_module.Workers()
    driver = driver_module.RayDriver(experiment, reference.prepared, "attempt", workers, slices)
    told: list[int] = []
    report = driver.begin()
    while True:
        for record in report.records:
            records[record.round] = record
            told.append(record.round)
        if report.finished:
            break
        report = driver.step()
    assert told == sorted(set(told)), f"records told twice or out of order: {told}"
    return driver.final()
