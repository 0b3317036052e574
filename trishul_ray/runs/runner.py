"""One run from configuration to results: the implementation of ``trishul run``.

A run keeps everything under ``<runs>/<id>/``. The same call continues a stopped run and reads a
finished one. :func:`run_experiment` does it at once, :func:`run_steps` round by round; the round
loop of both is :func:`_train`.
"""

import errno
import shutil
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from trishul_ray.config import RateSource
from trishul_ray.data.own import CUSTOM
from trishul_ray.errors import (
    ArtifactsError,
    BusyError,
    InputError,
    StorageError,
    StorageRefusedError,
    at_loss,
)
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.fit import (
    check_fits,
    image_size_line,
    random_weights_line,
)
from trishul_ray.federation.checkpoint import open_checkpoints, run_folder
from trishul_ray.federation.edge import privacy_report
from trishul_ray.federation.on_ray.driver import Driver, Workers, open_driver
from trishul_ray.federation.on_ray.session import opening, ray_session
from trishul_ray.federation.prepare import Prepared, coverage_of, prepare_run
from trishul_ray.federation.server import RoundReport, RunResult
from trishul_ray.files import scratch_folder
from trishul_ray.lazy import import_ahead
from trishul_ray.methods.base import build_method
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.pretraining import ensure_pretrained, needs_pretraining
from trishul_ray.plugins import find_plugin
from trishul_ray.redaction import redact
from trishul_ray.report.summary import (
    FAILURE,
    RunSummary,
    attempt_of,
    unmark_finished,
    write_attempt,
    write_result,
)
from trishul_ray.runs.earlier import (
    add_artifacts,
    check_sources,
    extend_shorter,
    read_finished,
    restore_files,
)
from trishul_ray.runs.mlflow_log import (
    grouped_metrics,
    log_data,
    log_reused,
    log_totals,
    mark_replaced,
    mlflow_command,
    open_tracker,
)
from trishul_ray.runs.results import file_hashes, summarize, write_tables
from trishul_ray.stages import Stages
from trishul_ray.storage import Store, reason
from trishul_ray.tasks.build import unread_fields
from trishul_ray.tracking.mlflow import Tracker
from trishul_ray.tracking.progress import RunProgress

#: Seconds to wait for a process that drives the run, such as a killed one that is still ending.
LOCK_SECONDS = 5.0
#: What takes seconds to import and is needed when the rounds are over: it is imported after the
#: first one, while this process waits for the others.
LATE = ("trishul_ray.runs.artifacts", "trishul_ray.models.attention")
#: What a run does: it yields a report after each round and returns the result.
RunSteps = Generator[RoundReport, None, "FinishedRun"]


@dataclass(frozen=True)
class FinishedRun:
    """The result of :func:`run_experiment`."""

    summary: RunSummary
    home: Store  # the run's folder
    repeated: bool  # whether it had finished before, so that nothing was run
    mlflow_command: str | None  # opens its tracking store


@dataclass(frozen=True)
class _Options:
    """Arguments of :func:`run_steps`."""

    workers: Workers | None
    extras: bool
    tags: Mapping[str, str]


