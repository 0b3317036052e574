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
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.nodes import possible_nodes, working_nodes
from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.federation.on_ray.process import WorkerEnvironment
from trishul_ray.federation.prepare import prepare_dataset
from trishul_ray.files import scratch_folder
from trishul_ray.models.backbone import Backbone
from trishul_ray.pretrain.training import ensure_pretrained
from trishul_ray.storage import Store
from trishul_ray.sweeps.cells import TuneOptions, sampling_space
from trishul_ray.sweeps.grouping import Group, group_cells, inputs_of
from trishul_ray.sweeps.monitor import Monitor
from trishul_ray.sweeps.state import record_failure
from trishul_ray.sweeps.sweep_file import EarlyStopping, Search
from trishul_ray.sweeps.trial import ROUND, CellRun, CellTrial, FindRun
from trishul_ray.sweeps.watchdog import Watchdog
from trishul_ray.tracking.sweep_progress import SweepProgress

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


def run_cells(
    runs: Mapping[str, CellRun],
    options: TuneOptions,
    progress: SweepProgress,
    early_stopping: EarlyStopping | None = None,
    search: Search | None = None,
) -> dict[str, str]:
    """Run cells on the current Ray runtime; return why cells failed, by id.

    Those that early stopping ends have not failed.

    A cell that fails is tried again from its checkpoint; one that always fails is recorded in its
    folder, and the others go on. ``early_stopping`` compares by the metric of ``search``.

    Raises:
        InputError: The cluster cannot hold a cell, or no cell's data are available.
        RunError: Ray Tune failed.
    """
    experiments = {id: run.experiment for id, run in runs.items()}
    nodes = possible_nodes()
    groups = group_cells(experiments, nodes, options.concurrency)
    if search is None and early_stopping is not None:
        search = Search(on=early_stopping.on)
    for id, run in runs.items():
        progress.add(id, run.name, run.experiment.federation.rounds)
    failures = prepare_inputs(experiments, progress, search)
    for id, why in failures.items():
        record_failure(experiments[id], why, 1)
        progress.end(id, failure=why)
    for group in groups:
        left = [id for id in group.ids if id not in failures]
        monitor = Monitor(_Listed(runs), options, progress, search)
        before = -1
        # Tune counts the death of an actor between two cells twice, and gives up a cell too early;
        # after a preemption, too.
        while left and monitor.interruptions > before:
            before = monitor.interruptions
            scheduler = _scheduler(early_stopping, search, [experiments[id] for id in left])
            _fit(group, _Listed(runs), {"cell": tune.grid_search(left)}, scheduler, monitor)
            left = monitor.unfinished(left)
        failures |= monitor.failures
    return failures


def run_search(
    find: FindRun,
    experiment: Experiment,
    search: Search,
    options: TuneOptions,
    progress: SweepProgress,
    early_stopping: EarlyStopping | None = None,
) -> list[dict[str, Any]]:
    """Run samples that Optuna suggests, by the results of those before.

    Samples that were run before answer at once, so that a repeated search goes the same way.

    Args:
        find: Returns what to run for a sample.
        experiment: The run whose fields are sampled; it decides the resources of every sample.
        search: Space, number of samples, metric.
        options: How cells are run.
        progress: Where to show progress.
        early_stopping: How runs that lag behind are stopped.

    Returns:
        All samples: values by field name.

    Raises:
        InputError: The task has no such metric, or the cluster cannot hold a run.
        RunError: Ray Tune failed.
    """
    nodes = possible_nodes()
    names = [str(number) for number in range(search.samples)]
    (group,) = group_cells(dict.fromkeys(names, experiment), nodes, options.concurrency)
    prepare_inputs({experiment.id: experiment}, progress, search)
    monitor = Monitor(find, options, progress, search)
    scheduler = _scheduler(early_stopping, search, [experiment])
    _fit(group, find, sampling_space(search), scheduler, monitor, _optuna(search), search.samples)
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
    experiments: Mapping[str, Experiment], progress: SweepProgress, search: Search | None = None
) -> dict[str, str]:
    """Prepare the data and pretrain the backbones of all cells, each once.

    Returns:
        Why the data of cells are not available, or have no metric of the search, by id.

    Raises:
        InputError: It is so for all cells.
    """
    outcomes: dict[str, InputError | None] = {}
    failures: dict[str, InputError] = {}
    for id, experiment in experiments.items():
        task, storage = experiment.task.model_dump_json(), experiment.storage
        key = "\n".join((*inputs_of(experiment), task, f"{storage.cache} {storage.hub}"))
        if key not in outcomes:
            outcomes[key] = _prepare(experiment, progress, search)
        if (error := outcomes[key]) is not None:
            failures[id] = error
    if experiments and len(failures) == len(experiments):
        raise next(iter(failures.values()))
    return {id: str(error) for id, error in failures.items()}


