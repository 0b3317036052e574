"""The context of a worker: a backbone with adapters, the data, the task and the method."""

import socket
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from trishul_ray.adapters.budget import count_parameters
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.data.dataset import DatasetInfo, PreparedDataset, RowSet, Split
from trishul_ray.data.partition import Partition, class_mix, client_names
from trishul_ray.data.sampling import capacities
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.compatibility import target_layers
from trishul_ray.federation.messages import Arrays, Expected, WorkerSpec, changed_sources, to_tensor
from trishul_ray.federation.prepare import Prepared, prepare_dataset
from trishul_ray.federation.reduce import round_units, unit_sizes
from trishul_ray.federation.worker.schedule import learning_rates
from trishul_ray.methods.base import Method, build_method
from trishul_ray.methods.base.messages import LocalRun, TargetLayers
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.models.compute import run_dtype
from trishul_ray.models.find_model import ModelKind
from trishul_ray.models.pretraining import ensure_pretrained
from trishul_ray.models.python_model import remember
from trishul_ray.models.shared_weights import set_head
from trishul_ray.runtime.cuda_graphs import Graphs
from trishul_ray.runtime.device import device_named
from trishul_ray.runtime.memory import memory_of, reset_peak
from trishul_ray.runtime.random_streams import numpy_rng, torch_rng
from trishul_ray.runtime.stack import stack_of
from trishul_ray.stages import ArrayState, Stages
from trishul_ray.tasks.base import Task
from trishul_ray.tasks.build import build_task

#: Backbones to keep on a CPU, where their pages are shared with other processes and reclaimable.
KEPT_ON_CPU = 3
#: Backbones to keep on a GPU, whose memory the batches need.
KEPT_ON_GPU = 1


@dataclass
class LoadedBackbone:
    """A backbone without adapters, on its device.

    Attributes:
        module: The model. Code that adapts it must detach the adapters before the next run.
        source: Identity of its weights; see ``models.backbone.Resident``.
        drawn: Parameters that are drawn from the seed, because the checkpoint lacks them.
        seed: Seed of the drawn parameters.
        norms: Squared Frobenius norms of its weights computed so far, keyed by layer.
    """

    module: nn.Module
    source: str
    drawn: tuple[str, ...]
    seed: int
    norms: dict[str, float] = field(default_factory=dict)


