"""Run cells as Ray Tune trials: in parallel, with retries, and with actors that stay.

The results in the store decide which cells run. Nothing that Tune saves is read back.
"""

import logging
import os
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.federation.on_ray.process import WorkerEnvironment
from trishul_ray.federation.on_ray.session import joins_cluster
from trishul_ray.federation.on_ray.slices import Slices, plan_slices, with_actors
from trishul_ray.federation.prepare import prepare_dataset
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.models.pretraining import ensure_pretrained
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import Cell, CellRun, FindRun, Sweep, TuneOptions
from trishul_ray.sweeps.monitor import Monitor
from trishul_ray.sweeps.search import Search
from trishul_ray.sweeps.trial import CellTrial, TuneResult
from trishul_ray.tracking.progress import SweepProgress

#: Seconds in which nodes must answer.
CHECK_SECONDS = 60.0
#: Most trials that run or wait on a cluster that may grow.
MAX_WAITING = 100

_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the lowest verbosity of the new output still prints
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths of an experiment are relative to our directory
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a round may have no scores
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # its state is never read
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_THRESHOLD_S": "1000000",
}


def request(
    experiment: Experiment,
    nodes: Sequence[Mapping[str, float]],
    runs: int,
    *,
    may_grow: bool = False,
) -> tuple[Slices, tuple[Mapping[str, float], ...]]:
    """Return the slices and the bundles of an experiment's trial when this many runs share nodes.

    If the number of actors is ``auto``, a run gets its share of the slices that fit on the nodes.
    With ``may_grow``, an autoscaler may add nodes: a request that does not fit yet waits.

    Raises:
        InputError: The nodes cannot hold it; the message names the field.
    """
    total = {kind: sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
    inline = experiment.resources.backend == "inline"
    both = experiment.resources.actors, experiment.federation.clients_per_actor
    one = with_actors(experiment, 1) if inline or both == ("auto", "auto") else experiment
    slices = plan_slices(one, total, may_grow=may_grow)
    fitting = sum(map(slices.count_in, nodes))
    if both == ("auto", "auto") and not inline:
        share = min(fitting // runs, experiment.federation.clients_per_round)
        slices = replace(slices, actors=max(1, share))
    if fitting < slices.actors and not may_grow:
        raise InputError(
            f"resources: {slices} do not fit on the nodes of the cluster; lower resources.actors, "
            "resources.cpus_per_actor or resources.gpus_per_actor"
        )
    # An inline run computes in the trial's own process, which has the first bundle.
    return slices, tuple(slices.bundles()) if inline else ({}, *slices.bundles())


def run_cells(runs: Mapping[str, CellRun], options: TuneOptions, progress: SweepProgress) -> None:
    """Run cells on the current Ray runtime.

    A cell that fails is retried from its checkpoint; the reason of a final failure is stored in its
    folder, and the other cells go on.

    Raises:
        InputError: The cluster cannot hold a cell, or no cell's data are available.
        RunError: Ray Tune failed.
    """
    experiments = {id: run.experiment for id, run in runs.items()}
    at_once = min(len(runs), options.concurrency or len(runs))
    nodes = _nodes()
    grows = joins_cluster()
    requests = {
        id: request(each, nodes, at_once, may_grow=grows) for id, each in experiments.items()
    }
    prepare_inputs(runs, progress)
    for id, run in runs.items():
        progress.add(id, run.name, run.experiment.federation.rounds)
    # Cells with the same backbone and data follow each other: actors keep what they have loaded.
    order: dict[tuple[str, str], list[str]] = {}
    for id in runs:
        order.setdefault(_inputs_of(experiments[id]), []).append(id)
    _fit(
        lambda config: runs[config["cell"]],
        lambda config: requests[config["cell"]][1],
        {"cell": tune.grid_search([id for ids in order.values() for id in ids])},
        options.concurrency or max(_fitting(slices, nodes) for slices, _ in requests.values()),
        options,
        progress,
    )


def run_search(
    find: FindRun, cell: Cell, sweep: Sweep, options: TuneOptions, progress: SweepProgress
) -> list[dict[str, Any]]:
    """Run samples of a cell that Optuna suggests from earlier samples; return all of them.

    Samples with a result answer at once, so that a repeated search takes the same path.

    Raises:
        InputError: The task has no such metric, or the cluster cannot hold a run.
        RunError: Ray Tune failed.
    """
    search, experiment = sweep.search, cell.experiment
    assert search is not None
    nodes = _nodes()
    progress.expect(search.samples)
    at_once = min(search.samples, options.concurrency or search.samples)
    slices, bundles = request(experiment, nodes, at_once, may_grow=joins_cluster())
    run = CellRun(experiment, sweep.cell_name(cell), metric=search.metric)
    prepare_inputs({experiment.id: run}, progress)
    return _fit(
        find,
        lambda config: bundles,
        search.domains(),
        options.concurrency or _fitting(slices, nodes),
        options,
        progress,
        _optuna(search),
        search.samples,
    )


def _nodes() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _fitting(slices: Slices, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return the number of trials with these slices that may run or wait at the same time."""
    if joins_cluster():  # trials that wait make an autoscaler add nodes
        return MAX_WAITING
    return max(1, sum(map(slices.count_in, nodes)) // slices.actors)


def check_stores(places: Iterable[str]) -> None:
    """Check that every node of the cluster sees the folders of runs.

    Raises:
        InputError: A node does not see one.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    for store in (Store.open(place) for place in places):
        if len(nodes) == 1 or not store.is_local:
            continue
        marker = f".seen-{uuid.uuid4().hex}"
        store.write(marker, b"")
        there = [NodeAffinitySchedulingStrategy(id, soft=False) for id in nodes]
        seen = [
            _exists.options(scheduling_strategy=each).remote(f"{store.root}/{marker}")
            for each in there
        ]
        missing = 0
        for answer in seen:
            with suppress(RayError):  # the node is gone, and nothing will run on it
                missing += not ray.get(answer, timeout=CHECK_SECONDS)
        store.remove(marker)
        if missing:
            raise InputError(
                f"storage.runs={store.uri!r} is not seen by {missing} of {len(nodes)} nodes of the "
                "cluster; use a folder that all of them share, or s3://..."
            )


@ray.remote(num_cpus=0)
def _exists(path: str) -> bool:
    return os.path.exists(path)


def _inputs_of(experiment: Experiment) -> tuple[str, str]:
    return experiment.model.model_dump_json(), experiment.data.model_dump_json()


def prepare_inputs(runs: Mapping[str, CellRun], progress: SweepProgress) -> None:
    """Prepare the data and pretrain the backbones of all runs, each once.

    A run whose data are not available fails in its trial, with the reason.

    Raises:
        InputError: No run's data are available, or they lack the metric of its search.
    """
    errors: dict[str, InputError | None] = {}
    for run in runs.values():
        task, storage = run.experiment.task.model_dump_json(), run.experiment.storage
        places = f"{storage.cache} {storage.hub} {run.metric}"
        key = "\n".join((*_inputs_of(run.experiment), task, places))
        if key not in errors:
            errors[key] = _error_of(run, progress)
    found = [error for error in errors.values() if error is not None]
    if found and len(found) == len(errors):
        raise found[0]


def _error_of(run: CellRun, progress: SweepProgress) -> InputError | None:
    experiment = run.experiment
    backbone = backbone_of(experiment.model, experiment.storage.places)
    try:
        label = f"preparing {experiment.data.name}"
        _, task, _ = prepare_dataset(experiment, progress.task_progress(label))
        if run.metric not in (None, *task.metrics.names):
            known = ", ".join(task.metrics.names)
            return InputError(f"search -> metric: {run.metric}: the task has {known}")
        ensure_pretrained(backbone, progress.task_progress(f"preparing {backbone.name}"))
    except InputError as error:
        return error
    return None


def _fit(
    find: FindRun,
    bundles: Callable[[Mapping[str, Any]], Sequence[Mapping[str, float]]],
    space: dict[str, Any],
    concurrent: int,
    options: TuneOptions,
    progress: SweepProgress,
    searcher: Searcher | None = None,
    samples: int = 1,
) -> list[dict[str, Any]]:
    """Run the trials of a Tuner, and return their configurations.

    Raises:
        RunError: Ray Tune failed.
    """
    monitor = Monitor(find, options, progress)
    environment = WorkerEnvironment.of_this_process()
    tracking = {k: v for k, v in os.environ.items() if k.startswith("MLFLOW_")}
    environment = replace(environment, variables={**tracking, **environment.variables})
    parameters = {"find": find, "environment": environment}
    trainable = tune.with_resources(
        tune.with_parameters(CellTrial, stall_seconds=60 * options.stall_minutes, **parameters),
        lambda config: tune.PlacementGroupFactory([dict(each) for each in bundles(config)]),
    )
    with _quiet_tune(), scratch_folder("tune") as folder:
        try:
            tune.Tuner(
                trainable,
                param_space=space,
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    num_samples=samples,
                    max_concurrent_trials=concurrent,
                    reuse_actors=True,
                    trial_dirname_creator=lambda trial: str(trial.trial_id),
                ),
                run_config=tune.RunConfig(
                    name="cells",
                    storage_path=folder,
                    verbose=0,
                    # The reporter for notebooks would clear the output of the cell.
                    progress_reporter=tune.CLIReporter(),
                    failure_config=tune.FailureConfig(max_failures=options.retries),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    callbacks=[monitor],
                ),
            ).fit()
        except (tune.TuneError, RuntimeError, RayError) as error:
            raise RunError(f"Ray Tune failed: {cause_of(error)}") from error
    return monitor.samples


def _optuna(search: Search) -> Searcher:
    import optuna  # type: ignore[import-not-found,unused-ignore]
    from ray.tune.search.optuna import OptunaSearch

    class Suggestions(OptunaSearch):
        def on_trial_result(self, trial_id: str, result: TuneResult) -> None:
            if self.metric in result:  # otherwise no round has been scored yet
                super().on_trial_result(trial_id, result)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return Suggestions(metric=search.compared, mode=search.mode, seed=search.seed)


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Set Ray Tune up to print nothing, to keep no files, and to set no handlers of signals."""
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
