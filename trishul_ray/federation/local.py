"""One client's round as a pure function, and one chunk of evaluation. No Ray here.

The same inputs give the same bytes in whichever process they are called: every random draw comes
from a stream named by ``(seed, purpose, round, client)``, the optimizer is fresh, and the resident
backbone is never changed.

Legend: P trainables of a client, U units of aggregation, S local steps, b batch size.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.attach import AdaptedModel, Trained
from trishul_ray.federation.capacity import capacity
from trishul_ray.federation.jobs import (
    Arrays,
    EvalJob,
    EvalReport,
    SurveyJob,
    TrainJob,
    TrainReport,
    Upload,
    to_arrays,
    to_tensors,
)
from trishul_ray.federation.reduce import unit_sizes
from trishul_ray.methods.base import BASE, CONSTANT, LocalRun, Method, Site, State
from trishul_ray.rng import numpy_rng, torch_rng
from trishul_ray.tasks.base import Task

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment, OptimizerConfig


class Rows(Protocol):
    """A table of examples that can gather a batch of rows (a memory-mapped split)."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """The rows at ``indices`` [b] as tensors with b leading."""
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
    shards: "Shards"
    device: torch.device
    dtype: torch.dtype
    site: Site


class Shards(Protocol):
    """Which training rows each client holds."""

    def shard(self, client: int) -> np.ndarray:
        """Row indices of ``client``, [n_c]."""
        ...


def batch_order(rows: np.ndarray, steps: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of every local step: [steps, size], epoch after epoch of fresh permutations.

    A shard smaller than a batch wraps around, so that a row may stand twice in a batch; every
    client makes exactly ``steps`` full steps (the paper counts mini-batches, not epochs).
    """
    needed = steps * size
    epochs = -(-needed // len(rows))
    order = np.concatenate([rng.permutation(rows) for _ in range(epochs)])
    return order[:needed].reshape(steps, size)


def make_optimizer(settings: "OptimizerConfig", vector: Tensor) -> torch.optim.Optimizer:
    """A fresh optimizer over the one flat vector [P]."""
    if settings.name == "sgd":
        return torch.optim.SGD(
            [vector],
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
    return torch.optim.AdamW(
        [vector],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


def gradient_mask(run: LocalRun, wire: tuple[str, ...]) -> Tensor | None:
    """[P] float32 of ones and zeros: which trainables move; None if all do.

    A head that is not active keeps its core and its scalar.
    """
    if run.active is None:
        return None
    mask = torch.ones_like(run.vector)
    views = run.layout.views(mask)
    start = 0
    for name in wire:
        entry = run.layout.entry(name)
        units = entry.shape[0] if name.endswith(".core") else 1
        flags = run.active[start : start + units].to(mask)
        start += units
        view = views[name]
        view.mul_(flags.view(-1, *[1] * (view.dim() - 1)) if name.endswith(".core") else flags)
        scale = views.get(name.removesuffix(".core") + ".scale")
        if name.endswith(".core") and scale is not None:
            scale.mul_(flags)
    return mask


def uploaded_parameters(run: LocalRun, upload: State, method: Method) -> int:
    """Numbers that really travel: inactive heads and components beyond a rank are not sent."""
    count = sum(value.numel() for value in upload.values()) - run.unsent
    if run.active is None:
        return count
    sizes = torch.from_numpy(unit_sizes(run.layout, method.wire(run.layout)))
    return count - int(sizes[~run.active].sum())


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
    share = 1.0 if client is None else capacity(settings.federation.compute, seed, client)
    return LocalRun(
        layout=bench.model.layout,
        vector=vector,
        grad=torch.empty(0) if client is None else torch.zeros_like(vector),
        broadcast={k: v.to(device) for k, v in to_tensors(broadcast).items()},
        client_state={},
        optimizer=settings.optimizer,
        generator=torch_rng(seed, "client", round_number, -1 if client is None else client),
        common=torch_rng(seed, "common", round_number),
        training=client is not None,
        capacity=share,
    )


def train_client(bench: Workbench, broadcast: Arrays, job: TrainJob) -> tuple[Upload, TrainReport]:
    """One client's round: ``(broadcast, client state, shard, round, rng) -> (update, state)``.

    Raises:
        FloatingPointError: the training loss is not finite; the message names client and step.
    """
    began = time.perf_counter()
    settings, method, model = bench.settings, bench.method, bench.model
    fed, seed = settings.federation, settings.seed
    rows = bench.shards.shard(job.client)
    run = new_run(bench, broadcast, job.round, job.client)
    vector = run.vector
    run.client_state = {k: v.to(bench.device) for k, v in to_tensors(job.state).items()}
    frozen = frozen_part(run.broadcast)
    order = batch_order(
        rows, fed.local_steps, fed.batch_size, numpy_rng(seed, "batches", job.round, job.client)
    )

    def backward(chosen: np.ndarray) -> Tensor:
        batch = bench.task.prepare_batch(bench.train.batch(chosen), bench.device, bench.dtype)
        run.grad.zero_()
        loss = bench.task.loss(model.forward(**bench.task.inputs(batch)), batch)
        loss.backward()
        return loss.detach()

    def probe() -> None:
        model.bind(vector, run.grad, *frozen)
        try:
            backward(order[0])
        finally:
            model.unbind()

    run.gradient = probe
    method.start(run, bench.initial)
    mask = gradient_mask(run, method.wire(run.layout))
    vector.grad = run.grad
    optimizer = make_optimizer(settings.optimizer, vector)
    losses = torch.empty(fed.local_steps, dtype=torch.float64)
    devices = [bench.device] if bench.device.type == "cuda" else []
    # Dropout draws from torch's global stream: lend it a stream of this client's for the round.
    with torch.random.fork_rng(devices=devices, enabled=settings.model.dropout):
        if settings.model.dropout:
            torch.manual_seed(torch_rng(seed, "dropout", job.round, job.client).initial_seed())
        model.train(settings.model.dropout)
        model.bind(vector, run.grad, *frozen)
        try:
            for step in range(1, fed.local_steps + 1):
                losses[step - 1] = backward(order[step - 1])
                method.before_step(run)
                if mask is not None:
                    run.grad.mul_(mask)
                with torch.no_grad():
                    optimizer.step()
                    method.after_step(run, step, fed.local_steps)
        finally:
            model.unbind()
    if not torch.isfinite(losses).all():
        step = int((~torch.isfinite(losses)).nonzero()[0]) + 1
        raise FloatingPointError(
            f"training loss of client {job.client} is not finite at round {job.round}, local "
            f"step {step} (optimizer.lr={settings.optimizer.lr}): a smaller learning rate is the "
            "usual cure"
        )
    with torch.no_grad():
        upload, kept = method.upload(run, fed.local_steps)
    run.notes["uploaded_parameters"] = uploaded_parameters(run, upload, method)
    run.notes["unsent"] = run.unsent
    return (
        Upload(
            client=job.client,
            rows=len(rows),
            arrays=to_arrays(upload),
            active=None if run.active is None else run.active.numpy(),
        ),
        TrainReport(
            client=job.client,
            state=to_arrays(kept),
            loss=float(losses.mean()),
            seconds=time.perf_counter() - began,
            notes=run.notes,
        ),
    )


def survey_client(bench: Workbench, job: SurveyJob) -> Arrays:
    """One client's answer to the method's survey, at the pretrained model.

    Raises:
        ValueError: the method asks for none.
    """
    plan, settings = bench.method.survey_plan, bench.settings
    if plan is None:
        raise ValueError(f"{settings.method.name} asks for no survey")
    rng = numpy_rng(settings.seed, "survey-batches", job.client)
    size = plan.batch_size or settings.federation.batch_size
    order = batch_order(bench.shards.shard(job.client), plan.batches, size, rng)
    weights = {
        spec.name: bench.model.model.get_parameter(f"{spec.name}.weight")
        for spec in bench.model.specs
    }

    def gradients() -> Iterator[dict[str, Tensor]]:
        for rows in order:
            batch = bench.task.prepare_batch(bench.train.batch(rows), bench.device, bench.dtype)
            loss = bench.task.loss(bench.model.forward(**bench.task.inputs(batch)), batch)
            found = torch.autograd.grad(loss, list(weights.values()))
            yield {name: g.float() for name, g in zip(weights, found, strict=True)}

    for weight in weights.values():
        weight.requires_grad_(True)
    try:
        return to_arrays(bench.method.survey(gradients()))
    finally:
        for weight in weights.values():
            weight.requires_grad_(False)


def global_model(bench: Workbench, broadcast: Arrays, round_number: int) -> Trained:
    """The global model that a broadcast describes."""
    run = new_run(bench, broadcast, round_number, None)
    bench.method.start(run, bench.initial)
    return Trained(run.vector, *frozen_part(run.broadcast))


def evaluate_chunk(bench: Workbench, broadcast: Arrays, job: EvalJob) -> EvalReport:
    """Sums of loss and correct answers of the global model over one chunk of test rows."""
    bench.model.train(False)
    with torch.inference_mode():
        trained = global_model(bench, broadcast, job.round)
        bench.model.bind(trained.vector, None, trained.base, trained.constants)
        try:
            batch = bench.task.prepare_batch(
                bench.test.batch(bench.test_rows[job.start : job.stop]), bench.device, bench.dtype
            )
            outputs = bench.model.forward(**bench.task.inputs(batch))
            sums = bench.task.evaluate(outputs, batch)
        finally:
            bench.model.unbind()
    return EvalReport(round=job.round, start=job.start, sums=sums)
