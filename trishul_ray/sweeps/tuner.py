"""Run cells as Ray Tune trials: in parallel, each one again if it fails, with actors that stay.

Which cells are run is decided from the results in the store. Nothing that Tune saves is read back.
"""

import logging
import os
import shutil
import signal
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.nodes import (
    least_gpu_memory,
    possible_nodes,
    total_resources,
    working_nodes,
)
from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.federation.on_ray.process import WorkerEnvironment
from trishul_ray.federation.on_ray.slices import Slices, plan_slices, wanted_actors, with_actors
from trishul_ray.federation.prepare import prepare_dataset
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.pretraining import ensure_pretrained
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import CellRun, FindRun, Sweep, TuneOptions
from trishul_ray.sweeps.monitor import Monitor
from trishul_ray.sweeps.search import Search
from trishul_ray.sweeps.status import record_failure
from trishul_ray.sweeps.trial import CellTrial, TuneResult
from trishul_ray.tracking.progress import SweepProgress

#: Seconds in which nodes answer; those that have gone do not.
CHECK_SECONDS = 60.0

_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # whose lowest verbosity still prints
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths of an experiment are relative to our directory
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a round need not be evaluated
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # its state is never read
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_THRESHOLD_S": "1000000",
}


@dataclass(frozen=True)
class Group:
    """Cells that request the same resources."""

    ids: tuple[str, ...]
    bundles: tuple[Mapping[str, float], ...]
    concurrent: int
    note: str = ""  # on their share of a GPU


def group_cells(
    experiments: Mapping[str, Experiment],
    nodes: Sequence[Mapping[str, float]],
    concurrency: int | None = None,
) -> list[Group]:
    """Group cells by the resources they request, in an order in which neighbors share most.

    Where the number of actors is ``auto``, a cell has one actor if there are more cells than slices
    of the cluster, and otherwise its share of them. GPUs are shared as for the clients of all cells
    that run at once. ``nodes`` are the resources of each node, such
    as ``{"CPU": 4.0}``; ``concurrency`` is by default what they hold.

    Raises:
        InputError: A cell requests more than the nodes hold; the message names the field.
    """
    gpu_bytes = least_gpu_memory(nodes)
    most = min(len(experiments), concurrency or len(experiments))

    def slices_of(experiment: Experiment, actors: int) -> Slices:
        demand = most * wanted_actors(experiment)
        return _slices(experiment, nodes, actors, gpu_bytes, demand)

    slices = {id: slices_of(experiment, 1) for id, experiment in experiments.items()}
    grouped: dict[tuple[Slices, bool], list[str]] = {}
    for id, experiment in experiments.items():
        one = slices[id]
        if _divides_cluster(experiment):
            alike = sum(
                slices[other] == one and _divides_cluster(experiments[other]) for other in slices
            )
            share = sum(map(one.count_in, nodes)) // min(alike, concurrency or alike)
            actors = max(1, min(share, experiment.federation.clients_per_round))
            one = slices_of(experiment, actors)
        grouped.setdefault((one, experiment.resources.backend == "inline"), []).append(id)
    groups = []
    for (held, inline), ids in grouped.items():
        # An inline run computes in the trial's own process, the first bundle.
        bundles = tuple(held.bundles()) if inline else ({}, *held.bundles())
        at_once = sum(map(held.count_in, nodes)) // held.actors
        cells = _by_inputs(ids, experiments)
        groups.append(Group(cells, bundles, concurrency or at_once, held.note))
    return groups


def _divides_cluster(experiment: Experiment) -> bool:
    """Return whether the number of actors depends on what the cluster holds."""
    both = experiment.resources.actors, experiment.federation.clients_per_actor
    return both == ("auto", "auto") and experiment.resources.backend == "ray"


def _slices(
    experiment: Experiment,
    nodes: Sequence[Mapping[str, float]],
    actors: int,
    gpu_bytes: float | None,
    demand: int,
) -> Slices:
    """Return what a cell requests, with ``actors`` actors where it leaves the number open."""
    total = total_resources(nodes)
    if experiment.resources.backend == "inline" or _divides_cluster(experiment):
        experiment = with_actors(experiment, actors)
    slices = plan_slices(experiment, total, gpu_bytes=gpu_bytes, demand=demand)
    if sum(map(slices.count_in, nodes)) < slices.actors:
        raise InputError(
            f"resources: {slices} do not fit on the nodes of the cluster; lower resources.actors, "
            "resources.cpus_per_actor or resources.gpus_per_actor"
        )
    return slices


