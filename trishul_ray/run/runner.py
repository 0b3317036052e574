"""One run from configuration to result: what ``trishul run`` does.

Everything lies under ``<runs>/<id>/``; the same call continues a stopped run, a finished one is
read, not repeated. Figures and the adapter are made from the final state alone.
"""

import errno
import json
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trishul_ray.config import GENERAL_DEFAULT
from trishul_ray.data.coverage import Coverage
from trishul_ray.errors import InputError, RunError, StorageError, StorageRefusedError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import open_checkpoints, run_folder
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.messages import changed_sources
from trishul_ray.federation.on_ray.driver import Driver, open_driver
from trishul_ray.federation.on_ray.session import ray_session
from trishul_ray.federation.prepare import (
    Prepared,
    check_fits,
    coverage_of,
    prepare_rows,
    prepare_run,
)
from trishul_ray.federation.server import RoundReport, RunResult
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.lookup import local_folder
from trishul_ray.models.shared_weights import folder_source
from trishul_ray.pretrain.training import ensure_pretrained
from trishul_ray.run.artifacts import write_artifacts
from trishul_ray.run.results import (
    config_yaml,
    flat_config,
    flat_metrics,
    flatten,
    metrics_parquet,
    result_json,
    summarize,
    versions,
)
from trishul_ray.storage import Store, reason
from trishul_ray.tracking.mlflow_run import MlflowRun, Tracker
from trishul_ray.tracking.progress import RunProgress
from trishul_ray.tracking.store import redact, tracking_uri, ui_command

#: Files of a finished run that need no backbone to be made.
_PLAIN_FILES = ("config.yaml", "metrics.parquet")


@dataclass(frozen=True)
class FinishedRun:
    """What a run gave."""

    summary: dict[str, Any]
    home: Store
    repeated: bool  # it had finished before; nothing was run
    mlflow_command: str | None


def run_experiment(
    experiment: Experiment, progress: RunProgress, *, fresh: bool = False
) -> FinishedRun:
    """Run, continue, or read an experiment.

    Args:
        experiment: what to run.
        progress: tells a person how it goes.
        fresh: forget what an earlier run of the same experiment left.

    Raises:
        InputError: the parts of the experiment do not fit together.
        RunError: the run failed; the message says what is kept and how to continue.
    """
    home = run_folder(experiment)
    shown = redact(experiment.storage.runs)
    if (bucket := home.missing_bucket()) is not None:
        raise InputError(
            f"storage.runs={shown!r}: bucket {bucket!r} does not exist; create it or name another"
        )
    with _locked(home, experiment, reads=not fresh):
        summary = None if fresh else _read_result(home, progress)
        if summary is not None:
            _check_sources(experiment, summary, progress)
            _make_again(experiment, summary, home, progress)
            return FinishedRun(summary, home, True, _command_of(experiment))
        progress.note(learning_rate_line(experiment))
        # Before anything is removed or written: wrong input loses and leaves nothing.
        check_fits(experiment)
        _command_of(experiment)
        progress.phase("preparing data")
        prepared = prepare_run(experiment, progress.task_progress("preparing data"))
        if fresh:
            home.remove_all()
        _say_what_changed(experiment, home, progress)
        began = home.exists("attempt.json")
        try:
            attempt = _attempt(home)
            home.write("config.yaml", config_yaml(experiment))
        except StorageRefusedError as error:
            raise InputError(f"storage.runs={shown!r}: {error}; name another place") from error
        try:
            return _run(experiment, prepared, home, attempt, progress)
        except InputError:
            # Wrong input that shows only here: nothing is left of a run that never began.
            if not began and not home.child("checkpoints").exists():
                home.remove_all()
            raise


def learning_rate_line(experiment: Experiment) -> str:
    """Return which learning rate a run takes and why; a warning if nobody chose it."""
    options = experiment.optimizer
    warning = "warning: " if options.lr_source == GENERAL_DEFAULT else ""
    return f"{warning}learning rate {options.lr:g}: {options.lr_source}"


def _read_result(home: Store, progress: RunProgress) -> dict[str, Any] | None:
    """A finished run's result; None if there is none that can be read."""
    if not home.exists("result.json"):
        return None
    try:
        found: dict[str, Any] = json.loads(home.read("result.json"))
    except ValueError as error:
        progress.note(f"{home.uri}/result.json is unreadable ({error}): made again")
        return None
    return found


