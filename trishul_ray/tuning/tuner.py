"""Run cells as Ray Tune trials: in parallel, each one again if it fails, with actors that stay.

Which cells are run is decided from the results in the store. Nothing that Tune saves is read back.
"""

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler
from ray.tune.search import Searcher

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.actors import WorkerEnvironment
from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.federation.on_ray.slices import Slices, plan_slices
from trishul_ray.federation.prepare import prepare_dataset
from trishul_ray.models.backbone import Backbone
from trishul_ray.pretrain.training import ensure_pretrained
from trishul_ray.tracking.progress import HEADLINES
from trishul_ray.tracking.sweep_progress import SweepProgress
from trishul_ray.tuning.samples import sampling_space
from trishul_ray.tuning.search import EarlyStopping, Search
from trishul_ray.tuning.state import record_failure
from trishul_ray.tuning.trial import (
    FAILURE,
    FINISHED,
    HEADLINE,
    NOTES,
    ROUND,
    CellRun,
    CellTrial,
    FindRun,
)
from trishul_ray.tuning.watchdog import Watchdog

#: Why a cell ended that early stopping ended: the beginning of its reason.
STOPPED_EARLY = "stopped early"

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
class TuneOptions:
    """How cells are run.

    Attributes:
        retries: How often a cell that failed is tried again.
        stall_minutes: Minutes without a finished round after which a cell is ended and tried again.
        concurrency: Number of cells at a time; None is what the cluster holds. Cells beyond that
            wait for nodes that an autoscaler adds.
    """

    retries: int = 2
    stall_minutes: float = 30.0
    concurrency: int | None = None


@dataclass(frozen=True)
class Group:
    """Cells that request the same resources."""

    ids: tuple[str, ...]
    bundles: tuple[Mapping[str, float], ...]
    concurrent: int


def run_cells(
    runs: Mapping[str, CellRun],
    options: TuneOptions,
    progress: SweepProgress,
    early_stopping: EarlyStopping | None = None,
    search: Search | None = None,
) -> dict[str, str]:
    """Run cells on the current Ray runtime; return why cells failed, by id.

    A cell that fails is tried again from its checkpoint; one that always fails is recorded in its
    folder, and the others go on. ``early_stopping`` compares by the metric of ``search``.

    Raises:
        InputError: The cluster cannot hold a cell, or no cell's data are available.
        RunError: Ray Tune failed.
    """
    experiments = {id: run.experiment for id, run in runs.items()}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    groups = group_cells(experiments, nodes, options.concurrency)
    for id, run in runs.items():
        progress.add(id, run.name, run.experiment.federation.rounds)
    failures = prepare_inputs(experiments, progress)
    for id, why in failures.items():
        record_failure(experiments[id], why, 1)
        progress.end(id, failure=why)
    for group in groups:
        left = [id for id in group.ids if id not in failures]
        monitor = _Monitor(_Listed(runs), options, progress, search)
        while left:
            _fit(
                group,
                _Listed({id: runs[id] for id in left}),
                {"cell": tune.grid_search(left)},
                _scheduler(early_stopping, search, [experiments[id] for id in left]),
                monitor,
            )
            # Tune counts the death of an actor between two cells twice: try such a cell again.
            left = monitor.take_unfinished(left)
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
        InputError: Optuna is not installed, or the cluster cannot hold a run.
        RunError: Ray Tune failed.
    """
    searcher = _optuna(search)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    names = [str(number) for number in range(search.samples)]
    (group,) = group_cells(dict.fromkeys(names, experiment), nodes, options.concurrency)
    prepare_inputs({experiment.id: experiment}, progress)
    monitor = _Monitor(find, options, progress, search)
    scheduler = _scheduler(early_stopping, search, [experiment])
    _fit(group, find, sampling_space(search), scheduler, monitor, searcher, search.samples)
    return monitor.samples


def group_cells(
    experiments: Mapping[str, Experiment],
    nodes: Sequence[Mapping[str, float]],
    concurrency: int | None = None,
) -> list[Group]:
    """Group cells by the resources they request, in an order in which neighbors share most.

    Where the number of actors is ``auto``, a cell has one actor if there are more cells than
    slices of the cluster, and otherwise its share of them.

    Args:
        experiments: The cells, by id.
        nodes: Resources of each node, such as ``{"CPU": 4.0}``.
        concurrency: Number of cells at a time; None is what the nodes hold.

    Raises:
        InputError: A cell requests more than the nodes hold; the message names the field.
    """
    slices = {id: _slices(experiment, nodes, 1) for id, experiment in experiments.items()}
    grouped: dict[tuple[Slices, bool], list[str]] = {}
    for id, experiment in experiments.items():
        one = slices[id]
        if _divides_cluster(experiment):
            alike = sum(
                slices[other] == one and _divides_cluster(experiments[other]) for other in slices
            )
            share = _count_slots(one, nodes) // min(alike, concurrency or alike)
            actors = max(1, min(share, experiment.federation.clients_per_round))
            one = _slices(experiment, nodes, actors)
        grouped.setdefault((one, experiment.resources.backend == "inline"), []).append(id)
    groups = []
    for (held, inline), ids in grouped.items():
        # An inline run computes in the trial's own process, the first bundle.
        bundles = tuple(held.bundles()) if inline else ({}, *held.bundles())
        at_once = _count_slots(held, nodes) // held.actors
        groups.append(Group(_by_inputs(ids, experiments), bundles, concurrency or at_once))
    return groups


def _divides_cluster(experiment: Experiment) -> bool:
    """Return whether the number of actors depends on what the cluster holds."""
    both = experiment.resources.actors, experiment.federation.clients_per_actor
    return both == ("auto", "auto") and experiment.resources.backend == "ray"


def _slices(experiment: Experiment, nodes: Sequence[Mapping[str, float]], actors: int) -> Slices:
    """Return what a cell requests, with ``actors`` actors where it leaves the number open."""
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    if experiment.resources.backend == "inline" or _divides_cluster(experiment):
        resources = experiment.resources.model_copy(update={"actors": actors})
        federation = experiment.federation.model_copy(update={"clients_per_actor": "auto"})
        experiment = experiment.model_copy(
            update={"resources": resources, "federation": federation}
        )
    slices = plan_slices(experiment, total)
    if _count_slots(slices, nodes) < slices.actors:
        raise InputError(
            f"resources: {slices} do not fit on the nodes of the cluster; lower resources.actors, "
            "resources.cpus_per_actor or resources.gpus_per_actor"
        )
    return slices


def _count_slots(slices: Slices, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many slices of this size the nodes hold together."""
    count = 0
    for node in nodes:
        fits = int(node.get("CPU", 0.0) / slices.cpus + 1e-9)
        if slices.gpus:
            fits = min(fits, int(node.get("GPU", 0.0) / slices.gpus + 1e-9))
        count += fits
    return count


