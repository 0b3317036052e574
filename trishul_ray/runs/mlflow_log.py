"""Log a run in MLflow, with its names, parameters, tags and totals.

Rounds are logged during the run. If the store lacks the result of a finished run, the run is logged
from its files, as a new MLflow run with the tag ``trishul.reused``.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from trishul_ray.config.fields import RateSource
from trishul_ray.data.coverage import Coverage
from trishul_ray.errors import InputError, StorageError
from trishul_ray.experiment import Experiment
from trishul_ray.report.summary import RunSummary, flatten, read_metrics
from trishul_ray.spectral.diagnostics import DIAGNOSTICS
from trishul_ray.stages import STAGES
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.storage.store import Store
from trishul_ray.tracking.mlflow import (
    ID_TAG,
    RESULT_TAG,
    MlflowRun,
    Tracker,
    dataset_input,
    find_runs,
)
from trishul_ray.tracking.store import SCORES, tracking_uri, ui_command
from trishul_ray.tracking.sweep import AXIS_TAG, CELL_TAG
from trishul_ray.version import versions

#: Tag of a run that was logged from the files of its result.
REUSED_TAG = "trishul.reused"


def describe(experiment: Experiment) -> str:
    """Describe a run in one line: method, dataset, backbone, cohort, rounds, stages and id."""
    fed = experiment.federation
    strength = experiment.method.label
    method = experiment.method.name + (f" ({strength})" if strength else "")
    stages = {name: section.identity() for name, section in experiment.stages.items()}
    parts = [
        f"{method} on {experiment.data.name}",
        experiment.model.name,
        f"{fed.clients_per_round} of {fed.clients} clients per round",
        f"{fed.rounds} rounds",
        *(f"{field}={value}" for field, value in flatten(stages).items()),
        f"id {experiment.id}",
    ]
    return ", ".join(parts)


def mlflow_command(experiment: Experiment) -> str | None:
    """Return the command that opens the MLflow UI, or None if the run is not logged."""
    return ui_command(_uri(experiment)) if experiment.tracking.mlflow else None


def open_run(
    experiment: Experiment, attempt: str, data: Coverage, sources: Mapping[str, str],
    tags: Mapping[str, str], unread: Collection[str] = (),
) -> Tracker:  # fmt: skip
    """Open the MLflow run of an experiment's attempt; ``data`` describes the rows that it uses.

    Raises:
        InputError: The store cannot be opened.
    """
    options, name = experiment.tracking, tags.get(CELL_TAG) or run_name(experiment)
    if not options.mlflow:
        return Tracker()
    rows = {"rows": {"train": asdict(data.train), "test": asdict(data.test)}}
    splits = (("train", "training", data.train), ("test", "evaluation", data.test))
    content = hashlib.sha256(sources.get("rows", "unknown").encode()).hexdigest()[:16]
    return MlflowRun(
        _uri(experiment), options.experiment, attempt, name,
        params={
            **{key: text for key, text in tags.items() if key.startswith(AXIS_TAG)},
            **{k: v for k, v in flatten(experiment.to_dict()).items() if k not in unread},
            **flatten(rows),
        },
        tags={
            **tags,
            ID_TAG: experiment.id,
            "mlflow.note.content": f"{describe(experiment)}, {name}; {data.sentence}",
            "trishul.data": data.sentence,
            "trishul.part": str(data.part),
            **{f"version.{k}": v for k, v in versions().items()},
        },
        inputs=[
            dataset_input(
                f"{data.dataset} {split}", content, data.source, context,
                {**asdict(used), "revision": data.revision},
            )
            for split, context, used in splits
        ],
        parent=options.parent_run,
    )  # fmt: skip


def run_name(experiment: Experiment) -> str:
    """Build a name that distinguishes runs: method, λ, partition, budget, rate, draw, seed, label.

    The name contains the learning rate if it was set, for example by a search. Runs on user data
    without a label are named after the data.
    """
    parts = [experiment.method.name]
    if strength := experiment.method.label:
        parts.append(strength)
    split = experiment.partition
    parts.append(f"α={split.alpha:g}" if split.kind == "dirichlet" else split.kind)
    if "budget" in experiment.fields_read:
        parts.append(f"rank={experiment.lora_rank}")
    if experiment.optimizer.lr_source is RateSource.USER:
        parts.append(f"lr={experiment.optimizer.lr:.3g}")
    if experiment.draw is not None:
        parts.append(f"draw={experiment.draw}")
    label = experiment.name
    if experiment.data.path is not None and label == type(experiment).model_fields["name"].default:
        label = Path(experiment.data.path).name or label
    return " ".join([*parts, f"seed={experiment.seed}", label])


def grouped_metrics(record: Mapping[str, float]) -> dict[str, float]:
    """Rename the metrics of a round to ``group/name``, by which MLflow groups them.

    Scores and losses are in the first group: ``Score/accuracy``, ``Score/loss``.
    """
    return {_grouped(name): value for name, value in record.items() if name != "round"}


def _grouped(name: str) -> str:
    if name in ("seconds", "client_seconds"):
        return {"seconds": "seconds/round", "client_seconds": "seconds/client"}[name]
    if name.startswith(("uploaded_", "downloaded_")) or name == "refused_uploads":
        return f"traffic/{name}"
    if name in DIAGNOSTICS or name == "aggregation_error":
        return f"cores/{name}"
    # The prox, the changes of the clients' cores, the validation rows, and the stages.
    groups = dict.fromkeys(("svt", "delta", "validation"), frozenset[str]())
    groups |= {section: stage.numbers for section, stage in STAGES.items.items()}
    for group, names in groups.items():
        if name in names or name.startswith(f"{group}_"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return f"{SCORES}{name}"


def close_run(
    run: Tracker, summary: RunSummary, home: Store,
    scores: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:  # fmt: skip
    """End the MLflow run with the run's totals and files; return the parts that MLflow rejected."""
    if not isinstance(run, MlflowRun):
        return []
    metric, hardware = summary.headline, summary.hardware
    chosen = f"best_on_{summary.best['chosen_on']}"
    metrics = {
        f"{chosen}/{metric}": summary.best[metric],
        f"{chosen}/round": summary.best["round"],
        f"untuned/{metric}": summary.untouched[metric],
        "total/uploaded_parameters": summary.uploaded_parameters,
        "total/downloaded_parameters": summary.downloaded_parameters,
        "total/uploaded_bytes": summary.uploaded_bytes,
        "total/downloaded_bytes": summary.downloaded_bytes,
        "total/wall_seconds": summary.wall_seconds,
        **scores,
    }
    tags = {
        "hardware.processor": hardware.processor,
        "hardware.cpus": hardware.cpus,
        "hardware.gpus": ", ".join(hardware.gpus) or "none",
        **{f"source.{name}": source for name, source in summary.sources.items()},
        **{f"trishul.{k}": r["sentence"] for k, r in summary.reports.items() if "sentence" in r},
    }
    with scratch_folder("results") as scratch:
        for name in filter(home.exists, ("result.json", *summary.files)):
            file = Path(scratch, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(home.read(name))
        return run.end(
            "FINISHED", metrics=metrics, tags=tags, folder=Path(scratch), result=summary.checksum
        )


def log_finished(
    experiment: Experiment, summary: RunSummary, home: Store, tags: Mapping[str, str],
    scores: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:  # fmt: skip
    """Log a finished run if tracking is on, unless MLflow already has its result and scores.

    Returns:
        The parts that MLflow rejected.
    """
    options = experiment.tracking
    if not options.mlflow:
        return []
    try:
        found = find_runs(_uri(experiment), options.experiment, summary.attempt)
        ended = [each.data for each in found if each.info.status == "FINISHED"]
        logged = {data.tags.get(RESULT_TAG): data.metrics.items() for data in ended}
        if summary.checksum in logged and scores.items() <= logged[summary.checksum]:
            return []
        tags = {**tags, REUSED_TAG: "True"}  # for the new MLflow run
        sources, unread = summary.sources, summary.unread_fields
        run = open_run(experiment, summary.attempt, summary.data, sources, tags, unread)
        for record in read_metrics(home):
            run.round(int(record["round"]), grouped_metrics(record))
        return close_run(run, summary, home, scores)
    except (InputError, StorageError, FileNotFoundError) as error:
        return [str(error)]


def delete_logged(experiment: Experiment, attempt: str) -> list[str]:
    """Delete the MLflow run of an attempt; return the parts that MLflow rejected."""
    if not (experiment.tracking.mlflow and attempt):
        return []
    try:
        find_runs(_uri(experiment), experiment.tracking.experiment, attempt, delete=True)
    except InputError as error:
        return [str(error)]
    return []


def _uri(experiment: Experiment) -> str:
    return tracking_uri(experiment.tracking.uri, experiment.storage.runs)
