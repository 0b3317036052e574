"""Builds what a worker keeps resident: backbone with adapters, data, task, method.

Built from the experiment alone, so that any process on any node builds the same.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from trishul_ray.adapters.targets import find_layers, scored_layers
from trishul_ray.data.coverage import Coverage, measure_coverage
from trishul_ray.data.partition import Partition, partition, partition_column
from trishul_ray.data.prepare import encode, prepare
from trishul_ray.data.prepared import PreparedDataset, Progress
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.methods.base import Site, build_method
from trishul_ray.models.backbone import Backbone
from trishul_ray.rng import numpy_rng
from trishul_ray.storage import Places
from trishul_ray.tasks.base import Task
from trishul_ray.tasks.build import build_task


@dataclass(frozen=True)
class Prepared:
    """What is computed once, by the driver, and handed to every worker as it is.

    Attributes:
        dataset: as the task trains on it.
        shards: which training rows each client holds.
        sources: what the data are; see :class:`~trishul_ray.federation.messages.Blueprint`.
    """

    dataset: PreparedDataset
    shards: Partition
    sources: dict[str, str] = field(default_factory=dict)


def prepare_run(experiment: Experiment, progress: Progress | None = None) -> Prepared:
    """Data and partition of an experiment; cached on disk.

    Raises:
        InputError: no such dataset, or it cannot be dealt out as asked.
    """
    dataset, _, sources = _dataset_and_task(experiment, Backbone.of(experiment), progress)
    return Prepared(dataset, deal(dataset, experiment), sources)


def prepare_rows(experiment: Experiment, progress: Progress | None = None) -> Prepared:
    """As :func:`prepare_run`, but with the raw texts: the same partition, and no backbone needed.

    Raises:
        InputError: no such dataset, or it cannot be dealt out as asked.
    """
    places = Places.of(experiment)
    dataset = prepare(experiment.data, cache=places.cache, hub=places.hub, progress=progress)
    return Prepared(dataset, deal(dataset, experiment), {"rows": dataset.fingerprint})


def coverage_of(experiment: Experiment, dataset: PreparedDataset) -> Coverage:
    """Return how many rows of a dataset the experiment trains on and scores."""
    return measure_coverage(dataset, experiment.data.train_limit, experiment.evaluation.limit)


def deal(dataset: PreparedDataset, experiment: Experiment) -> Partition:
    """Which training rows each client holds.

    Raises:
        InputError: the rows cannot be dealt out as asked.
    """
    rows = np.arange(len(dataset.train))
    if experiment.data.train_limit is not None:
        rng = numpy_rng(experiment.seed, "train-limit")
        rows = np.sort(rng.permutation(rows)[: experiment.data.train_limit])
    shards = partition(
        partition_column(dataset.train, experiment.partition)[rows],
        experiment.partition,
        experiment.federation.clients,
        experiment.seed,
    )
    return Partition(rows[shards.permutation], shards.offsets)


def _dataset_and_task(
    experiment: Experiment, backbone: Backbone, progress: Progress | None = None
) -> tuple[PreparedDataset, Task, dict[str, str]]:
    """The dataset as the task trains on it, the task, and what the data are."""
    places = backbone.places
    dataset = prepare(experiment.data, cache=places.cache, hub=places.hub, progress=progress)
    sources = {"rows": dataset.fingerprint}
    task = build_task(experiment, dataset.info, backbone)
    if task.encoder is not None:
        dataset = encode(dataset, task.encoder, cache=places.cache, progress=progress)
        sources["tokens"] = dataset.fingerprint
    return dataset, task, sources


def check_fits(experiment: Experiment) -> None:
    """Refuse a budget that the backbone cannot carry, without loading its weights.

    Raises:
        InputError: a rank or heads x rank exceed a layer's width, a target is unknown, ...
    """
    site = build_site(Backbone.of(experiment).meta_model(), experiment)
    adapters = build_method(experiment.method, experiment.adapter).adapters(site)
    for layer in site.layers:
        rank = getattr(adapters.get(layer.name), "rank", 0)
        width = min(layer.d_out, layer.d_in)
        if rank > width:
            options = experiment.adapter
            given = f"adapter.rank={options.rank}"
            if options.rank is None:
                given = f"budget={experiment.budget}"
            raise InputError(
                f"{given} gives {experiment.method.name} a rank of {rank} on {layer.name} "
                f"({layer.d_out}x{layer.d_in}), which must be at most its width {width}: take less"
            )


def build_site(model: torch.nn.Module, experiment: Experiment) -> Site:
    """Where adapters may go on a backbone (real, or on the meta device: then norms are zero)."""
    layers = tuple(find_layers(model, experiment.adapter.targets))
    scores = build_method(experiment.method).block_scores
    scored = tuple(scored_layers(model, layers, scores))
    norms = {}
    for layer in dict.fromkeys((*layers, *scored)):
        weight = model.get_submodule(layer.name).weight
        assert isinstance(weight, torch.Tensor)
        on_meta = weight.device.type == "meta"
        norms[layer.name] = 0.0 if on_meta else float(weight.detach().double().square().sum())
    return Site(layers, norms, experiment.lora_rank, experiment.adapter, scored=scored)