def _by_inputs(ids: Sequence[str], experiments: Mapping[str, Experiment]) -> tuple[str, ...]:
    """Return ids so that cells with the same backbone and data follow each other."""
    order: dict[tuple[str, str], int] = {}
    for id in ids:
        order.setdefault(_inputs(experiments[id]), len(order))
    return tuple(sorted(ids, key=lambda id: order[_inputs(experiments[id])]))


def _inputs(experiment: Experiment) -> tuple[str, str]:
    return experiment.model.model_dump_json(), experiment.data.model_dump_json()


def prepare_inputs(
    experiments: Mapping[str, Experiment], progress: SweepProgress
) -> dict[str, str]:
    """Prepare the data and pretrain the backbones of all cells, each once.

    Returns:
        Why the data of cells are not available, by id.

    Raises:
        InputError: No cell has data.
    """
    outcomes: dict[str, InputError | None] = {}
    failures: dict[str, InputError] = {}
    for id, experiment in experiments.items():
        task, storage = experiment.task.model_dump_json(), experiment.storage
        key = "\n".join((*_inputs(experiment), task, f"{storage.cache} {storage.hub}"))
        if key not in outcomes:
            outcomes[key] = _prepare(experiment, progress)
        if (error := outcomes[key]) is not None:
            failures[id] = error
    if experiments and len(failures) == len(experiments):
        raise next(iter(failures.values()))
    return {id: str(error) for id, error in failures.items()}


def _prepare(experiment: Experiment, progress: SweepProgress) -> InputError | None:
    backbone = Backbone.of(experiment)
    try:
        prepare_dataset(experiment, backbone, progress.task_progress("preparing data"))
        ensure_pretrained(backbone, progress.task_progress("backbone"))
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
    monitor: "_Monitor",
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
    with _quiet_tune(), tempfile.TemporaryDirectory(prefix="trishul-tune-") as folder:
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