def _check_sources(experiment: Experiment, summary: dict[str, Any], progress: RunProgress) -> None:
    """A finished run of one's own data or backbone is read only as long as they are the same.

    Raises:
        InputError: they have changed.
    """
    now: dict[str, str] = {}
    if experiment.data.path is not None:
        try:
            now |= prepare_rows(experiment, progress.task_progress("preparing data")).sources
        except InputError as error:
            progress.note(f"the data of this finished run cannot be read any more: {error}")
    folder = local_folder(experiment.model.name)
    if folder is not None:
        now["backbone"] = folder_source(folder)
    if changed := changed_sources(summary.get("sources", {}), now):
        raise InputError(
            f"run {experiment.id} was made with other {changed} than are there now: put back what "
            "it was made with, or start over with --fresh"
        )


def _make_again(
    experiment: Experiment, summary: dict[str, Any], home: Store, progress: RunProgress
) -> None:
    """Make what a finished run has lost of its files again, from its last checkpoint."""
    missing = [name for name in summary.get("files", _PLAIN_FILES) if not home.exists(name)]
    if not missing:
        return
    told = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
    try:
        found = open_checkpoints(experiment).newest()
        last = experiment.federation.rounds
        if found is None or found.round < last or "loss" not in found.records[-1]:
            raise RunError("its last checkpoint is gone or corrupt; --fresh runs it again")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            if not set(missing) <= set(_PLAIN_FILES):
                report = progress.task_progress
                prepared = prepare_run(experiment, report("preparing data"))
                ensure_pretrained(Backbone.of(experiment), report("backbone"), on_ray=False)
                final = InlineDriver(experiment, prepared, found.attempt).final()
                note = coverage_of(experiment, prepared.dataset).sentence
                with deterministic(experiment):
                    write_artifacts(experiment, prepared, final, folder, note=note)
            (folder / "config.yaml").write_bytes(config_yaml(experiment))
            (folder / "metrics.parquet").write_bytes(metrics_parquet(found.records))
            for name in missing:
                parent, _, file = name.rpartition("/")
                (home.child(parent) if parent else home).write(file, (folder / name).read_bytes())
    except (InputError, RunError, FileNotFoundError) as error:
        progress.note(f"missing in {home.uri}, and cannot be made again: {told} ({error})")
    else:
        progress.note(f"missing in {home.uri}, made again from the last checkpoint: {told}")


def _run(
    experiment: Experiment, prepared: Prepared, home: Store, attempt: str, progress: RunProgress
) -> FinishedRun:
    began = time.perf_counter()
    coverage = coverage_of(experiment, prepared.dataset)
    if coverage.part:
        progress.note(coverage.sentence)
    tracker = Tracker()
    status = "FAILED"
    try:
        with ExitStack() as stack:
            tracker = _open_tracker(experiment, attempt, coverage)
            _log_data(tracker, prepared, coverage)
            use_ray = experiment.resources.backend == "ray"
            if use_ray:
                progress.phase("starting Ray")
                stack.enter_context(ray_session())
            ensure_pretrained(
                Backbone.of(experiment), progress.task_progress("backbone"), on_ray=use_ray
            )
            progress.phase("starting clients")
            driver = stack.enter_context(open_driver(experiment, prepared, attempt, progress.note))
            final = _rounds(experiment, driver, home, tracker, progress)
        progress.phase("writing results")
        home.write("metrics.parquet", metrics_parquet(final.records))
        with tempfile.TemporaryDirectory() as scratch:
            with deterministic(experiment):
                write_artifacts(experiment, prepared, final, Path(scratch), note=coverage.sentence)
            home.upload_folder(Path(scratch))
            made = [
                path.relative_to(scratch).as_posix()
                for path in Path(scratch).rglob("*")
                if path.is_file()
            ]
            wall = time.perf_counter() - began
            summary = summarize(
                experiment, final, coverage, wall_seconds=wall, run_id=tracker.run_id
            )
            summary["files"] = sorted([*_PLAIN_FILES, *made])
            home.write("result.json", result_json(summary))
            for name in ("config.yaml", "result.json", "metrics.parquet"):
                (Path(scratch) / name).write_bytes(home.read(name))
            tracker.log_artifacts(scratch)
        status = "FINISHED"
        return FinishedRun(summary, home, False, tracker.ui_command())
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        for refused in tracker.finish(status):  # type: ignore[arg-type]  # three literals
            progress.note(f"MLflow did not take: {refused}")