def _by_inputs(ids: Sequence[str], experiments: Mapping[str, Experiment]) -> tuple[str, ...]:
    """Return ids so that cells with the same backbone and data follow each other."""
    order: dict[tuple[str, str], int] = {}
    for id in ids:
        order.setdefault(_inputs_of(experiments[id]), len(order))
    return tuple(sorted(ids, key=lambda id: order[_inputs_of(experiments[id])]))


def _inputs_of(experiment: Experiment) -> tuple[str, str]:
    """Return what decides the backbone and the data that a trial keeps loaded."""
    return experiment.model.model_dump_json(), experiment.data.model_dump_json()


def run_cells(
    runs: Mapping[str, CellRun],
    options: TuneOptions,
    progress: SweepProgress,
) -> None:
    """Run cells on the current Ray runtime.

    A cell that fails is tried again from its checkpoint; one that always fails is recorded in its
    folder, and the others go on.

    Raises:
        InputError: The cluster cannot hold a cell, or no cell's data are available.
        RunError: Ray Tune failed.
    """
    experiments = {id: run.experiment for id, run in runs.items()}
    nodes = possible_nodes()
    groups = group_cells(experiments, nodes, options.concurrency)
    for note in sorted({group.note for group in groups if group.note}):
        progress.note(note)
    for id, run in runs.items():
        progress.add(id, run.name, run.experiment.federation.rounds)
    failures = prepare_inputs(experiments, progress)
    for id, why in failures.items():
        record_failure(experiments[id], why, 1)
        progress.end(id, failure=why)

    def find(config: Mapping[str, Any]) -> CellRun:
        return runs[config["cell"]]

    for group in groups:
        left = [id for id in group.ids if id not in failures]
        monitor = Monitor(find, options, progress, None)
        before = -1
        # Tune counts the death of an actor between two cells twice, and gives up a cell too early;
        # after a preemption, too.
        while left and monitor.interruptions > before:
            before = monitor.interruptions
            _fit(group, find, {"cell": tune.grid_search(left)}, monitor)
            left = monitor.unfinished(left)


def run_search(
    find: FindRun,
    experiment: Experiment,
    sweep: Sweep,
    options: TuneOptions,
    progress: SweepProgress,
) -> list[dict[str, Any]]:
    """Run samples that Optuna suggests, by the results of those before; return all of them.

    Samples that were run before answer at once, so that a repeated search goes the same way.
    ``experiment``, whose fields are sampled, decides the resources of every sample.

    Raises:
        InputError: The task has no such metric, or the cluster cannot hold a run.
        RunError: Ray Tune failed.
    """
    search = sweep.search
    assert search is not None
    nodes = possible_nodes()
    names = [str(number) for number in range(search.samples)]
    (group,) = group_cells(dict.fromkeys(names, experiment), nodes, options.concurrency)
    if group.note:
        progress.note(group.note)
    prepare_inputs({experiment.id: experiment}, progress, sweep)
    monitor = Monitor(find, options, progress, search)
    _fit(group, find, search.domains(), monitor, _optuna(search), search.samples)
    return monitor.samples


def check_stores(places: Iterable[str]) -> None:
    """Check that every node of the cluster sees the folders where runs are stored.

    Raises:
        InputError: One does not.
    """
    nodes = list(working_nodes())
    for store in (Store.open(place) for place in places):
        if len(nodes) == 1 or not store.is_local:
            continue
        marker = f".seen-{uuid.uuid4().hex}"
        store.write(marker, b"")
        try:
            there = [
                _exists.options(scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False))
                .remote(f"{store.root}/{marker}")
                for id in nodes
            ]  # fmt: skip
            answered, _ = ray.wait(there, num_returns=len(there), timeout=CHECK_SECONDS)
            seen = [_answer(each) for each in answered]
        finally:
            store.remove(marker)
        if not all(seen):
            raise InputError(
                f"storage.runs={store.uri!r} is not seen by {seen.count(False)} of {len(nodes)} "
                "nodes of the cluster; use a folder that all of them share, or s3://..."
            )


@ray.remote(num_cpus=0)
def _exists(path: str) -> bool:
    return os.path.exists(path)


def _answer(exists: "ray.ObjectRef[bool]") -> bool:
    try:
        return ray.get(exists)
    except RayError:  # the node is gone: nothing will run on it
        return True


