"""Run cells as Ray Tune trials, in parallel, with retries and reused actors.

The results in the store determine which cells run. Files written by Tune are never loaded.
"""

import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune.search import Searcher

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
from trishul_ray.sweeps.cells import CellRun, FindRun, TuneOptions
from trishul_ray.sweeps.monitor import Monitor
from trishul_ray.sweeps.search import Search
from trishul_ray.sweeps.trial import CellTrial, TuneResult
from trishul_ray.tracking.progress import SweepProgress

#: Maximum number of running or pending trials on an autoscaling cluster.
MAX_WAITING = 100

_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints even at its lowest verbosity
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths in experiments are relative to the current folder
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the command handles Ctrl-C
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a round may have no scores
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # the state of Tune is never loaded
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
    """Compute the slices and placement group bundles of an experiment's trial.

    Args:
        experiment: The experiment to run.
        nodes: Resources of each node, such as ``{"CPU": 8, "GPU": 1}``.
        runs: Number of runs that share the nodes. If the number of actors is ``auto``, a run gets
            its share of the slices that fit on the nodes.
        may_grow: Whether an autoscaler may add nodes, so that a request may wait until it fits.

    Raises:
        InputError: The request exceeds the nodes. The message names the field.
    """
    total = {kind: sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
    inline = experiment.resources.backend == "inline"
    actors = experiment.resources.actors, experiment.federation.clients_per_actor
    shares = not inline and actors == ("auto", "auto")
    one = with_actors(experiment, 1) if inline or shares else experiment
    slices = plan_slices(one, total, may_grow=may_grow)
    fitting = sum(map(slices.count_in, nodes))
    if shares:
        share = min(fitting // runs, experiment.federation.clients_per_round)
        slices = replace(slices, actors=max(1, share))
    if fitting < slices.actors and not may_grow:
        raise InputError(
            f"resources: {slices} exceed the nodes of the cluster; lower resources.actors, "
            "resources.cpus_per_actor or resources.gpus_per_actor"
        )
    # An inline run computes in the process of the trial, which uses the first bundle.
    return slices, tuple(slices.bundles()) if inline else ({}, *slices.bundles())


def run_cells(
    runs: Mapping[str, CellRun], options: TuneOptions, progress: SweepProgress
) -> dict[str, str]:
    """Run cells on the current Ray cluster.

    A failed cell is retried from its checkpoint, while the other cells continue.

    Returns:
        The reasons of failures, keyed by id.

    Raises:
        InputError: A cell does not fit on the cluster, or the data of all cells are missing.
        RunError: Ray Tune failed.
    """
    for id, run in runs.items():
        progress.add(id, run.name, run.experiment.federation.rounds)
    # Sort by backbone and data, so that actors can reuse loaded inputs.
    order = sorted(runs, key=lambda id: _inputs_of(runs[id].experiment))
    monitor = Monitor(lambda config: runs[config["cell"]], options, progress)
    experiments = [run.experiment for run in runs.values()]
    _fit(monitor, experiments, len(runs), {"cell": tune.grid_search(order)})
    return monitor.failures


def run_search(
    find: FindRun,
    experiment: Experiment,
    search: Search,
    options: TuneOptions,
    progress: SweepProgress,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run samples that Optuna suggests, based on the results of earlier samples.

    Samples with a stored result end immediately, so a repeated search suggests the same samples.

    Returns:
        The values of all samples, and the reasons of failures, keyed by id.

    Raises:
        InputError: A run does not fit on the cluster, or the data are not available.
        RunError: Ray Tune failed.
    """
    progress.expect(search.samples)
    monitor = Monitor(find, options, progress)
    _fit(monitor, [experiment], search.samples, search.domains(), _optuna(search))
    return monitor.samples, monitor.failures


def _inputs_of(experiment: Experiment) -> tuple[str, str]:
    return experiment.model.model_dump_json(), experiment.data.model_dump_json()


def prepare_inputs(experiments: Sequence[Experiment], progress: SweepProgress) -> None:
    """Prepare each distinct dataset, and pretrain each distinct built-in backbone.

    If data are missing for only some experiments, these fail later in their trials.

    Raises:
        InputError: The data of all experiments are missing.
    """
    distinct = {
        (*_inputs_of(each), each.task.model_dump_json(), each.storage.cache, each.storage.hub): each
        for each in experiments
    }
    errors = []
    for experiment in distinct.values():
        backbone = backbone_of(experiment.model, experiment.storage.paths)
        try:
            label = f"preparing {experiment.data.name}"
            prepare_dataset(experiment, progress.task_progress(label))
            ensure_pretrained(backbone, progress.task_progress(f"preparing {backbone.name}"))
        except InputError as error:
            errors.append(error)
    if len(errors) == len(distinct):
        raise errors[0]


def _fit(
    monitor: Monitor,
    experiments: Sequence[Experiment],
    trials: int,
    space: dict[str, Any],
    searcher: Searcher | None = None,
) -> None:
    """Run the trials of a grid, or with a searcher, this number of samples of one experiment.

    Raises:
        InputError: An experiment does not fit on the cluster, or no data are available.
        RunError: Ray Tune failed.
    """
    options, find, grows = monitor.options, monitor.find, joins_cluster()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    at_once = min(trials, options.concurrency or trials)

    def requested(experiment: Experiment) -> tuple[Slices, tuple[Mapping[str, float], ...]]:
        return request(experiment, nodes, at_once, may_grow=grows)

    slices = [requested(experiment)[0] for experiment in experiments]
    fitting = max(sum(map(each.count_in, nodes)) // each.actors for each in slices)
    # Pending trials make an autoscaler add nodes.
    concurrent = options.concurrency or (MAX_WAITING if grows else max(1, fitting))
    if not fitting:
        monitor.progress.note(
            "no node is large enough for a run yet; waiting for nodes (see `ray status`)"
        )
    stores = {experiment.storage.runs for experiment in experiments}
    if len(nodes) > 1 and any(Store.open(runs).is_local for runs in stores):
        monitor.progress.note("storage.runs must be a folder shared by all nodes, or a bucket")
    prepare_inputs(experiments, monitor.progress)
    environment = WorkerEnvironment.of_this_process()
    mlflow = {k: v for k, v in os.environ.items() if k.startswith("MLFLOW_")}
    environment = replace(environment, variables={**mlflow, **environment.variables})
    trainable = tune.with_resources(
        tune.with_parameters(
            CellTrial,
            find=find,
            environment=environment,
            stall_seconds=60 * options.stall_minutes,
        ),
        lambda config: tune.PlacementGroupFactory(
            [dict(bundle) for bundle in requested(find(config).experiment)[1]]
        ),
    )
    with _quiet_tune(), scratch_folder("tune") as folder:
        try:
            tune.Tuner(
                trainable,
                param_space=space,
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    num_samples=trials if searcher else 1,
                    max_concurrent_trials=concurrent,
                    reuse_actors=True,
                    trial_dirname_creator=lambda trial: str(trial.trial_id),
                ),
                run_config=tune.RunConfig(
                    name="cells",
                    storage_path=folder,
                    verbose=0,
                    # The reporter for notebooks would clear the output of the notebook cell.
                    progress_reporter=tune.CLIReporter(),
                    failure_config=tune.FailureConfig(max_failures=options.retries),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    callbacks=[monitor],
                ),
            ).fit()
        except (tune.TuneError, RuntimeError, RayError) as error:
            raise RunError(f"Ray Tune failed: {cause_of(error)}") from error


def _optuna(search: Search) -> Searcher:
    import optuna  # type: ignore[import-not-found,unused-ignore]
    from ray.tune.search.optuna import OptunaSearch

    class Suggestions(OptunaSearch):
        def on_trial_result(self, trial_id: str, result: TuneResult) -> None:
            if self.metric in result:  # missing until a round has been scored
                super().on_trial_result(trial_id, result)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return Suggestions(metric=search.compared, mode=search.mode, seed=search.seed)


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Silence Ray Tune, avoid its extra files, and restore signal handlers afterwards."""
    loggers = [logging.getLogger(f"ray.{part}") for part in ("tune", "air", "train")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        with patch.dict(os.environ, _ENVIRONMENT):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        with suppress(ValueError):  # Tune sets its handler only in the main thread
            signal.signal(signal.SIGUSR1, handler)
