"""Builds what a worker keeps resident: backbone with adapters, data, task, method.

Built from the experiment alone, so that any process on any node builds the same.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from trishul_ray.adapters.attach import AdaptedModel, find_layers
from trishul_ray.adapters.budget import count_parameters
from trishul_ray.adapters.targets import scored_layers
from trishul_ray.data.base import PreparedDataset
from trishul_ray.data.coverage import Coverage, measure_coverage
from trishul_ray.data.encoding import encode
from trishul_ray.data.partition import Partition, partition, partition_column
from trishul_ray.data.sources import prepare
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.contract import Blueprint, changed_sources
from trishul_ray.federation.jobs import Arrays, to_tensors
from trishul_ray.federation.reduce import Expected, unit_sizes
from trishul_ray.federation.workbench import Workbench
from trishul_ray.methods.base import Method, Site
from trishul_ray.methods.registry import build_method
from trishul_ray.models.backbones import meta_backbone
from trishul_ray.models.compute import run_dtype
from trishul_ray.models.pretrain import ensure_backbone
from trishul_ray.models.shared import resident_backbone
from trishul_ray.rng import numpy_rng
from trishul_ray.tasks.base import Task
from trishul_ray.tasks.registry import build_task

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Places:
    """Where prepared data and backbones lie on this machine."""

    cache: Path
    hub: Path | None

    @classmethod
    def at(cls, cache: str | Path | None = None, hub: str | Path | None = None) -> "Places":
        """Those given, else of the environment, else the user's cache and no mirror."""
        cache = cache or os.environ.get("TRISHUL_CACHE") or "~/.cache/trishul"
        hub = hub or os.environ.get("TRISHUL_HUB")
        return cls(Path(cache).expanduser(), Path(hub).expanduser() if hub else None)

    @classmethod
    def of(cls, experiment: Experiment) -> "Places":
        """From the experiment's storage section; see :meth:`at`."""
        return cls.at(experiment.storage.cache, experiment.storage.hub)


@dataclass(frozen=True)
class Prepared:
    """What is computed once, by the driver, and handed to every worker as it is.

    Attributes:
        dataset: as the task trains on it.
        shards: which training rows each client holds.
        sources: what the data are; see :class:`~trishul_ray.federation.contract.Blueprint`.
    """

    dataset: PreparedDataset
    shards: Partition
    sources: dict[str, str] = field(default_factory=dict)


def prepare_run(experiment: Experiment, progress: Progress | None = None) -> Prepared:
    """Data and partition of an experiment; cached on disk.

    Raises:
        InputError: no such dataset, or it cannot be dealt out as asked.
    """
    dataset, _, sources = _dataset_and_task(experiment, progress)
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
    experiment: Experiment, progress: Progress | None = None
) -> tuple[PreparedDataset, Task, dict[str, str]]:
    """The dataset as the task trains on it, the task, and what the data are."""
    places = Places.of(experiment)
    dataset = prepare(experiment.data, cache=places.cache, hub=places.hub, progress=progress)
    sources = {"rows": dataset.fingerprint}
    task = build_task(experiment, dataset.info, hub=places.hub, cache=places.cache)
    if task.encoder is not None:
        dataset = encode(dataset, task.encoder, cache=places.cache, progress=progress)
        sources["tokens"] = dataset.fingerprint
    return dataset, task, sources


def check_fits(experiment: Experiment) -> None:
    """Refuse a budget that the backbone cannot carry, without loading its weights.

    Raises:
        InputError: a rank or heads x rank exceed a layer's width, a target is unknown, ...
    """
    places = Places.of(experiment)
    model = meta_backbone(experiment.model, hub=places.hub, cache=places.cache)
    site = build_site(model, experiment)
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


