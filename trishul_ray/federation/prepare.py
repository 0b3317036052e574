"""Prepare the data and the partition of an experiment.

The driver does this once; every worker receives the result.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from trishul_ray.data.choose_rows import choose_rows, encode, find_repeated
from trishul_ray.data.coverage import Coverage, measure_coverage
from trishul_ray.data.dataset import PreparedDataset, ProgressCallback
from trishul_ray.data.partition import Partition
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError, first_line
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import check_content
from trishul_ray.experiment.rows import partition_rows
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.models.python_model import PassedModel, passed_model
from trishul_ray.stages import Stages
from trishul_ray.tasks.base import Task
from trishul_ray.tasks.build import build_task
from trishul_ray.tasks.verbalizer import Verbalizer


@dataclass(frozen=True)
class Prepared:
    """The data of a run, computed once by the driver and sent to every worker.

    Attributes:
        dataset: The dataset as the task trains on it.
        shards: The training rows of each client.
        sources: Hashes of the data; see :class:`~trishul_ray.federation.messages.WorkerSpec`.
        passed: The backbone, if it was passed from Python.
        cut: Remarks on the truncation of rows by the encoding, with counts.
        tokens: int64 [C], number of labels in the rows of each client; only if clients are weighted
            by them.
    """

    dataset: PreparedDataset
    shards: Partition
    sources: dict[str, str] = field(default_factory=dict)
    passed: PassedModel | None = None
    cut: tuple[str, ...] = ()
    tokens: np.ndarray | None = None


def prepare_run(experiment: Experiment, progress: ProgressCallback | None = None) -> Prepared:
    """Prepare the data and the partition of an experiment; the data are cached on disk.

    Raises:
        InputError: The dataset was not found, has changed since the experiment was loaded, or
            cannot be partitioned as configured.
    """
    check_content(experiment)
    backbone = backbone_of(experiment.model, experiment.storage.paths)
    rows, sources = _chosen_rows(experiment, progress)
    shards = partition_rows(rows, experiment)
    dataset, task, tokens = _encode_rows(rows, experiment, backbone, progress)
    for stage in Stages.of(experiment):
        stage.check_rows(task, shards.sizes)
    passed = passed_model(experiment.model)
    if passed is not None:
        _check_passed(backbone, task, dataset)
    cut = [
        f"{name} rows: {remark}"
        for name in ("train", "validation", "test")
        if name in dataset.split_names
        for remark in task.remarks(dataset.split(name))
    ]
    if {"input_ids", "length"} <= {*dataset.train.columns}:
        repeated = find_repeated(dataset.train.read(), dataset.test.read())
        if repeated.any():
            cut.append(f"{repeated.sum():,} of {len(repeated):,} train rows are also test rows")
    labels = _client_tokens(experiment, task, dataset, shards)
    return Prepared(dataset, shards, sources | tokens, passed, tuple(cut), labels)


def _client_tokens(
    experiment: Experiment, task: Task, dataset: PreparedDataset, shards: Partition
) -> np.ndarray | None:
    """Count the labels in each client's rows [C] if they weight the clients, or return None."""
    if experiment.federation.weighting != "tokens":
        return None
    if (counts := task.count_labels(dataset.train)) is None:
        raise InputError(
            f"federation.weighting='tokens' weights clients by label tokens, but task "
            f"{type(task).__name__} has none; allowed: uniform, size"
        )
    return np.add.reduceat(counts[shards.permutation], shards.offsets[:-1])


def _check_passed(backbone: Backbone, task: Task, dataset: PreparedDataset) -> None:
    """Check that a model passed from Python accepts rows of the dataset and returns logits.

    Raises:
        InputError: It does not; the message has the shapes of its input and output.
    """
    model = backbone.load(task.model_kind, task.num_classes, seed=0)
    rows = dataset.train.batch(np.arange(min(2, len(dataset.train))))
    inputs = task.inputs(task.prepare_batch(rows, "cpu", torch.float32))
    given = ", ".join(
        f"{name} {_shape(value)}" for name, value in inputs.items() if torch.is_tensor(value)
    )
    where = f"model {backbone.name}, on {len(rows['label'])} rows of dataset {dataset.info.name}"
    try:
        with torch.inference_mode():
            outputs = model(**inputs)
    except Exception as error:  # The module's code may raise anything.
        raise InputError(f"{where} ({given}), fails: {first_line(error)}") from error
    logits = getattr(outputs, "logits", outputs)
    if not torch.is_tensor(logits):
        raise InputError(
            f"{where}, returns {type(outputs).__name__}; return logits as a tensor or as "
            "an attribute `logits`"
        )
    wanted = [len(rows["label"]), task.num_classes]
    if list(logits.shape) != wanted or not logits.is_floating_point():
        raise InputError(
            f"{where}, returns {_shape(logits)}; return logits, a float for each of the "
            f"{task.num_classes} classes: {wanted}"
        )


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def prepare_rows(experiment: Experiment, progress: ProgressCallback | None = None) -> Prepared:
    """Prepare the same partition as :func:`prepare_run` over raw texts, without a backbone.

    Raises:
        InputError: The dataset was not found, or cannot be partitioned as configured.
    """
    dataset, sources = _chosen_rows(experiment, progress)
    return Prepared(dataset, partition_rows(dataset, experiment), sources)


def prepare_dataset(
    experiment: Experiment, progress: ProgressCallback | None = None
) -> tuple[PreparedDataset, Task, dict[str, str]]:
    """Prepare the dataset as the task trains on it, the task, and the hashes of the data."""
    check_content(experiment)
    backbone = backbone_of(experiment.model, experiment.storage.paths)
    rows, sources = _chosen_rows(experiment, progress)
    dataset, task, tokens = _encode_rows(rows, experiment, backbone, progress)
    return dataset, task, sources | tokens


def _chosen_rows(
    experiment: Experiment, progress: ProgressCallback | None
) -> tuple[PreparedDataset, dict[str, str]]:
    """Load the raw rows that the experiment uses, and the hash of the whole dataset."""
    paths = experiment.storage.paths
    rows = prepare(experiment.data, cache=paths.cache, hub=paths.hub, progress=progress)
    return choose_rows(rows, experiment.data, cache=paths.cache), {"rows": rows.fingerprint}


def _encode_rows(
    rows: PreparedDataset,
    experiment: Experiment,
    backbone: Backbone,
    progress: ProgressCallback | None,
) -> tuple[PreparedDataset, Task, dict[str, str]]:
    """Encode the rows for the task; return them, the task, and tokenizer-dependent sources."""
    task = build_task(experiment.task, rows.info, backbone)
    if task.encoder is None:
        return rows, task, {}
    dataset = encode(rows, task.encoder, cache=backbone.paths.cache, progress=progress)
    sources = {"tokens": dataset.fingerprint}
    if isinstance(task, Verbalizer):  # The names of the classes may be the answers.
        sources["answers"] = ",".join(map(str, task.answer_ids))
    return dataset, task, sources


def coverage_of(experiment: Experiment, prepared: Prepared) -> Coverage:
    """Count the rows of the dataset that the experiment trains on and scores, and the cuts."""
    limits = experiment.data.train_limit, experiment.evaluation.limit
    found = replace(measure_coverage(prepared.dataset, *limits), cut=prepared.cut)
    # more than published, because it includes groups of the training rows
    if experiment.data.test_groups:
        found = replace(found, test=replace(found.test, official=found.test.held))
    return found
