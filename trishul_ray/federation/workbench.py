"""What a worker keeps resident, and how a broadcast becomes a vector on it. No Ray here.

Legend: P trainables of a client, b batch size, n_c rows of client c.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.budget import count_parameters
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import Arrays, Blueprint, Expected, changed_sources, to_tensors
from trishul_ray.federation.prepare import Prepared, build_site, prepare_dataset
from trishul_ray.federation.reduce import unit_sizes
from trishul_ray.federation.schedule import learning_rates
from trishul_ray.methods.base import BASE, CONSTANT, LocalRun, Method, Site, State, build_method
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.compute import run_dtype
from trishul_ray.pretrain.training import ensure_pretrained
from trishul_ray.rng import numpy_rng, torch_rng
from trishul_ray.tasks.base import Task
from trishul_ray.tasks.build import build_task

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment


#: Shares of the full budget.
LEVELS = (0.25, 0.5, 0.75, 1.0)


#: Probability of each level, by profile.
PROFILES = {
    "full": (0.0, 0.0, 0.0, 1.0),
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "bell": (0.1, 0.4, 0.4, 0.1),
    "skewed-right": (0.5, 0.3, 0.15, 0.05),
}


def capacity(profile: str, seed: int, client: int, shares: Sequence[float] | None = None) -> float:
    """Return the share of the budget that ``client`` can train, one of ``LEVELS``.

    Args:
        profile: ``federation.compute``.
        seed: the experiment's.
        client: which.
        shares: the probability of each level; None takes those of the profile.
    """
    wanted = np.asarray(PROFILES[profile] if shares is None else shares, dtype=np.float64)
    draw = numpy_rng(seed, "capacity", client).choice(len(LEVELS), p=wanted / wanted.sum())
    return LEVELS[int(draw)]


class Rows(Protocol):
    """A table of examples that can gather a batch of rows (a memory-mapped split)."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """The rows at ``indices`` [b] as tensors with b leading."""
        ...


class Shards(Protocol):
    """Which training rows each client holds."""

    def shard(self, client: int) -> np.ndarray:
        """Row indices of ``client``, [n_c]."""
        ...


@dataclass
class Workbench:
    """All that a worker keeps resident: one backbone with adapters, the data, the method."""

    settings: "Experiment"
    model: AdaptedModel
    initial: Tensor  # [P] float32, the untrained vector
    method: Method
    task: Task
    train: Rows
    test: Rows
    test_rows: np.ndarray  # rows of the test split that are evaluated
    shards: Shards
    device: torch.device
    dtype: torch.dtype
    site: Site
    sources: dict[str, str] = field(default_factory=dict)  # see Blueprint


def frozen_part(broadcast: State) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """What a broadcast changes of the frozen part: ``(base, constants)`` by layer."""
    base = {k.removeprefix(BASE): v for k, v in broadcast.items() if k.startswith(BASE)}
    constants: dict[str, dict[str, Tensor]] = {}
    for key, value in broadcast.items():
        if key.startswith(CONSTANT):
            layer, _, name = key.removeprefix(CONSTANT).rpartition("/")
            constants.setdefault(layer, {})[name] = value
    return base, constants


def new_run(bench: Workbench, broadcast: Arrays, round_number: int, client: int | None) -> LocalRun:
    """A run of ``client`` (None: of the global model, for evaluation), before its start."""
    settings, device = bench.settings, bench.device
    seed, vector = settings.seed, torch.empty_like(bench.initial)
    fed = settings.federation
    share: float = 1.0
    rates: tuple[float, ...] = ()
    if client is not None:
        share = capacity(fed.compute, seed, client, fed.compute_shares)
        rates = learning_rates(settings.optimizer, round_number, fed.rounds, fed.local_steps)
    return LocalRun(
        layout=bench.model.layout,
        vector=vector,
        grad=torch.empty(0) if client is None else torch.zeros_like(vector),
        broadcast={k: v.to(device) for k, v in to_tensors(broadcast).items()},
        client_state={},
        optimizer=settings.optimizer,
        rates=rates,
        generator=torch_rng(seed, "client", round_number, -1 if client is None else client),
        common=torch_rng(seed, "common", round_number),
        steps=settings.federation.local_steps,
        training=client is not None,
        capacity=share,
    )


def global_model(bench: Workbench, broadcast: Arrays, round_number: int) -> Trained:
    """The global model that a broadcast describes."""
    run = new_run(bench, broadcast, round_number, None)
    bench.method.start(run, bench.initial)
    return Trained(run.vector, *frozen_part(run.broadcast))


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
    backbone = Backbone.of(experiment)
    # An actor on a node that the driver's cache does not reach makes its own copy, from the same
    # source and with the same bytes.
    dataset = prepared.dataset
    if dataset.folder.is_dir():
        task = build_task(experiment, dataset.info, backbone)
    else:
        dataset, task, sources = prepare_dataset(experiment, backbone)
        changed = changed_sources(prepared.sources, sources)
        if changed:
            raise InputError(
                f"node {socket.gethostname()} has other {changed} than the driver: data.path, "
                "storage.hub and folders of models must hold the same on every node"
            )
    device = pick_device(experiment)
    ensure_pretrained(backbone, on_ray=False)
    module, weights_source = backbone.load_resident(
        task.model_kind, task.num_classes, seed=experiment.seed
    )
    module = module.to(device)
    method = build_method(experiment.method, experiment.adapter)
    site = build_site(module, experiment)
    model = attach(module, experiment, method, site, device)
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
        sources=prepared.sources | ({"backbone": weights_source} if weights_source else {}),
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