def pick_device(experiment: Experiment) -> torch.device:
    """CUDA where asked for or, on ``auto``, where this process sees one."""
    wanted = experiment.resources.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def build_workbench(experiment: Experiment, prepared: Prepared) -> Workbench:
    """Load the backbone, attach the method's adapters, open the data.

    Raises:
        InputError: the backbone, the budget or the data do not fit together.
    """
    places = Places.of(experiment)
    # An actor on a node that the driver's cache does not reach makes its own copy, from the same
    # source and with the same bytes.
    dataset = prepared.dataset
    if dataset.folder.is_dir():
        task = build_task(experiment, dataset.info, hub=places.hub, cache=places.cache)
    else:
        dataset, task, sources = _dataset_and_task(experiment)
        changed = changed_sources(prepared.sources, sources)
        if changed:
            raise InputError(
                f"node {socket.gethostname()} has other {changed} than the driver: data.path, "
                "storage.hub and folders of models must hold the same on every node"
            )
    device = pick_device(experiment)
    ensure_backbone(experiment.model, places.cache, hub=places.hub, on_ray=False)
    backbone, origin = resident_backbone(
        experiment.model,
        task.architecture,
        task.num_classes,
        seed=experiment.seed,
        hub=places.hub,
        cache=places.cache,
    )
    backbone = backbone.to(device)
    method = build_method(experiment.method, experiment.adapter)
    site = build_site(backbone, experiment)
    model = attach(backbone, experiment, method, site, device)
    test_rows = np.arange(len(dataset.test))
    limit = experiment.evaluation.limit
    if limit is not None and limit < len(test_rows):
        # By the raw rows, not by the seed: all seeds, methods and backbones are measured alike.
        rows = prepared.sources.get("rows", dataset.fingerprint)
        rng = numpy_rng(0, "evaluation-subset", rows)
        test_rows = np.sort(rng.choice(test_rows, limit, replace=False))
    return Workbench(
        settings=experiment,
        model=model,
        initial=model.initial().to(device),
        method=method,
        task=task,
        train=dataset.train,
        test=dataset.test,
        test_rows=test_rows,
        shards=prepared.shards,
        device=device,
        dtype=run_dtype(experiment.model),
        site=site,
        sources=prepared.sources | ({"backbone": origin} if origin else {}),
    )


def attach(
    backbone: torch.nn.Module,
    experiment: Experiment,
    method: Method,
    site: Site,
    device: torch.device,
) -> AdaptedModel:
    """The backbone with the method's adapters for a site."""
    return AdaptedModel(
        backbone,
        method.adapters(site),
        seed=experiment.seed,
        train_head=experiment.model.train_head,
        train_all=method.train_all,
        path=experiment.adapter.path,
        device=device,
    )


def adapt_to(bench: Workbench, survey: Arrays) -> None:
    """Rebuild a workbench's adapters if a survey came in that decides them."""
    found = to_tensors(survey)
    known = bench.site.survey
    same = known.keys() == found.keys() and all(torch.equal(known[k], found[k]) for k in found)
    if same:
        return
    bench.site = replace(bench.site, survey=found)
    backbone = bench.model.detach()
    bench.model = attach(backbone, bench.settings, bench.method, bench.site, bench.device)
    bench.initial = bench.model.initial().to(bench.device)


def blueprint_of(bench: Workbench) -> Blueprint:
    """What the server needs to know of a workbench."""
    layout, method, model = bench.model.layout, bench.method, bench.model
    wire = method.wire(layout)
    counts = count_parameters(model.adapters, model.specs, model.head_size)
    heads = {
        spec.block: getattr(model.adapters[spec.name], "heads", 0)
        for spec in model.specs
        if hasattr(model.adapters[spec.name], "heads")
    }
    return Blueprint(
        layout=layout,
        wire=wire,
        initial=bench.initial.cpu().numpy(),
        expected=Expected(method.upload_lengths(layout), unit_sizes(layout, wire)),
        task=bench.task,
        test_rows=len(bench.test_rows),
        parameters={
            "adapter": counts.adapter + model.whole_size,
            "scalars": counts.scalars,
            "head": counts.head,
        },
        heads=heads,
        block_norms={
            block: sum(bench.site.squared_norms[layer.name] for layer in layers)
            for block, layers in bench.site.blocks().items()
        },
        sources=bench.sources,
    )
