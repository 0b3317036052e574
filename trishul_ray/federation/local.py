"""One client's round as a pure function, and one chunk of evaluation. No Ray here.

The same inputs give the same bytes in whichever process they are called: every random draw comes
from a stream named by ``(seed, purpose, round, client)``, the optimizer is fresh, and the resident
backbone is never changed.

Legend: P trainables of a client, U units of aggregation, S local steps, b batch size.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.attach import AdaptedModel
from trishul_ray.federation.jobs import (
    Arrays,
    EvalJob,
    EvalReport,
    TrainJob,
    TrainReport,
    Upload,
    to_arrays,
    to_tensors,
)
from trishul_ray.federation.reduce import unit_sizes
from trishul_ray.methods.base import LocalRun, Method, State
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
    """Numbers that really travel: inactive heads are not sent."""
    count = sum(value.numel() for value in upload.values())
    if run.active is None:
        return count
    sizes = torch.from_numpy(unit_sizes(run.layout, method.wire(run.layout)))
    return count - int(sizes[~run.active].sum())


def train_client(bench: Workbench, broadcast: Arrays, job: TrainJob) -> tuple[Upload, TrainReport]:
    """One client's round: ``(broadcast, client state, shard, round, rng) -> (update, state)``.

    Raises:
        FloatingPointError: the training loss is not finite; the message names client and step.
    """
    began = time.perf_counter()
    settings, method, model = bench.settings, bench.method, bench.model
    fed, seed = settings.federation, settings.seed
    rows = bench.shards.shard(job.client)
    vector = torch.empty_like(bench.initial)
    run = LocalRun(
        layout=model.layout,
        vector=vector,
        grad=torch.zeros_like(vector),
        broadcast={k: v.to(bench.device) for k, v in to_tensors(broadcast).items()},
        client_state={k: v.to(bench.device) for k, v in to_tensors(job.state).items()},
        optimizer=settings.optimizer,
        generator=torch_rng(seed, "client", job.round, job.client),
    )
    method.start(run, bench.initial)
    mask = gradient_mask(run, method.wire(run.layout))
    order = batch_order(
        rows, fed.local_steps, fed.batch_size, numpy_rng(seed, "batches", job.round, job.client)
    )
    vector.grad = run.grad
    optimizer = make_optimizer(settings.optimizer, vector)
    losses = torch.empty(fed.local_steps, dtype=torch.float64)
    devices = [bench.device] if bench.device.type == "cuda" else []
    # Dropout draws from torch's global stream: lend it a stream of this client's for the round.
    with torch.random.fork_rng(devices=devices, enabled=settings.model.dropout):
        if settings.model.dropout:
            torch.manual_seed(torch_rng(seed, "dropout", job.round, job.client).initial_seed())
        model.train(settings.model.dropout)
        model.bind(vector, run.grad)
        try:
            for step in range(1, fed.local_steps + 1):
                batch = bench.task.prepare_batch(
                    bench.train.batch(order[step - 1]), bench.device, bench.dtype
                )
                run.grad.zero_()
                loss = bench.task.loss(model.forward(**bench.task.inputs(batch)), batch)
                loss.backward()
                losses[step - 1] = loss.detach()
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
        upload, kept = method.upload(run)
    run.notes["uploaded_parameters"] = uploaded_parameters(run, upload, method)
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


def global_vector(bench: Workbench, broadcast: Arrays, round_number: int) -> Tensor:
    """[P] the trainable vector of the global model that a broadcast describes."""
    run = LocalRun(
        layout=bench.model.layout,
        vector=torch.empty_like(bench.initial),
        grad=torch.empty(0),
        broadcast={k: v.to(bench.device) for k, v in to_tensors(broadcast).items()},
        client_state={},
        optimizer=bench.settings.optimizer,
        generator=torch_rng(bench.settings.seed, "evaluation", round_number),
    )
    bench.method.start(run, bench.initial)
    return run.vector


def evaluate_chunk(bench: Workbench, broadcast: Arrays, job: EvalJob) -> EvalReport:
    """Sums of loss and correct answers of the global model over one chunk of test rows."""
    bench.model.train(False)
    with torch.inference_mode():
        bench.model.bind(global_vector(bench, broadcast, job.round))
        try:
            batch = bench.task.prepare_batch(
                bench.test.batch(bench.test_rows[job.start : job.stop]), bench.device, bench.dtype
            )
            outputs = bench.model.forward(**bench.task.inputs(batch))
            sums = bench.task.evaluate(outputs, batch)
        finally:
            bench.model.unbind()
    return EvalReport(round=job.round, start=job.start, sums=sums)
