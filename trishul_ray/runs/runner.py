"""Drive a single run from configuration to results; the implementation of ``trishul run``.

A run stores all files under ``<runs>/<id>/``. Repeating the call resumes a stopped run and reads a
finished one. :func:`run_experiment` runs all rounds, :func:`run_steps` yields after each round, and
:func:`_train` is the round loop of both.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from trishul_ray.config.fields import FederationConfig, RateSource
from trishul_ray.data.user.user_data import USER_DATA
from trishul_ray.errors import ArtifactsError, InputError, StorageRefusedError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.compatibility import check_fits, random_weights_warning
from trishul_ray.federation.checkpoint import Checkpoint
from trishul_ray.federation.on_ray.driver import Driver, RayDriver, Workers, open_driver
from trishul_ray.federation.on_ray.session import opening, ray_session
from trishul_ray.federation.prepare import Prepared, coverage_of, prepare_run
from trishul_ray.federation.server import RoundReport, RunResult
from trishul_ray.methods.base import build_method
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.models.pretraining import ensure_pretrained, needs_pretraining
from trishul_ray.plugins.loading import find_plugin
from trishul_ray.report.summary import FAILURE, RunSummary
from trishul_ray.runs.artifacts import write_results
from trishul_ray.runs.existing_run import (
    check_sources,
    extend_shorter,
    read_finished,
    restore_files,
)
from trishul_ray.runs.folder import RunFolder
from trishul_ray.runs.mlflow_log import (
    close_run,
    grouped_metrics,
    log_finished,
    mlflow_command,
    open_run,
)
from trishul_ray.runs.results import summarize
from trishul_ray.runtime.lazy import import_ahead
from trishul_ray.stages import Stages
from trishul_ray.storage.store import Store
from trishul_ray.tasks.build import unread_fields
from trishul_ray.tracking.mlflow import Tracker
from trishul_ray.tracking.progress import RunProgress

#: Modules that take seconds to import and are needed only after the rounds. They are imported after
#: the first round, while this process waits for the actors.
LATE = ("trishul_ray.runs.export", "trishul_ray.models.attention")
#: A run as a generator that yields a report after each round and returns the result.
RunSteps = Generator[RoundReport, None, "FinishedRun"]


@dataclass(frozen=True)
class FinishedRun:
    """The result of :func:`run_experiment`."""

    summary: RunSummary
    home: Store  # the run's folder
    repeated: bool  # whether the run had already finished
    mlflow_command: str | None  # opens the tracking store


def run_experiment(
    experiment: Experiment, progress: RunProgress, *, fresh: bool = False,
    workers: Workers | None = None,
) -> FinishedRun:  # fmt: skip
    """Run an experiment, resume it, or read its result; see :func:`run_steps`.

    Raises:
        InputError: The parts of the experiment do not fit together.
        RunError: The run failed.
    """
    with closing(run_steps(experiment, progress, fresh=fresh, workers=workers)) as steps:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                finished: FinishedRun = end.value
                return finished


def run_steps(
    experiment: Experiment,
    progress: RunProgress,
    *,
    fresh: bool = False,
    workers: Workers | None = None,
    extras: bool = True,
    tags: Mapping[str, str] = MappingProxyType({}),
) -> RunSteps:
    """Run an experiment as a generator that yields after every round.

    The generator first yields its starting point (round 0, or the newest checkpoint), then yields
    after every round, and returns the result. For a finished run it yields nothing. Closing it
    early stops the run between two rounds and keeps its checkpoints, so that the same call resumes
    the run.

    Args:
        experiment: The experiment.
        progress: The progress display.
        fresh: Whether to delete an earlier run first, and start over.
        workers: Actors of earlier runs, which this run reuses and keeps for the next one. Ray must
            be running.
        extras: Whether to export the model, for which this process loads a backbone.
        tags: Further tags of the MLflow run.
    """
    for plugin in experiment.plugins:  # this process may have loaded another content meanwhile
        find_plugin(plugin)
    folder = RunFolder.of(experiment)
    folder.home.check_bucket(experiment.storage.runs)
    with folder.locked(read_only=not fresh):
        if not fresh:
            with folder.accessible():
                summary, missing = read_finished(experiment, folder.home, progress)
            if missing:
                progress.note(f"{missing}: restarting the run, whose results will be the same")
                fresh = True
            elif summary is not None:
                return _reuse(experiment, folder, summary, progress, extras, tags)
        # Check everything before removing or writing files: invalid input must not change any.
        prepared = _prepare(experiment, workers, progress)
        if fresh:
            for rejected in folder.remove():
                progress.note(f"not deleted in MLflow: {rejected}")
        with folder.begun() as attempt:
            if not fresh:
                extend_shorter(experiment, prepared, folder, attempt, progress)
            run = _Run(experiment, prepared, folder, attempt, progress, workers, extras, tags)
            return (yield from run.steps())


def _reuse(
    experiment: Experiment,
    folder: RunFolder,
    summary: RunSummary,
    progress: RunProgress,
    extras: bool,
    tags: Mapping[str, str],
) -> FinishedRun:
    """Read the result of a finished run, and restore its files."""
    check_sources(experiment, summary, progress)
    with suppress(StorageRefusedError):  # the user may only have permission to read
        folder.home.remove_unfinished()
    summary = restore_files(experiment, summary, folder, progress, extras=extras)
    for line in log_finished(experiment, summary, folder.home, tags):
        progress.note(f"not logged to MLflow: {line}")
    return FinishedRun(summary, folder.home, True, mlflow_command(experiment))


def _prepare(experiment: Experiment, workers: Workers | None, progress: RunProgress) -> Prepared:
    """Check that the parts of an experiment fit together, report notices, and load its data."""
    options, name = experiment.optimizer, experiment.method.name
    warning = "warning: " if options.lr_source is RateSource.GENERAL else ""
    progress.note(f"{warning}learning rate {options.lr:g}: {options.lr_source}")
    if build_method(experiment.method).personal and not experiment.evaluation.per_client:
        progress.note(
            f"warning: method={name} is personalized, but the metrics score only the global model; "
            "set evaluation.per_client=true to also score the personalized models"
        )
    (check_fits if workers is None else workers.check_fits)(experiment)
    notices = [notice for stage in Stages.of(experiment) for notice in stage.prepare()]
    mlflow_command(experiment)  # rejects an invalid store
    progress.phase("preparing data")
    prepared = prepare_run(experiment, progress.task_progress("preparing data"))
    for notice in (*notices, random_weights_warning(experiment)):
        if notice is not None:
            progress.note(notice)
    return prepared


@dataclass(frozen=True)
class _Run:
    """An unfinished run: its remaining rounds and its results."""

    experiment: Experiment
    prepared: Prepared
    folder: RunFolder
    attempt: str
    progress: RunProgress
    workers: Workers | None
    extras: bool
    tags: Mapping[str, str]

    def steps(self) -> RunSteps:
        """Run the remaining rounds, and write the results."""
        began = time.perf_counter()
        experiment, progress, info = self.experiment, self.progress, self.prepared.dataset.info
        coverage = coverage_of(experiment, self.prepared)
        if coverage.part or experiment.data.name in USER_DATA:
            progress.note(coverage.sentence)
        for remark in (*coverage.cut, *_repeats(experiment.federation, self.prepared.shards.sizes)):
            progress.note(remark)
        unread = unread_fields(experiment.task, info, _backbone(experiment))
        adapter = type(experiment.adapter).model_fields.keys() - experiment.fields_read
        unread += sorted(f"adapter.{name}" for name in adapter)
        sources = self.prepared.sources
        tracker = open_run(experiment, self.attempt, coverage, sources, self.tags, unread)
        with self.tracked(tracker):
            with self.driver() as driver:
                earlier, result = yield from _train(driver, tracker, progress, self.extras)
                held = driver.slices.total() if isinstance(driver, RayDriver) else {}
            progress.phase("writing results")
            state = result.checkpoint
            before = [r for r in state.records if r.round <= earlier]
            wall = time.perf_counter() - began + sum(r.seconds or 0.0 for r in before)
            summary = replace(
                summarize(experiment, result, coverage, wall, tracker.run_id),
                reports=Stages.of(experiment).reports(state.stages, state.records[-1].stages),
                unread_fields=unread,
                held=held,
            )
            if summary.final["loss"] > summary.untouched["loss"]:
                progress.note("warning: training increased the loss; try a lower optimizer.lr")
            return self.write(state, summary, tracker)

    @contextmanager
    def tracked(self, tracker: Tracker) -> Iterator[None]:
        """End the MLflow run if the block fails or is stopped."""
        try:
            yield
        except ArtifactsError:  # the run and its MLflow run have finished
            raise
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | GeneratorExit)
            self.note_rejected(tracker.end("KILLED" if stopped else "FAILED"))
            raise

    def note_rejected(self, rejected: Sequence[str]) -> None:
        for line in rejected:
            self.progress.note(f"MLflow rejected {line}")

    @contextmanager
    def driver(self) -> Iterator[Driver]:
        """Start Ray, pretrain the built-in backbone if needed, and start the actors."""
        experiment, progress, workers = self.experiment, self.progress, self.workers
        backbone, use_ray = _backbone(experiment), experiment.resources.backend == "ray"
        if use_ray and workers is None:
            progress.phase(opening())
        with ray_session() if use_ray else nullcontext():
            if workers is not None and needs_pretraining(backbone):
                workers.close()  # pretraining needs a CPU, and the actors may occupy all
            ensure_pretrained(backbone, progress.task_progress("backbone"), on_ray=use_ray)
            progress.phase("starting clients")
            note = progress.note
            with open_driver(experiment, self.prepared, self.attempt, note, workers) as driver:
                yield driver

    def write(self, last: Checkpoint, summary: RunSummary, tracker: Tracker) -> FinishedRun:
        """Write and log the results.

        Raises:
            ArtifactsError: The model cannot be exported; everything else is written and logged.
        """
        experiment, home, lost = self.experiment, self.folder.home, None
        try:
            summary = write_results(experiment, last, summary, home, model=self.extras)
        except ArtifactsError as error:
            summary, lost = RunSummary.read(home), error
        home.remove(FAILURE)
        self.note_rejected(close_run(tracker, summary, home))
        if lost is not None:
            raise lost
        return FinishedRun(summary, home, False, mlflow_command(experiment))


def _repeats(fed: FederationConfig, sizes: np.ndarray) -> Iterator[str]:
    """Yield a warning if a batch contains the same row of a client several times."""
    small, least = int((sizes < fed.batch_size).sum()), int(sizes.min())
    if small and fed.local_epochs is None:
        epochs = fed.local_steps * fed.batch_size / least
        yield (
            f"warning: federation.batch_size={fed.batch_size} exceeds the number of rows of "
            f"{small} of {len(sizes)} clients: on the smallest client ({least} rows), a batch "
            f"contains a row up to {-(-fed.batch_size // least)} times and a round is "
            f"{epochs:,.0f} epochs; set federation.local_epochs to train for whole epochs"
        )


def _backbone(experiment: Experiment) -> Backbone:
    return backbone_of(experiment.model, experiment.storage.paths)


def _train(
    driver: Driver, tracker: Tracker, progress: RunProgress, extras: bool
) -> Generator[RoundReport, None, tuple[int, RunResult]]:
    """Run the remaining rounds: the round loop of every run.

    With ``extras``, the modules that export the model have been imported when it returns.

    It yields after every step, to :func:`run_steps`. A round reaches a client's local training
    through six calls: ``RayDriver.step`` (on_ray/driver.py), ``Coordinator.step``
    (on_ray/coordinator.py), ``Server.step`` (server.py), ``ActorPool.run`` (on_ray/pool.py),
    ``ClientActor.train`` (on_ray/client_actor.py) and ``train_clients`` (local.py), all in
    trishul_ray/federation. Inline, the calls are ``InlineDriver.step``, ``Server.step``,
    ``InlineExecutor.run`` and ``train_clients``.

    Returns:
        The number of rounds that earlier processes had finished, and the result.
    """
    ahead = None
    report = driver.begin()
    earlier = report.round
    progress.phase("training")
    # The record of a resumed run's last round is complete only after the next step.
    _log(report, tracker, progress, shown=0 if report.round else 1)
    yield report
    while not report.finished:
        report = driver.step()
        _log(report, tracker, progress, shown=len(report.records))
        yield report
        if extras and ahead is None:
            ahead = import_ahead(*LATE)
    if ahead is not None:
        ahead.join()
    return earlier, driver.final()


def _log(report: RoundReport, tracker: Tracker, progress: RunProgress, *, shown: int) -> None:
    """Log all records of a report, and display its events and its last ``shown`` records."""
    progress.primary_metric = report.primary_metric
    for event in report.events:
        progress.note(event)
    for record in report.records:
        # A resumed run logs earlier rounds again, and the tracker ignores known rounds.
        tracker.round(record.round, grouped_metrics(record.metrics()))
    earlier = len(report.records) - shown
    progress.count_earlier(record.metrics() for record in report.records[:earlier])
    for record in report.records[earlier:]:
        progress.advance(record.round, record.metrics())


def central_twin(experiment: Experiment) -> Experiment:
    """Return the same experiment with a single client that has all the data.

    Raises:
        InputError: The method is personalized, so that its global model is not the model that a
            client has trained.
    """
    if build_method(experiment.method).personal:
        raise InputError(
            f"--central is not supported with method={experiment.method.name!r}, which is "
            "personalized; compare with --central of fedit"
        )
    federation = experiment.federation.model_copy(
        update={
            "clients": 1, "clients_per_round": 1, "compute": "full", "compute_shares": None,
            "held_out": 0.0,
        }
    )  # fmt: skip
    partition = experiment.partition.model_copy(update={"kind": "iid", "min_size": 1})
    changes = {"federation": federation, "partition": partition}
    name = f"{experiment.name}-central"
    # Without communication, stages have nothing to change.
    return experiment.model_copy(update={"name": name, "stages": {}} | changes)