def run_experiment(
    experiment: Experiment,
    progress: RunProgress,
    *,
    fresh: bool = False,
    workers: Workers | None = None,
) -> FinishedRun:
    """Run an experiment, continue it, or read its result; ``fresh`` deletes an earlier run first.

    ``workers`` are as for :func:`run_steps`.

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
    tags: Mapping[str, str] | None = None,
) -> RunSteps:
    """Run an experiment step by step: the same as :func:`run_experiment`, as a generator.

    It yields where the run starts from (after round 0, or the newest checkpoint), then after every
    round, and returns the result; a finished run yields nothing. Closing it early stops the run
    between two rounds: the lock is released, the MLflow run is ``KILLED``, and the checkpoints are
    kept, so that the same call continues it.

    ``workers`` are actors of earlier runs that this one may use, and leaves to the next one; the
    caller has started Ray. With ``extras``, the figures are drawn and the model is exported, for
    which this process loads a backbone of its own; a later call adds them to a finished run.
    ``tags`` are further ones of the MLflow run.
    """
    for plugin in experiment.plugins:  # this process may have loaded another content since
        find_plugin(plugin)
    home = run_folder(experiment)
    home.check_bucket(experiment.storage.runs)
    with _locked(home, experiment, read_only=not fresh):
        try:
            summary, lacks = (None, "") if fresh else read_finished(experiment, home, progress)
        except StorageRefusedError as error:
            raise _refused(experiment, error) from error
        if lacks:
            progress.note(f"{lacks}: the run starts over, and its numbers are the same")
            summary, fresh = None, True
        if summary is not None:
            check_sources(experiment, summary, progress)
            summary = restore_files(experiment, summary, home, progress, extras=extras)
            summary, rejected = log_reused(experiment, summary, home, tags or {})
            for refused in rejected:
                progress.note(f"not logged to MLflow: {refused}")
            return FinishedRun(summary, home, True, mlflow_command(experiment))
        progress.note(learning_rate_line(experiment))
        if (remark := personal_line(experiment)) is not None:
            progress.note(remark)
        # Checked before anything is removed or written: wrong input changes no files.
        (check_fits if workers is None else workers.check_fits)(experiment)
        for stage in Stages.of(experiment):
            for remark in stage.prepare():
                progress.note(remark)
        mlflow_command(experiment)
        progress.phase("preparing data")
        prepared = prepare_run(experiment, progress.task_progress("preparing data"))
        remark = image_size_line(_backbone(experiment), prepared.dataset.info)
        for line in (remark, random_weights_line(experiment)):
            if line is not None:
                progress.note(line)
        new = uuid.uuid4().hex
        if fresh:
            earlier = attempt_of(home) or _attempt_of_checkpoint(experiment)
            home.remove("result.json")  # first: without its files, it is no result
            unmark_finished(home)
            for refused in mark_replaced(experiment, earlier, by=new):
                progress.note(f"not marked in MLflow: {refused}")
            home.remove_all()
        existed = home.exists("attempt.json")
        if existed:
            home.remove_unfinished()
        try:
            try:
                attempt = _attempt(experiment, home, new)
                home.write("config.yaml", experiment.to_yaml())
            except StorageRefusedError as error:
                raise _refused(experiment, error) from error
            if not fresh:
                extend_shorter(experiment, prepared, home, attempt, progress)
            options = _Options(workers, extras, tags or {})
            return (yield from _run(experiment, prepared, home, attempt, progress, options))
        except (InputError, StorageError) as error:
            # Some wrong input, and a full disk, are found only here; leave no files of a run that
            # never started. A remote storage that has just failed is not asked again.
            answers = home.is_local or isinstance(error, InputError)
            if not existed and answers and not home.child("checkpoints").names():
                home.remove_all()
            raise


def _refused(experiment: Experiment, error: StorageRefusedError) -> InputError:
    shown = redact(experiment.storage.runs)
    return InputError(f"storage.runs={shown!r}: {error}; choose another folder")


def learning_rate_line(experiment: Experiment) -> str:
    """Return the learning rate of a run and its source; a warning if it is the default."""
    options = experiment.optimizer
    warning = "warning: " if options.lr_source is RateSource.GENERAL else ""
    return f"{warning}learning rate {options.lr:g}: {options.lr_source}"


def personal_line(experiment: Experiment) -> str | None:
    """Return a warning if no metric of a run will be of the models that its clients keep."""
    name = experiment.method.name
    if experiment.evaluation.per_client or not build_method(experiment.method).personal:
        return None
    return (
        f"warning: method={name} leaves a part of the model with each client: the metrics are of "
        "the global model without it; evaluation.per_client=true scores the clients' own, too"
    )


def _run(
    experiment: Experiment,
    prepared: Prepared,
    home: Store,
    attempt: str,
    progress: RunProgress,
    options: _Options,
) -> RunSteps:
    began = time.perf_counter()
    coverage = coverage_of(experiment, prepared.dataset)
    if coverage.part or experiment.data.name in CUSTOM:
        progress.note(coverage.sentence)
    tracker = Tracker()
    status = "FAILED"
    try:
        with ExitStack() as stack:
            info, backbone = prepared.dataset.info, _backbone(experiment)
            unread = unread_fields(experiment.task, info, backbone)
            tracker = open_tracker(experiment, attempt, coverage, options.tags, unread)
            log_data(tracker, coverage, prepared.sources)
            use_ray = experiment.resources.backend == "ray"
            if use_ray:
                if options.workers is None:
                    progress.phase(opening())
                stack.enter_context(
                    at_loss(lambda why: tracker.finish("FAILED" if why else "KILLED"))
                )
                stack.enter_context(ray_session())
            if options.workers is not None and needs_pretraining(backbone):
                options.workers.close()  # it takes a CPU, and they may hold all
            ensure_pretrained(backbone, progress.task_progress("backbone"), on_ray=use_ray)
            progress.phase("starting clients")
            driver = stack.enter_context(
                open_driver(experiment, prepared, attempt, progress.note, options.workers)
            )
            late = LATE if options.extras else ()
            earlier, result = yield from _train(driver, tracker, progress, late)
        progress.phase("writing results")
        with scratch_folder("results") as scratch:
            folder = Path(scratch)
            state = result.checkpoint
            write_tables(experiment, state, folder)
            home.upload_folder(folder)
            before = [r for r in state.records if r.round <= earlier]
            wall = time.perf_counter() - began + sum(r.seconds or 0.0 for r in before)
            hashes = file_hashes(folder)
            summary = replace(
                summarize(experiment, result, coverage, wall, tracker.run_id),
                privacy=privacy_report(experiment, state.edge, state.records[-1]),
                files=list(hashes),
                sha256=hashes,
                logged_to=tracker.place,
                unread_fields=unread,
            ).written()
            # Its presence marks the run as finished, whatever becomes of figures and model.
            summary = replace(summary, logged=tracker.place is None).written()
            write_result(home, summary)
            home.remove(FAILURE)
            status, lost = "FINISHED", None
            if options.extras:
                try:
                    with scratch_folder("results") as scratch:
                        new = Path(scratch)
                        summary = add_artifacts(experiment, prepared, result, new, summary)
                        shutil.copytree(new, folder, dirs_exist_ok=True)
                except ArtifactsError as error:
                    lost = error
            whole = replace(summary, logged=True).written()
            (folder / "result.json").write_bytes(whole.to_json())
            tracker.log_artifacts(folder)
            log_totals(tracker, whole)
        command = tracker.ui_command(experiment.id)
    except (KeyboardInterrupt, GeneratorExit):
        status = "KILLED" if status == "FAILED" else status
        raise
    finally:
        refused = tracker.finish(status)  # type: ignore[arg-type]  # three literals
        for line in refused:
            progress.note(f"MLflow refused: {line}")
    if tracker.place is not None and not refused:
        summary = whole
        write_result(home, summary)
    if lost is not None:
        raise lost
    return FinishedRun(summary, home, False, command)


def _backbone(experiment: Experiment) -> Backbone:
    return Backbone.of(experiment.model, experiment.storage.places)


def _train(
    driver: Driver,
    tracker: Tracker,
    progress: RunProgress,
    late: Sequence[str],
) -> Generator[RoundReport, None, tuple[int, RunResult]]:
    """Run the rounds that are left: the round loop of every run.

    Returns the number of rounds that earlier processes had finished, and the result; the modules
    ``late`` are imported by then.

    It yields after every step, to :func:`run_steps`. One round goes from here to a client's local
    training in six hops: ``RayDriver.step`` (on_ray/driver.py), ``Coordinator.step``
    (on_ray/coordinator.py), ``Server.step`` (server.py), ``ActorPool.run`` (on_ray/pool.py),
    ``ClientActor.train`` (on_ray/client_actor.py) and ``train_client`` (local.py), all in
    trishul_ray/federation. Inline it is ``InlineDriver.step``, ``Server.step``,
    ``InlineExecutor.run`` and ``train_client``.
    """
    ahead = None
    report = driver.begin()
    earlier = report.round
    progress.phase(f"training, from round {report.round + 1}" if report.round else "training")
    _log(report, tracker, progress, shown=1)
    yield report
    while not report.finished:
        report = driver.step()
        _log(report, tracker, progress, shown=len(report.records))
        yield report
        if late and ahead is None:
            ahead = import_ahead(*late)
    if ahead is not None:
        ahead.join()
    return earlier, driver.final()


def _log(report: RoundReport, tracker: Tracker, progress: RunProgress, *, shown: int) -> None:
    """Log all records of a report; display its events and the last ``shown`` records."""
    progress.headline = report.headline
    for event in report.events:
        progress.note(event)
    for record in report.records:
        # A resume logs earlier rounds again: the tracker ignores those it already has.
        tracker.log_round(record.round, grouped_metrics(record.metrics()))
    progress.count_earlier(record.metrics() for record in report.records[:-shown])
    for record in report.records[-shown:]:
        progress.advance(record.round, record.metrics())


def _attempt(experiment: Experiment, home: Store, new: str) -> str:
    """Return the attempt that a run's folder belongs to; without one, it becomes ``new``."""
    # Written before the MLflow run is created: a driver killed in between finds it by this tag.
    if not (attempt := attempt_of(home)):
        attempt = _attempt_of_checkpoint(experiment) or new
        write_attempt(home, attempt)
    return attempt