class _Monitor(tune.Callback):
    """Follows the trials of one Tuner after the other: progress, failures, samples."""

    def __init__(
        self, find: FindRun, options: TuneOptions, progress: SweepProgress, search: Search | None
    ) -> None:
        self.options, self.watchdog = options, Watchdog(0.0)
        self.failures: dict[str, str] = {}
        self.samples: list[dict[str, Any]] = []
        self.staging: Path | None = None  # where Tune keeps its files until it saves them
        self._find, self._progress = find, progress
        self._metric = search.metric if search is not None else None
        self._runs: dict[str, CellRun] = {}  # by trial
        self._results: dict[str, dict[str, Any]] = {}  # the last ones, by trial
        self._finished: set[str] = set()
        self._attempts: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks, which nobody reads

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Show that a cell is being run."""
        assert trial.storage is not None
        self.staging = Path(trial.storage.experiment_driver_staging_path).parents[1]
        if trial.trial_id not in self._runs:
            run = self._runs[trial.trial_id] = self._find(trial.config)
            if "cell" not in trial.config:  # sampled
                self.samples.append(dict(trial.config))
                self._progress.add(run.experiment.id, run.name, run.experiment.federation.rounds)
        self._progress.start(self._id(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Show a round and what was reported in it."""
        self._results[trial.trial_id] = result
        for note in result.get(NOTES, ()):
            self._progress.note(f"{self._runs[trial.trial_id].name}: {note}")
        if ROUND in result:
            self._progress.round(self._id(trial), result[ROUND], result)

    def on_trial_recover(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Show why a cell is tried again."""
        attempt = self._count(trial)
        self._progress.retry(
            self._id(trial), self._reason(trial), attempt + 1, self.options.retries + 1
        )

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Note why a cell failed for good."""
        if self._count(trial) > self.options.retries:
            self._fail(trial, self._reason(trial))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Note how a cell ended that Tune did not count as failed."""
        result = self._results.get(trial.trial_id, {})
        if result.get(FINISHED):
            self._finished.add(self._id(trial))
            self._progress.end(self._id(trial))
        elif FAILURE in result:
            self._count(trial)
            self._fail(trial, result[FAILURE])
        else:
            names = (self._metric,) if self._metric else HEADLINES
            shown = "".join(f", {name} {result[name]:.4g}" for name in names if name in result)
            self._fail(trial, f"{STOPPED_EARLY} after round {result.get(ROUND, 0)}{shown}")

    def take_unfinished(self, ids: Sequence[str]) -> list[str]:
        """Return the cells that Tune gave up although they may be tried again."""
        return [id for id in ids if id not in self._finished and id not in self.failures]

    def _fail(self, trial: Trial, why: str) -> None:
        id = self._id(trial)
        self.failures[id] = why
        record_failure(self._runs[trial.trial_id].experiment, why, self._attempts.get(id, 1))
        self._progress.end(id, failure=why)

    def _count(self, trial: Trial) -> int:
        id = self._id(trial)
        self._attempts[id] = self._attempts.get(id, 0) + 1
        return self._attempts[id]

    def _id(self, trial: Trial) -> str:
        return self._runs[trial.trial_id].experiment.id

    def _reason(self, trial: Trial) -> str:
        ended = self.watchdog.reasons.pop(trial.trial_id, None)
        if ended is not None or trial.pickled_error_file is None:
            return ended or "it failed without a reason"
        # Written by this process a moment ago.
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
        return cause_of(error)


def _scheduler(
    early_stopping: EarlyStopping | None, search: Search | None, experiments: Sequence[Experiment]
) -> TrialScheduler | None:
    if early_stopping is None:
        return None
    rounds = max(experiment.federation.rounds for experiment in experiments)
    search = search or Search()
    return AsyncHyperBandScheduler(
        time_attr=ROUND,
        metric=search.metric or HEADLINE,
        mode=search.mode,
        max_t=rounds,
        grace_period=min(early_stopping.grace, rounds),
        reduction_factor=early_stopping.reduction,
    )


def _optuna(search: Search) -> Searcher:
    try:
        import optuna  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError as error:
        raise InputError(
            "search.kind=optuna needs the package optuna: pip install 'trishul-ray[search]'"
        ) from error
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return OptunaSearch(metric=search.metric or HEADLINE, mode=search.mode, seed=search.seed)


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