def _rounds(
    experiment: Experiment, driver: Driver, home: Store, tracker: Tracker, progress: RunProgress
) -> RunResult:
    def tell(step: RoundReport, shown: int) -> None:
        for event in step.events:
            progress.note(event)
        for record in step.records:
            # Logged again after a resume: the tracker drops what it has already.
            tracker.log_round(record["round"], flat_metrics(record))
        for record in step.records[-shown:]:
            progress.advance(record["round"], record)

    standing = driver.begin()
    progress.phase(f"training, from round {standing.round + 1}" if standing.round else "training")
    tell(standing, shown=1)
    while not standing.finished:
        standing = driver.step()
        tell(standing, shown=len(standing.records))
    return driver.final()


def _open_tracker(experiment: Experiment, attempt: str, coverage: Coverage) -> Tracker:
    options = experiment.tracking
    if not options.mlflow:
        return Tracker()
    return MlflowRun.open(
        tracking_uri(options.uri, experiment.storage.runs),
        options.experiment,
        attempt,
        f"{experiment.name}-{experiment.method.name}-{experiment.id}",
        flat_config(experiment)
        | flatten({"rows": {"train": asdict(coverage.train), "test": asdict(coverage.test)}}),
        tags={
            "trishul.id": experiment.id,
            "trishul.data": coverage.sentence,
            "trishul.part": str(coverage.part),
        }
        | {f"version.{k}": v for k, v in versions().items()},
        parent_run=options.parent_run,
    )


def _log_data(tracker: Tracker, prepared: Prepared, coverage: Coverage) -> None:
    """Name the rows that are trained on and scored as inputs of the tracking run."""
    for context, split, rows in (
        ("training", "train", coverage.train),
        ("evaluation", "test", coverage.test),
    ):
        tracker.log_data(
            f"{coverage.dataset} {split}",
            digest=prepared.dataset.split(split).fingerprint[:16],
            source=coverage.source,
            context=context,
            profile=asdict(rows) | {"revision": coverage.revision},
        )


def _command_of(experiment: Experiment) -> str | None:
    if not experiment.tracking.mlflow:
        return None
    return ui_command(tracking_uri(experiment.tracking.uri, experiment.storage.runs))


def _attempt(home: Store) -> str:
    # Written before the MLflow run is created: a driver killed in between finds it by this name.
    if not home.exists("attempt.json"):
        home.write("attempt.json", json.dumps({"attempt": uuid.uuid4().hex}).encode())
    return str(json.loads(home.read("attempt.json"))["attempt"])


@contextmanager
def _locked(home: Store, experiment: Experiment, *, reads: bool) -> Iterator[None]:
    """One process at a time may drive a run; on shared storage the scheduler sees to that.

    Args:
        home: the run's folder.
        experiment: what is run.
        reads: a finished run is only read: then a place that cannot be written will do.

    Raises:
        InputError: ``storage.runs`` cannot be written.
        RunError: another process drives the run, or the disk is full.
    """
    if not home.is_local:
        yield
        return
    folder = Path(home.root).parent
    lock = FileLock(folder / f".{experiment.id}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunError(
            f"run {experiment.id} is being driven by another process; wait for it or stop it"
        ) from error
    except OSError as error:
        what = f"storage.runs={experiment.storage.runs!r} cannot be written: {reason(error)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(what) from error
        if not (reads and home.exists("result.json")):
            raise InputError(f"{what}; name a folder that can be written") from error
    try:
        yield
    finally:
        lock.release()


def _say_what_changed(experiment: Experiment, home: Store, progress: RunProgress) -> None:
    """Name the fields in which this run differs from the newest other run of the same name."""
    if home.exists("config.yaml") or not home.is_local:
        return
    newest: tuple[float, dict[str, Any]] | None = None
    for path in Path(home.root).parent.glob("*/result.json"):
        found = _read_result(Store.open(str(path.parent)), progress)
        if found is not None and found["name"] == experiment.name:
            newest = max(newest or (0.0, found), (path.stat().st_mtime, found), key=lambda p: p[0])
    if newest is None:
        return
    before, now = flatten(newest[1]["identity"]), flatten(experiment.identity())
    changed = [k for k in sorted(before | now) if before.get(k) != now.get(k)]
    told = ", ".join(f"{k}: {before.get(k)} -> {now.get(k)}" for k in changed[:5])
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    progress.note(f"a new run, {experiment.id}: differs from {newest[1]['id']} in {told}{more}")


def central_twin(experiment: Experiment) -> Experiment:
    """The same adapter, steps and rounds with all the data in one place."""
    alone = experiment.federation.model_copy(
        update={"clients": 1, "clients_per_round": 1, "compute": "full", "compute_shares": None}
    )
    whole = experiment.partition.model_copy(update={"kind": "iid", "min_size": 1})
    return experiment.model_copy(
        update={"name": f"{experiment.name}-central", "federation": alone, "partition": whole}
    )