def _prepare(
    experiment: Experiment, progress: SweepProgress, search: Search | None
) -> InputError | None:
    backbone = Backbone.of(experiment.model, experiment.storage.places)
    try:
        label = f"preparing {experiment.data.name}"
        _, task, _ = prepare_dataset(experiment, backbone, progress.task_progress(label))
        if search is not None and search.metric not in (None, *task.metrics.names):
            return InputError(
                f"search.metric={search.metric}: the task has {', '.join(task.metrics.names)}"
            )
        ensure_pretrained(backbone, progress.task_progress(f"preparing {backbone.name}"))
    except InputError as error:
        return error
    return None


@dataclass(frozen=True)
class _Listed:
    """Finds a run by its id."""

    runs: Mapping[str, CellRun]

    def __call__(self, config: Mapping[str, Any]) -> CellRun:
        return self.runs[config["cell"]]


def _fit(
    group: Group,
    find: FindRun,
    space: dict[str, Any],
    scheduler: TrialScheduler | None,
    monitor: Monitor,
    searcher: Searcher | None = None,
    samples: int = 1,
) -> None:
    """Run the trials of one Tuner.

    Raises:
        RunError: Ray Tune failed.
    """
    trainable = tune.with_resources(
        tune.with_parameters(CellTrial, find=find, environment=_worker_environment()),
        tune.PlacementGroupFactory([dict(bundle) for bundle in group.bundles]),
    )
    watchdog = Watchdog(60 * monitor.options.stall_minutes)
    monitor.watchdog = watchdog
    with _quiet_tune(), scratch_folder("tune") as folder:
        try:
            tune.Tuner(
                trainable,
                param_space=space,
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    scheduler=scheduler,
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
                    callbacks=[watchdog, monitor],
                ),
            ).fit()
        except (tune.TuneError, RuntimeError, ray.exceptions.RayError) as error:
            raise RunError(f"Ray Tune failed: {cause_of(error)}") from error
        finally:
            if monitor.staging is not None:
                shutil.rmtree(monitor.staging, ignore_errors=True)


def _scheduler(
    early_stopping: EarlyStopping | None, search: Search | None, experiments: Sequence[Experiment]
) -> TrialScheduler | None:
    if early_stopping is None:
        return None
    rounds = max(experiment.federation.rounds for experiment in experiments)
    assert search is not None
    return AsyncHyperBandScheduler(
        time_attr=ROUND,
        metric=search.compared,
        mode=search.mode,
        max_t=rounds,
        grace_period=min(early_stopping.grace, rounds),
        reduction_factor=early_stopping.reduction,
    )


def check_optuna(place: str) -> None:
    """Check that Optuna is installed, for a search at a place.

    Raises:
        InputError: It is not.
    """
    try:
        import optuna  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  # an extra
    except ImportError as error:
        raise InputError(
            f"{place}: search: kind optuna needs the package optuna: "
            "pip install '.[search]' in a clone of the repository, or pip install 'optuna>=5,<6'"
        ) from error


def _optuna(search: Search) -> Searcher:
    import optuna  # type: ignore[import-not-found,unused-ignore]
    from ray.tune.search.optuna import OptunaSearch

    class Suggestions(OptunaSearch):
        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
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
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
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
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