def prepare_inputs(
    experiments: Mapping[str, Experiment], progress: SweepProgress, sweep: Sweep | None = None
) -> dict[str, str]:
    """Prepare the data and pretrain the backbones of all cells, each once.

    Return why data are not available, or have no metric of the search, by cell.

    Raises:
        InputError: It is so for all cells.
    """
    outcomes: dict[str, InputError | None] = {}
    failures: dict[str, InputError] = {}
    for id, experiment in experiments.items():
        task, storage = experiment.task.model_dump_json(), experiment.storage
        key = "\n".join((*_inputs_of(experiment), task, f"{storage.cache} {storage.hub}"))
        if key not in outcomes:
            outcomes[key] = _prepare(experiment, progress, sweep)
        if (error := outcomes[key]) is not None:
            failures[id] = error
    if experiments and len(failures) == len(experiments):
        raise next(iter(failures.values()))
    return {id: str(error) for id, error in failures.items()}


def _prepare(
    experiment: Experiment, progress: SweepProgress, sweep: Sweep | None
) -> InputError | None:
    backbone = Backbone.of(experiment.model, experiment.storage.places)
    try:
        label = f"preparing {experiment.data.name}"
        _, task, _ = prepare_dataset(experiment, backbone, progress.task_progress(label))
        search = sweep.search if sweep else None
        if sweep and search and search.metric not in (None, *task.metrics.names):
            return InputError(
                f"{sweep.file or sweep.name}: search -> metric: {search.metric}: the task has "
                f"{', '.join(task.metrics.names)}"
            )
        ensure_pretrained(backbone, progress.task_progress(f"preparing {backbone.name}"))
    except InputError as error:
        return error
    return None


def _fit(
    group: Group,
    find: FindRun,
    space: dict[str, Any],
    monitor: Monitor,
    searcher: Searcher | None = None,
    samples: int = 1,
) -> None:
    """Run the trials of one Tuner.

    Raises:
        RunError: Ray Tune failed.
    """
    trainable = tune.with_resources(
        tune.with_parameters(
            CellTrial,
            find=find,
            environment=_worker_environment(),
            stall_seconds=60 * monitor.options.stall_minutes,
        ),
        tune.PlacementGroupFactory([dict(bundle) for bundle in group.bundles]),
    )
    with _quiet_tune(), scratch_folder("tune") as folder:
        try:
            tune.Tuner(
                trainable,
                param_space=space,
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    num_samples=samples,
                    max_concurrent_trials=group.concurrent,
                    reuse_actors=True,
                    trial_dirname_creator=lambda trial: str(trial.trial_id),
                ),
                run_config=tune.RunConfig(
                    name="cells",
                    storage_path=folder,
                    verbose=0,
                    # The one for notebooks would clear the output of the cell.
                    progress_reporter=tune.CLIReporter(),
                    failure_config=tune.FailureConfig(max_failures=monitor.options.retries),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    callbacks=[monitor],
                ),
            ).fit()
        except (tune.TuneError, RuntimeError, ray.exceptions.RayError) as error:
            raise RunError(f"Ray Tune failed: {cause_of(error)}") from error
        finally:
            if monitor.staging is not None:
                shutil.rmtree(monitor.staging, ignore_errors=True)


def _optuna(search: Search) -> Searcher:
    import optuna  # type: ignore[import-not-found,unused-ignore]
    from ray.tune.search.optuna import OptunaSearch

    class Suggestions(OptunaSearch):
        def on_trial_result(self, trial_id: str, result: TuneResult) -> None:
            if self.metric in result:  # otherwise no round has been evaluated yet
                super().on_trial_result(trial_id, result)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return Suggestions(metric=search.compared, mode=search.mode, seed=search.seed)


def _worker_environment() -> WorkerEnvironment:
    """Return what a trial needs of this process, which may be on another node."""
    environment = WorkerEnvironment.of_this_process()
    tracking = {k: v for k, v in os.environ.items() if k.startswith("MLFLOW_")}
    return WorkerEnvironment(environment.directory, {**tracking, **environment.variables})


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Set Ray Tune up to print nothing, to keep no files, and to leave signals alone."""
    before = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    loggers = [logging.getLogger(f"ray.{part}") for part in ("tune", "air", "train")]
    levels = [logger.level for logger in loggers]
    handler = signal.getsignal(signal.SIGUSR1)
    os.environ.update(_ENVIRONMENT)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        with suppress(ValueError):  # Tune sets its handler in the main thread only
            signal.signal(signal.SIGUSR1, handler)
        for name in _ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(before)
