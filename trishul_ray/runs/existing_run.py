"""Runs that exist before a call: a finished run is read and restored, a shorter one extended."""

from dataclasses import replace
from pathlib import Path

import yaml

from trishul_ray.errors import ArtifactsError, CorruptFileError, InputError, RunError, join_limited
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import local_sources
from trishul_ray.experiment.yaml_files import parse_yaml
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.messages import changed_sources
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.worker.schedule import depends_on_rounds
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.pretraining import ensure_pretrained
from trishul_ray.report.summary import TABLES, RunSummary, unscored, write_result
from trishul_ray.runs.folder import RunFolder
from trishul_ray.runs.results import file_hashes, write_tables
from trishul_ray.stages import Stages
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.storage.store import Store
from trishul_ray.tracking.progress import RunProgress


def read_finished(
    experiment: Experiment, home: Store, progress: RunProgress
) -> tuple[RunSummary | None, str]:
    """Return the result of a finished run, and which requested scores an existing run lacks.

    The result is None if the run has not finished, or if its result.json is corrupt.
    """
    try:
        summary = RunSummary.read(home)
    except FileNotFoundError:
        pass
    except CorruptFileError as error:
        progress.note(f"{error}; it is written again")
    else:
        return summary, unscored(experiment, summary.scored_rounds)
    try:
        config = parse_yaml(home.read("config.yaml"))
        before = experiment.evaluation.model_copy(update={"every": config["evaluation"]["every"]})
        return None, unscored(experiment, before.scored_rounds(experiment.federation.rounds))
    except (FileNotFoundError, yaml.YAMLError, KeyError, TypeError):
        return None, ""  # not started, or damaged: the result will list the scored rounds


def check_sources(experiment: Experiment, summary: RunSummary, progress: RunProgress) -> None:
    """Raise an InputError if data or weights on this machine differ from those of the run."""
    now, unknown = local_sources(experiment, progress.task_progress("checking data"))
    if unknown:
        progress.note(f"not compared with this finished run: {unknown}")
    if changed := changed_sources(summary.sources, now):
        raise InputError(
            f"the {changed} of run {experiment.id} have changed since it finished: restore them, "
            "or start over with --fresh"
        )


def restore_files(
    experiment: Experiment, summary: RunSummary, folder: RunFolder, progress: RunProgress,
    *, extras: bool,
) -> RunSummary:  # fmt: skip
    """Write damaged files of a finished run again, from its last checkpoint; return its result.

    With ``extras``, also export the model that a run in a sweep left out.

    Raises:
        ArtifactsError: The model cannot be exported.
    """
    home, adds = folder.home, extras and summary.export is None
    damaged = summary.damaged_files(home)
    if not (damaged or adds):
        return summary
    names = join_limited(list(damaged), 3) or "its model"
    faults = " and ".join(dict.fromkeys(damaged.values())) or "not exported"
    try:
        checkpoint = folder.checkpoints.newest()
        if checkpoint is None or not checkpoint.is_last(experiment.federation.rounds):
            raise RunError("its last checkpoint is missing or corrupt; --fresh runs it again")
        with scratch_folder("results") as scratch:
            files = Path(scratch)
            if tables := damaged.keys() & {*TABLES}:
                write_tables(experiment, checkpoint, files)
                home.upload_folder(files, sorted(tables))
                found = {name: file_hashes(files)[name] for name in tables}
                if found.items() - summary.sha256.items():
                    logged = summary.logged_to is None
                    summary = replace(summary, sha256=summary.sha256 | found, logged=logged)
                    write_result(home, summary)
            if adds or damaged.keys() - {*TABLES}:
                backbone = Backbone.of(experiment.model, experiment.storage.places)
                ensure_pretrained(backbone, progress.task_progress("backbone"), on_ray=False)
                from trishul_ray.runs.artifacts import add_model  # imports PEFT

                summary = add_model(experiment, summary, home, files)
    except (InputError, RunError, FileNotFoundError) as error:
        if adds and isinstance(error, ArtifactsError):
            raise
        progress.note(f"{faults} in {home.uri} and cannot be restored: {names} ({error})")
    else:
        if damaged:
            progress.note(f"{faults} in {home.uri}, restored from the last checkpoint: {names}")
    return summary


def extend_shorter(
    experiment: Experiment, prepared: Prepared, folder: RunFolder, attempt: str,
    progress: RunProgress,
) -> None:  # fmt: skip
    """Start a new run with the rounds of an existing run that only differs in having fewer rounds.

    The rounds must be equal: no schedule or stage depends on the number of rounds, all
    requested scores exist, and the last round has no diagnostics only because it was the last.
    """
    own, fed, measured = folder.checkpoints, experiment.federation, experiment.evaluation
    stages = Stages.of(experiment)
    if depends_on_rounds(experiment.optimizer) or any(each.reads_rounds for each in stages):
        return
    if own.store.names():
        return
    there = set(folder.home.parent().names())
    for rounds in range(fed.rounds - 1, 0, -1):
        federation = fed.model_copy(update={"rounds": rounds})
        shorter = experiment.model_copy(update={"federation": federation})
        if shorter.id not in there:
            continue
        try:
            checkpoint = open_checkpoints(shorter).newest()
        except FileNotFoundError:  # another process runs it and has removed this checkpoint
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
