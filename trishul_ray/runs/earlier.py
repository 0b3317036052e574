"""Earlier runs of a call: a finished run is read and mended, a shorter one extended."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from trishul_ray.errors import ArtifactsError, CorruptFileError, InputError, RunError, join_limited
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import local_sources
from trishul_ray.experiment.yaml_files import parse_yaml
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.messages import changed_sources
from trishul_ray.federation.prepare import Prepared, prepare_run
from trishul_ray.federation.schedule import depends_on_rounds
from trishul_ray.federation.server import RunResult
from trishul_ray.methods.base import build_method
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.pretraining import ensure_pretrained
from trishul_ray.plugins.registry import fault_of
from trishul_ray.report.summary import TABLES, RunSummary, unscored, write_result
from trishul_ray.runs.folder import RunFolder
from trishul_ray.runs.results import file_hashes, write_tables
from trishul_ray.stages import Stages
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.storage.store import Store
from trishul_ray.tracking.progress import RunProgress

if TYPE_CHECKING:
    from trishul_ray.runs.export import Export


def read_finished(
    experiment: Experiment, home: Store, progress: RunProgress
) -> tuple[RunSummary | None, str]:
    """Return the result of an earlier call, and what it lacks of the scores asked for now.

    There is none if the run has not finished, or its result.json is corrupt.
    """
    try:
        summary = RunSummary.read(home)
    except FileNotFoundError:
        pass
    except CorruptFileError as error:
        progress.note(f"{error}; it will be written again")
    else:
        return summary, unscored(experiment, summary.scored_rounds)
    try:
        config = parse_yaml(home.read("config.yaml"))
        before = experiment.evaluation.model_copy(update={"every": config["evaluation"]["every"]})
        return None, unscored(experiment, before.scored_rounds(experiment.federation.rounds))
    except (FileNotFoundError, yaml.YAMLError, KeyError, TypeError):
        return None, ""  # not begun, or damaged: the result will say which rounds are scored


def check_sources(experiment: Experiment, summary: RunSummary, progress: RunProgress) -> None:
    """Raise an InputError if data or weights on this machine are not those of the run."""
    now, unknown = local_sources(experiment, progress.task_progress("checking data"))
    if unknown:
        progress.note(f"not compared with this finished run: {unknown}")
    if changed := changed_sources(summary.sources, now):
        raise InputError(
            f"the {changed} of run {experiment.id} have changed since it finished: restore them, "
            "or start over with --fresh"
        )


def restore_files(
    experiment: Experiment,
    summary: RunSummary,
    run_folder: RunFolder,
    progress: RunProgress,
    *,
    extras: bool,
) -> RunSummary:
    """Write damaged files of a finished run again, from its last checkpoint; return its result.

    With ``extras``, also those that a run without them left out; result.json then lists them, and
    says that they are not logged yet.

    Raises:
        ArtifactsError: The artifacts cannot be made.
    """
    listed, home = summary.files, run_folder.home
    damaged = summary.damaged_files(home)
    adds = extras and not any(n.startswith("figures/") for n in listed)
    if not damaged and not adds:
        return summary
    faults = " and ".join(dict.fromkeys(damaged.values())) or "missing"
    wanted = list(damaged)
    names = join_limited(wanted, 3) or "figures and model"
    try:
        checkpoint = run_folder.checkpoints.newest()
        if checkpoint is None or not checkpoint.is_last(experiment.federation.rounds):
            raise RunError("its last checkpoint is missing or corrupt; --fresh runs it again")
        with scratch_folder("results") as scratch:
            folder = Path(scratch)
            write_tables(experiment, checkpoint, folder)
            if adds or not damaged.keys() <= set(TABLES):
                attempt = checkpoint.attempt
                export = _artifacts_again(experiment, attempt, run_folder, folder, progress)
                summary = replace(summary, export=asdict(export))
            hashes = file_hashes(folder)
            if adds:
                wanted += [name for name in hashes if name not in listed]
            home.upload_folder(folder, wanted)
            written = {name: hashes[name] for name in wanted}
            if adds or written.items() - summary.sha256.items():
                summary = replace(
                    summary,
                    files=sorted({*listed, *wanted}),
                    sha256={**summary.sha256, **written},
                    logged=summary.logged_to is None,
                )
                write_result(home, summary)
    except (InputError, RunError, FileNotFoundError) as error:
        if adds and isinstance(error, ArtifactsError):
            raise
        progress.note(f"{faults} in {home.uri} and cannot be restored: {names} ({error})")
    else:
        progress.note(f"{faults} in {home.uri}, restored from the last checkpoint: {names}")
    return summary


def _artifacts_again(
    experiment: Experiment, attempt: str, run_folder: RunFolder, folder: Path, progress: RunProgress
) -> "Export":
    """Make the artifacts of a finished run in a folder, from its last checkpoint."""
    prepared = prepare_run(experiment, progress.task_progress("preparing data"))
    backbone = Backbone.of(experiment.model, experiment.storage.places)
    ensure_pretrained(backbone, progress.task_progress("backbone"), on_ray=False)
    result = InlineDriver(experiment, prepared, attempt).final()
    with _no_score_lost(run_folder):
        from trishul_ray.runs.artifacts import write_artifacts  # as below

        return write_artifacts(experiment, prepared, result, folder, run_folder.home)


def add_artifacts(
    experiment: Experiment,
    prepared: Prepared,
    result: RunResult,
    run_folder: RunFolder,
    folder: Path,
    summary: RunSummary,
) -> RunSummary:
    """Write figures and model of a finished run into an empty ``folder``, and from there into its.

    Returns its new result, which is written, too.

    Raises:
        ArtifactsError: They cannot be made or stored; the result stays as it was.
    """
    home = run_folder.home
    with _no_score_lost(run_folder):
        # Imports matplotlib and PEFT, which takes seconds.
        from trishul_ray.runs.artifacts import write_artifacts

        export = write_artifacts(experiment, prepared, result, folder, home)
        hashes = file_hashes(folder)
        summary = replace(
            summary,
            export=asdict(export),
            files=sorted({*summary.files, *hashes}),
            sha256=summary.sha256 | hashes,
        ).written()
        home.upload_folder(folder)
        write_result(home, summary)
    return summary


@contextmanager
def _no_score_lost(run_folder: RunFolder) -> Iterator[None]:
    """Raise whatever fails inside, of a plug-in, a disk or a bug, as an ArtifactsError."""
    try:
        yield
    except Exception as error:
        raise ArtifactsError(
            f"figures and model of run {run_folder.id} could not be written: {fault_of(error)}. "
            "The run has finished: its scores are kept in "
            f"{run_folder.home.place('result.json')}, and repeating it tries figures and model "
            "alone"
        ) from error


def extend_shorter(
    experiment: Experiment,
    prepared: Prepared,
    folder: RunFolder,
    attempt: str,
    progress: RunProgress,
) -> None:
    """Begin a new run with the rounds of one that differs in a smaller number of rounds alone.

    Its rounds are the same where nothing but the end depends on that number: not with a schedule
    over the run, or a stage or a method that reads it, nor where the last round was diagnosed
    because it was the last, or rounds that are asked for have no score.
    """
    own = folder.checkpoints
    by_rounds = depends_on_rounds(experiment.optimizer)
    by_rounds = by_rounds or any(stage.reads_rounds for stage in Stages.of(experiment))
    by_rounds = by_rounds or build_method(experiment.method).reads_rounds
    if by_rounds or own.store.names():
        return
    there = set(folder.home.parent().names())
    measured = experiment.evaluation
    for rounds in range(experiment.federation.rounds - 1, 0, -1):
        federation = experiment.federation.model_copy(update={"rounds": rounds})
        shorter = experiment.model_copy(update={"federation": federation})
        if shorter.id not in there:
            continue
        try:
            checkpoint = open_checkpoints(shorter).newest()
        except FileNotFoundError:  # it is being run, and has a newer one by now
            continue
        if checkpoint is None or changed_sources(checkpoint.sources, prepared.sources):
            continue
        if checkpoint.round == rounds and rounds % (measured.diagnostics_every or 1):
            continue
        scored = {record.round for record in checkpoint.records if record.scored}
        if any(r not in scored for r in experiment.scored_rounds if r < checkpoint.round):
            continue
        own.save(replace(checkpoint, experiment_id=experiment.id, attempt=attempt))
        progress.note(f"extending run {shorter.id}, which has {checkpoint.round} of these rounds")
        return