def _attempt_of_checkpoint(experiment: Experiment) -> str:
    """Return the attempt that a run's newest checkpoint belongs to; empty without one."""
    checkpoint = open_checkpoints(experiment).newest()
    return "" if checkpoint is None else checkpoint.attempt


@contextmanager
def _locked(home: Store, experiment: Experiment, *, read_only: bool) -> Iterator[None]:
    """Allow one process at a time to drive a run; on shared storage this is up to the scheduler.

    With ``read_only``, a finished run may be in a folder that cannot be written.
    """
    if not home.is_local:
        yield
        return
    folder = Path(home.root).parent
    lock = FileLock(folder / f".{experiment.id}.lock")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout as error:
        raise BusyError(
            f"run {experiment.id} is being driven by another process; wait for it or stop it"
        ) from error
    except OSError as error:
        message = f"storage.runs={experiment.storage.runs!r} cannot be written: {reason(error)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(message) from error
        if not (read_only and home.exists("result.json")):
            raise InputError(f"{message}; choose a writable folder") from error
    try:
        yield
    finally:
        with suppress(OSError):  # nothing can be written there, or another run has begun
            if lock.is_locked:
                # A process that waits for the removed file notices, and opens a new one.
                Path(lock.lock_file).unlink(missing_ok=True)
            if is_new and not home.names():  # the input was refused: leave nothing
                folder.rmdir()
        lock.release()


def central_twin(experiment: Experiment) -> Experiment:
    """Return the same experiment with a single client that holds all the data.

    Raises:
        InputError: Its method leaves a part of the model with the clients, so that the global model
            is not what a client has trained.
    """
    if build_method(experiment.method).personal:
        raise InputError(
            f"--central: method={experiment.method.name!r} leaves a part of the model with each "
            "client; compare with --central of fedit"
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
    # Nothing is sent, and nobody is late.
    return experiment.model_copy(update={"name": name, "stages": {}} | changes)
