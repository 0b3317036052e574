"""What earlier runs mean for a new one: rounds it shares with a shorter run, fields that differ."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trishul_ray.errors import CorruptFileError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.messages import changed_sources
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.schedule import depends_on_rounds
from trishul_ray.runs.results import flatten, read_result
from trishul_ray.storage import Store
from trishul_ray.tracking.progress import RunProgress

#: How many finished runs a new one is compared with.
_COMPARED_RUNS = 50


def note_differences(experiment: Experiment, home: Store, progress: RunProgress) -> None:
    """Name the fields in which a new run differs from the most similar finished one, if related.

    Related are runs of the same name on the dataset and backbone of the same names or paths, whose
    content may have changed; the newest are looked at.
    """
    if home.exists("config.yaml") or not home.is_local:
        return
    now = flatten(experiment.identity())
    files = Path(home.root).parent.glob("*/result.json")
    newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)[:_COMPARED_RUNS]
    similar: tuple[list[str], dict[str, Any], str] | None = None
    for path in newest:
        try:
            summary = read_result(Store.open(str(path.parent)))
        except (FileNotFoundError, CorruptFileError):
            continue
        if summary["name"] != experiment.name:
            continue
        if _subject(summary["config"]) != _subject(experiment.to_dict()):
            continue
        before = flatten(summary["identity"])
        changed = [k for k in sorted(before | now) if before.get(k) != now.get(k)]
        if similar is None or len(changed) < len(similar[0]):
            similar = changed, before, summary["id"]
    if similar is None:
        return
    changed, before, id = similar
    fields = ", ".join(f"{k}: {before.get(k)} -> {now.get(k)}" for k in changed[:5])
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    progress.note(f"a new run, {experiment.id}: differs from {id} in {fields}{more}")


def _subject(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the dataset and the backbone that a configuration names."""
    return config["data"]["name"], config["data"].get("path"), config["model"]["name"]


def extend_shorter(
    experiment: Experiment, prepared: Prepared, home: Store, attempt: str, progress: RunProgress
) -> None:
    """Begin a new run with the rounds of one that differs in a smaller number of rounds alone.

    Its rounds are the same where nothing but the end depends on that number: not with a schedule
    over the run, nor where the last round was diagnosed because it was the last, or rounds that are
    asked for have no score.
    """
    own = open_checkpoints(experiment)
    if depends_on_rounds(experiment.optimizer) or own.store.names():
        return
    there = set(home.parent().names())
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
        scored = {record["round"] for record in checkpoint.records if "loss" in record}
        if any(r not in scored for r in experiment.scored_rounds if r < checkpoint.round):
            continue
        own.save(replace(checkpoint, experiment_id=experiment.id, attempt=attempt))
        progress.note(f"extending run {shorter.id}, which has {checkpoint.round} of these rounds")
        return