class BackboneCache:
    """Load backbones and keep the most recently used ones.

    A backbone is reused as long as its configuration, its files and its device are the same; for
    another seed, only its drawn head changes. Only one worker context at a time may use it.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, LoadedBackbone] = OrderedDict()

    def load(
        self,
        backbone: Backbone,
        kind: ModelKind,
        num_classes: int | None,
        *,
        seed: int,
        device: torch.device,
    ) -> LoadedBackbone:
        """Return a backbone in the run's precision and in eval mode; see ``Backbone.load``.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
            CorruptFileError: The checkpoint is malformed.
        """
        weights = backbone.resident_key(kind, num_classes, seed=seed)
        key = (weights, backbone.config.model_dump_json(), kind, device)
        kept = self._kept.pop(key, None)
        if kept is None:
            # Evict before loading, so that a GPU need not store both.
            limit = KEPT_ON_GPU if device.type == "cuda" else KEPT_ON_CPU
            while len(self._kept) >= limit:
                self._kept.popitem(last=False)
            resident = backbone.load_resident(kind, num_classes, seed=seed)
            model = resident.model.to(device)
            kept = LoadedBackbone(model, resident.source, resident.drawn, seed)
        elif kept.drawn and kept.seed != seed:
            set_head(kept.module, kept.drawn, seed, run_dtype(backbone.config))
            kept.seed = seed
            kept.norms = {n: v for n, v in kept.norms.items() if f"{n}.weight" not in kept.drawn}
        self._kept[key] = kept
        return kept


@dataclass(kw_only=True)
class ModelContext:
    """Objects that compute the global model of a run: adapted backbone, task and method."""

    settings: Experiment
    info: DatasetInfo
    model: AdaptedModel
    initial: Tensor  # float32 [P], P trainables of a client: the untrained vector
    method: Method
    task: Task
    device: torch.device
    dtype: torch.dtype
    targets: TargetLayers
    sources: dict[str, str] = field(default_factory=dict)  # see WorkerSpec

    def close(self) -> None:
        """Detach the adapters, so that another worker context can use the backbone."""
        self.model.detach()


@dataclass(kw_only=True)
class WorkerContext(ModelContext):
    """All persistent objects of a worker; clients differ only by shard, state and rng."""

    train: Split
    scored: Mapping[RowSet, tuple[Split, np.ndarray]]  # split and scored rows of every set
    shards: Partition
    stages: Stages
    graphs: Graphs | None = None  # graphs of local steps, if resources.cuda_graphs
    tokens: np.ndarray | None = None  # see Prepared

    @property
    def test(self) -> Split:
        """The split of the test rows."""
        return self.scored["test"][0]

    def train_batch(self, rows: np.ndarray) -> dict[str, Tensor]:
        """Return training rows as a prepared batch, whose copies may still be in progress."""
        return self.task.prepare_batch(self.train.batch(rows), self.device, self.dtype)


def build_context(
    experiment: Experiment, prepared: Prepared, backbones: BackboneCache | None = None
) -> WorkerContext:
    """Load the backbone, attach the method's adapters and open the data.

    The backbone may come from ``backbones``, if its previous context is closed.

    Raises:
        InputError: Backbone, budget and data are not compatible, or the data of this node differ
            from the driver's.
    """
    if prepared.passed is not None:
        remember(prepared.passed)
    dataset = prepared.dataset
    if not dataset.folder.is_dir():
        # The node does not have the driver's cache. Prepare the data again, once for all actors of
        # the node: the same source gives the same bytes.
        dataset, _, sources = prepare_dataset(experiment)
        if changed := changed_sources(prepared.sources, sources):
            raise InputError(
                f"node {socket.gethostname()} has different {changed} than the driver: provide the "
                "same content of data.path, storage.hub and model folders on every node"
            )
    context = build_model_context(experiment, dataset.info, backbones)
    reset_peak(context.device)
    source = prepared.sources.get("rows", dataset.fingerprint)
    return WorkerContext(
        **(vars(context) | {"sources": prepared.sources | context.sources}),
        train=dataset.train,
        scored=_scored_rows(dataset, experiment.evaluation.limit, source),
        shards=prepared.shards,
        stages=Stages.of(experiment),
        graphs=Graphs(context.device) if experiment.resources.cuda_graphs else None,
        tokens=prepared.tokens,
    )


def _scored_rows(
    dataset: PreparedDataset, limit: int | None, source: str
) -> dict[RowSet, tuple[Split, np.ndarray]]:
    """Select the scored rows of the test and the validation split.

    A subset is drawn from the raw rows, identified by ``source`` instead of the seed, so that all
    seeds, methods and backbones are scored on the same rows.
    """
    streams: dict[RowSet, str] = {"test": "evaluation-subset", "validation": "validation-subset"}
    scored: dict[RowSet, tuple[Split, np.ndarray]] = {}
    for name, stream in streams.items():
        if name not in dataset.split_names:
            continue
        split = dataset.split(name)
        rows = np.arange(len(split))
        if limit is not None and limit < len(rows):
            rows = np.sort(numpy_rng(0, stream, source).choice(rows, limit, replace=False))
        scored[name] = split, rows
    return scored


def build_model_context(
    experiment: Experiment, info: DatasetInfo, backbones: BackboneCache | None = None
) -> ModelContext:
    """Load the backbone and attach the method's adapters, given only a description of the data.

    Raises:
        InputError: Backbone, budget and the kind of the data are not compatible, or the GPU cannot
            be used.
        RunError: The memory of the device, or this process's share of it, is too small.
    """
    backbone = backbone_of(experiment.model, experiment.storage.paths)
    task = build_task(experiment.task, info, backbone)
    device = device_named(experiment.resources.device)
    ensure_pretrained(backbone, on_ray=False)
    method = build_method(experiment.method, experiment.adapter)

    def work() -> str:
        shapes = backbone.meta_model(task.model_kind, task.num_classes)
        size = sum(p.numel() for p in shapes.parameters()) * run_dtype(experiment.model).itemsize
        gib = f"{size / 2**30:.2g} GiB in {experiment.model.precision}"
        return f"loading {backbone.name} ({gib}) with the adapters of {experiment.method.name}"

    with memory_of(work, "set model.precision=bf16 or model.quantize"):
        loaded = (backbones or BackboneCache()).load(
            backbone, task.model_kind, task.num_classes, seed=experiment.seed, device=device
        )
        targets = target_layers(loaded.module, experiment, loaded.norms)
        model = _attach(loaded.module, experiment, method, targets, device)
        initial = model.initial().to(device)
    if experiment.federation.stacked > 1 or Stages.of(experiment).of_gradients is not None:
        model.check_stackable()
    return ModelContext(
        settings=experiment,
        info=info,
        model=model,
        initial=initial,
        method=method,
        task=task,
        device=device,
        dtype=run_dtype(experiment.model),
        targets=targets,
        sources={"backbone": loaded.source} if loaded.source else {},
    )


def _attach(
    module: nn.Module,
    experiment: Experiment,
    method: Method,
    targets: TargetLayers,
    device: torch.device,
) -> AdaptedModel:
    return AdaptedModel(
        module, method.adapters(targets), seed=experiment.seed, path=experiment.adapter.path,
        train_head=experiment.model.train_head, train_all=method.train_all, device=device,
    )  # fmt: skip


def adapt_to(context: ModelContext, survey: Arrays) -> None:
    """Replace the adapters of a worker context if they were built for another survey."""
    new = {layer: to_tensor(answer) for layer, answer in survey.items()}
    old = context.targets.survey
    if old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in new):
        return
    context.targets = replace(context.targets, survey=new)
    module = context.model.detach()
    context.model = _attach(
        module, context.settings, context.method, context.targets, context.device
    )
    context.initial = context.model.initial().to(context.device)


def worker_spec(context: WorkerContext) -> WorkerSpec:
    """Describe a worker context for the server."""
    layout, method, model = context.model.layout, context.method, context.model
    wire = method.wire(layout)
    counts = count_parameters(model.adapters, model.specs)
    adapters = [(spec.block, model.adapters[spec.name]) for spec in model.specs]
    with_cores = [(block, a) for block, a in adapters if isinstance(a, MultiHead)]
    return WorkerSpec(
        info=context.info,
        layout=layout,
        wire=wire,
        initial=model.start().numpy(),
        expected=Expected(method.upload_lengths(layout), unit_sizes(layout, wire)),
        metrics=context.task.metrics,
        scored={name: len(rows) for name, (_, rows) in context.scored.items()},
        parameters={
            "adapter": counts.adapter + model.backbone_size,
            "scalars": counts.scalars,
            "head": model.classifier_size,
        },
        heads={block: len(a.head_ranks) for block, a in with_cores},
        ranks={
            block: max(adapter.rank for _, adapter in group)
            for block, group in groupby(with_cores, lambda pair: pair[0])
        },
        block_norms={
            block: sum(context.targets.squared_norms[layer.name] for layer in layers)
            for block, layers in context.targets.blocks().items()
        },
        stack=stack_of(context.device),
        sources=context.sources,
        client_mix=_client_mix(context),
        client_rows=_client_rows(context),
        shard_sizes=context.shards.sizes if "shard_sizes" in context.stages.needs else None,
    )


def _client_mix(context: WorkerContext) -> np.ndarray | None:
    """Count the rows of every client and class [C, K], if they score the clients.

    Raises:
        InputError: ``evaluation.per_client`` is set, but the data have neither clients nor classes.
    """
    if not context.settings.evaluation.per_client or "client" in context.test.columns:
        return None
    if "label" not in context.train.columns:
        raise InputError(
            f"evaluation.per_client: the test rows of dataset {context.info.name} have neither a "
            "client column nor classes to score clients by"
        )
    return class_mix(context.shards, context.train.labels, context.info.num_classes)


def _client_rows(context: WorkerContext) -> dict[RowSet, np.ndarray]:
    """Count the rows that score each client's personalized model [C], per set.

    Returns:
        The counts; empty if personalized models are not scored.

    Raises:
        InputError: Test rows belong to clients outside the run.
    """
    settings, by_client = context.settings, "client" in context.test.columns
    clients, held_out = settings.federation.clients, settings.federation.held_out
    own = context.method.personal and settings.evaluation.per_client
    known = not by_client or client_names(context.info, settings.partition, clients)
    if (own or held_out) and not known:
        what = f"method={settings.method.name} has a model for each client"
        what = what if own else f"federation.held_out={held_out:g} leaves out clients of the run"
        raise InputError(
            f"evaluation.per_client: {what}, but the test rows of dataset {context.info.name} "
            f"belong to {len(context.info.clients)} other clients: set partition.kind=natural "
            f"and federation.clients={len(context.info.clients)}"
        )
    if not own:
        return {}
    if not by_client:
        return {name: np.full(clients, len(rows)) for name, (_, rows) in context.scored.items()}
    return {
        name: np.bincount(split.column("client")[rows], minlength=clients)
        for name, (split, rows) in context.scored.items()
    }


def rows_of(context: WorkerContext, name: RowSet, client: int | None) -> tuple[Split, np.ndarray]:
    """Return the split of a set and its scored rows, of one client if rows belong to clients."""
    split, rows = context.scored[name]
    if client is not None and "client" in split.columns:
        rows = rows[split.column("client")[rows] == client]
    return split, rows


def new_run(
    context: ModelContext,
    broadcast: ArrayState,
    round_number: int,
    client: int | None,
    steps: int = 0,
    vector: Tensor | None = None,
    grad: Tensor | None = None,
) -> LocalRun:
    """Create the local run of a client before its start, or of the global model for None.

    By default, its vector and gradient are new tensors.
    """
    settings, fed = context.settings, context.settings.federation
    if vector is None:
        vector = torch.empty_like(context.initial)
    if grad is None:
        grad = torch.empty(0) if client is None else torch.zeros_like(vector)
    share: float = 1.0
    rates: tuple[float, ...] = ()
    active = None
    if client is not None:
        units = round_units(context.method, context.model.layout, round_number)
        active = None if units is None else torch.from_numpy(units)
        share = capacities(fed.compute, settings.draw_seed, fed.clients, fed.compute_shares)[client]
        rates = learning_rates(settings.optimizer, round_number, fed.rounds, steps)
    return LocalRun(
        layout=context.model.layout,
        vector=vector,
        grad=grad,
        broadcast=broadcast.map(lambda array: to_tensor(array).to(context.device)),
        client_state={},
        client=client,
        optimizer=settings.optimizer,
        rates=rates,
        round=round_number,
        active=active,
        generator=torch_rng(
            settings.seed, "client", round_number, -1 if client is None else client
        ),
        common=torch_rng(settings.seed, "common", round_number),
        steps=steps,
        training=client is not None,
        diagnosed=settings.evaluation.diagnoses(round_number, fed.rounds),
        capacity=share,
    )


@contextmanager
def client_stream(context: WorkerContext, purpose: str, *indices: int) -> Iterator[None]:
    """Give a client's dropout, which uses torch's global stream, a separate random stream.

    Afterwards the global stream is restored and the model is in evaluation mode.
    """
    settings = context.settings
    devices = [context.device] if context.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(torch_rng(settings.seed, purpose, *indices).initial_seed())
        context.model.train(settings.model.dropout)
        try:
            yield
        finally:
            context.model.train(False)


@contextmanager
def bound(
    context: ModelContext, trained: Trained | None, grad: Tensor | None = None
) -> Iterator[None]:
    """Bind a trained state, or the pretrained model for None, and restore the previous state.

    A step's hooks may compute another gradient: ``run.gradient`` is called while the state of the
    steps is bound.
    """
    before = context.model.bound
    if trained is None:
        context.model.unbind()
    else:
        context.model.bind(trained, grad)
    try:
        yield
    finally:
        if before is None:
            context.model.unbind()
        else:
            context.model.bind(*before)


def global_model(
    context: ModelContext,
    broadcast: ArrayState,
    round_number: int,
    state: Arrays | None = None,
    client: int | None = None,
) -> Trained:
    """Build the global model from a broadcast, or a personalized model from a client's state."""
    run = new_run(context, broadcast, round_number, None)
    run.client = client
    run.client_state = {k: to_tensor(v).to(context.device) for k, v in (state or {}).items()}
    context.method.start(run, context.initial)
    return Trained(run.vector, run.broadcast.base, run.broadcast.constants)
