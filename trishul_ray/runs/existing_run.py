"""Reuse runs of earlier calls.

A finished run is read and restored, and a shorter run is extended.
"""

from contextlib import suppress
from dataclasses import replace

import yaml

from trishul_ray.errors import ArtifactsError, CorruptFileError, InputError, RunError, join_limited
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import local_sources
from trishul_ray.experiment.yaml_files import parse_yaml
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.messages import changed_sources
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.worker.schedule import depends_on_rounds
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.models.pretraining import ensure_pretrained
from trishul_ray.report.summary import TABLES, RunSummary, missing_scores
from trishul_ray.runs.artifacts import write_results
from trishul_ray.runs.folder import RunFolder
from trishul_ray.stages import Stages
from trishul_ray.storage.store import Store
from trishul_ray.tracking.progress import RunProgress


def read_finished(
    experiment: Experiment, home: Store, progress: RunProgress
) -> tuple[RunSummary | None, str]:
    """Read the result of a finished run.

    Returns:
        The result, or None if the run has not finished or its result.json is corrupt; and the
        requested scores that an existing run lacks, as a phrase.
    """
    try:
        summary = RunSummary.read(home)
    except FileNotFoundError:
        pass
    except CorruptFileError as error:
        progress.note(f"{error}; rewriting it")
    else:
        return summary, missing_scores(experiment, summary.scored_rounds)
    try:
        config = parse_yaml(home.read("config.yaml"), texts=True)
        before = experiment.evaluation.model_copy(
            update={"every": int(config["evaluation"]["every"])}
        )
        return None, missing_scores(experiment, before.scored_rounds(experiment.federation.rounds))
    except (FileNotFoundError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None, ""  # not started, or damaged: the result will list the scored rounds


def check_sources(experiment: Experiment, summary: RunSummary, progress: RunProgress) -> None:
    """Raise an InputError if data or weights on this machine differ from the run's."""
    now, unknown = local_sources(experiment, progress.task_progress("checking data"))
    if unknown:
        progress.note(f"not compared with this finished run: {unknown}")
    if changed := changed_sources(summary.sources, now):
        raise InputError(
            f"the {changed} of run {experiment.id} have changed since it finished; restore them, "
            "or start over with --fresh"
        )


def restore_files(
    experiment: Experiment, summary: RunSummary, folder: RunFolder, progress: RunProgress,
    *, extras: bool,
) -> RunSummary:  # fmt: skip
    """Restore damaged files of a finished run from its last checkpoint.

    With ``extras``, also export the model if the run has none, such as a run of a sweep.

    Returns:
        The content of result.json.

    Raises:
        ArtifactsError: The model cannot be exported.
    """
    adds, damaged = extras and summary.export is None, summary.damaged_files(folder.home)
    model = adds or not damaged.keys() <= {*TABLES}
    if not (damaged or model):
        return summary
    faults = " and ".join(dict.fromkeys(damaged.values())) or "not exported"
    faults, names = f"{faults} in {folder.home.uri}", join_limited(list(damaged), 3) or "its model"
    try:
        checkpoint = folder.checkpoints.newest()
        if checkpoint is None or checkpoint.round != experiment.federation.rounds:
            raise RunError("its last checkpoint is missing or corrupt; use --fresh to run it again")
        if model:
            backbone = backbone_of(experiment.model, experiment.storage.paths)
            ensure_pretrained(backbone, progress.task_progress("backbone"), on_ray=False)
        summary = write_results(experiment, checkpoint, summary, folder.home, model=model)
    except (InputError, RunError, FileNotFoundError) as error:
        if adds and isinstance(error, ArtifactsError):
            raise
        progress.note(f"cannot restore {names} ({faults}): {error}")
    else:
        if damaged:
            progress.note(f"restored {names} ({faults}) from the last checkpoint")
    return summary


def extend_shorter(
    experiment: Experiment, prepared: Prepared, folder: RunFolder, attempt: str,
    progress: RunProgress,
) -> None:  # fmt: skip
    """Start a new run from a run that differs only in having fewer rounds.

    The shared rounds must be equal: no schedule or stage depends on the number of rounds, all
    requested scores exist, and the last round has no diagnostics merely because it was the last.
    """
    fed, own = experiment.federation, folder.checkpoints
    varies = any(stage.reads_rounds for stage in Stages.of(experiment))
    if own.store.names() or varies or depends_on_rounds(experiment.optimizer):
        return
    there = set(folder.home.parent().names())
    for rounds in range(fed.rounds - 1, 0, -1):
        federation = fed.model_copy(update={"rounds": rounds})
        shorter = experiment.model_copy(update={"federation": federation})
        with suppress(FileNotFoundError):  # another process runs it and removes this checkpoint
            checkpoint = open_checkpoints(shorter).newest() if shorter.id in there else None
            if checkpoint is None or changed_sources(checkpoint.sources, prepared.sources):
                continue
            if any(stack.outdated for stack in checkpoint.stacks):
                continue
            number, every = checkpoint.round, experiment.evaluation.diagnostics_every
            scored = {record.round for record in checkpoint.records if record.scored}
            missing = {r for r in experiment.scored_rounds if r < number} - scored
            if missing or (number == rounds and number % (every or 1)):
                continue
            own.save(replace(checkpoint, experiment_id=experiment.id, attempt=attempt))
            progress.note(f"extending run {shorter.id}, which has {number} of these rounds")
            return
