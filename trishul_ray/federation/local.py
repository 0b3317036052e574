"""One client's round, one client's survey and one chunk of evaluation, as pure functions.

The same inputs give the same bytes in any process: every random draw comes from a stream named by
``(seed, purpose, round, client)``, the optimizer is fresh, and the resident backbone is unchanged.
Nothing here needs Ray.

Legend: P trainables of a client, S local steps, b batch size.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.model import Trained
from trishul_ray.federation.messages import (
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
from trishul_ray.federation.workbench import Workbench, frozen_part, global_model, new_run
from trishul_ray.methods.base import LocalRun, Method, State
from trishul_ray.rng import numpy_rng, torch_rng

if TYPE_CHECKING:
    from trishul_ray.config import OptimizerConfig


def train_client(bench: Workbench, broadcast: Arrays, job: TrainJob) -> tuple[Upload, TrainReport]:
    """Run one client's round: ``(broadcast, client state, shard, round, rng) -> (update, state)``.

    Raises:
        FloatingPointError: The training loss is not finite; the message names client and step.
    """
    started = time.perf_counter()
    settings, method, fed = bench.settings, bench.method, bench.settings.federation
    run = new_run(bench, broadcast, job.round, job.client)
    run.client_state = {k: v.to(bench.device) for k, v in to_tensors(job.state).items()}
    trained = Trained(run.vector, *frozen_part(run.broadcast))
    rows = bench.shards.shard(job.client)
    rng = numpy_rng(settings.seed, "batches", job.round, job.client)
    batches = batch_order(rows, fed.local_steps, fed.batch_size, rng)  # [S, b]

    def backward(step: int) -> Tensor:
        run.grad.zero_()
        loss = _loss(bench, batches[step - 1])
        loss.backward()
        return loss.detach()

    def gradient(step: int) -> None:
        with _bound(bench, trained, run.grad):
            backward(step)

    run.gradient = gradient
    losses = torch.empty(fed.local_steps, dtype=torch.float64)
    with _client_stream(bench, "dropout", job.round, job.client):
        method.start(run, bench.initial)
        mask = gradient_mask(run, method.wire(run.layout))
        # Weight decay moves even what has no gradient: put back what is not trained.
        decays = settings.optimizer.weight_decay > 0
        untrained = run.vector * (1 - mask) if decays and mask is not None else None
        run.vector.grad = run.grad
        optimizer = make_optimizer(settings.optimizer, run.vector)
        with _bound(bench, trained, run.grad):
            for step in range(1, fed.local_steps + 1):
                losses[step - 1] = backward(step)
                method.before_step(run)
                if mask is not None:
                    run.grad.mul_(mask)
                if settings.optimizer.clip_norm is not None:
                    # Clip what the optimizer reads: corrected, and without inactive core heads.
                    torch.nn.utils.clip_grad_norm_([run.vector], settings.optimizer.clip_norm)
                optimizer.param_groups[0]["lr"] = run.rates[step - 1]
                with torch.no_grad():
                    optimizer.step()
                    if untrained is not None and mask is not None:
                        run.vector.mul_(mask).add_(untrained)
                    method.after_step(run, step, fed.local_steps)
        _check_finite(losses, job, settings.optimizer.lr)
        with torch.no_grad():
            upload, state = method.upload(run, fed.local_steps)
    # It refers to the run and the workbench: let them be freed before the next garbage collection.
    del run.gradient
    run.notes["uploaded_parameters"] = uploaded_parameters(run, upload, method)
    run.notes["unsent"] = run.unsent
    active = None if run.active is None else run.active.numpy()
    seconds = time.perf_counter() - started
    return (
        Upload(job.client, len(rows), to_arrays(upload), active),
        TrainReport(job.client, to_arrays(state), float(losses.mean()), seconds, run.notes),
    )


def batch_order(rows: np.ndarray, steps: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of every local step, [steps, size]: a fresh permutation for each epoch.

    Every client makes exactly ``steps`` full steps (the paper counts mini-batches, not epochs). A
    shard smaller than a batch wraps around, so a batch may contain a row twice.
    """
    needed = steps * size
    epochs = -(-needed // len(rows))
    order = np.concatenate([rng.permutation(rows) for _ in range(epochs)])
    return order[:needed].reshape(steps, size)


def make_optimizer(settings: "OptimizerConfig", vector: Tensor) -> torch.optim.Optimizer:
    """Build a fresh optimizer over the flat vector [P]."""
    lr, decay, betas = settings.lr, settings.weight_decay, (settings.beta1, settings.beta2)
    if settings.name == "sgd":
        return torch.optim.SGD([vector], lr=lr, momentum=settings.momentum, weight_decay=decay)
    return torch.optim.AdamW([vector], lr=lr, betas=betas, weight_decay=decay, fused=True)


def gradient_mask(run: LocalRun, wire: tuple[str, ...]) -> Tensor | None:
    """Return [P] float32, 1 for what is trained and 0 for inactive core heads; None if all are."""
    if run.active is None:
        return None
    mask = torch.ones_like(run.vector)
    for unit, active in zip(run.layout.units(wire), run.active.tolist(), strict=True):
        if not active:
            mask[unit.span] = 0
            if unit.scalar is not None:
                mask[unit.scalar] = 0
    return mask


def uploaded_parameters(run: LocalRun, upload: State, method: Method) -> int:
    """Count what is really sent: no inactive core heads, no components beyond a client's rank."""
    count = sum(value.numel() for value in upload.values()) - run.unsent
    if run.active is None:
        return count
    units = run.layout.units(method.wire(run.layout))
    inactive = (u.size for u, active in zip(units, run.active.tolist(), strict=True) if not active)
    return count - sum(inactive)


def survey_client(bench: Workbench, job: SurveyJob) -> Arrays:
    """Return one client's answer to the method's survey, at the pretrained model.

    Raises:
        ValueError: The method makes no survey.
    """
    plan, settings = bench.method.survey_plan, bench.settings
    if plan is None:
        raise ValueError(f"{settings.method.name} makes no survey")
    rng = numpy_rng(settings.seed, "survey-batches", job.client)
    size = plan.batch_size or settings.federation.batch_size
    batches = batch_order(bench.shards.shard(job.client), plan.batches, size, rng)
    weights = {
        spec.name: bench.model.model.get_parameter(f"{spec.name}.weight")
        for spec in bench.model.specs
    }

    def gradients() -> Iterator[dict[str, Tensor]]:
        for rows in batches:
            grads = torch.autograd.grad(_loss(bench, rows), list(weights.values()))
            yield {name: grad.float() for name, grad in zip(weights, grads, strict=True)}

    for weight in weights.values():
        weight.requires_grad_(True)
    try:
        with _client_stream(bench, "survey-dropout", job.client):
            return to_arrays(bench.method.survey(gradients()))
    finally:
        for weight in weights.values():
            weight.requires_grad_(False)


def evaluate_chunk(bench: Workbench, broadcast: Arrays, job: EvalJob) -> EvalReport:
    """Return the sums of the metrics of the global model over one chunk of test rows.

    Round 0 is the pretrained backbone, even for a method whose first broadcast already updates it
    (Fed-SB).
    """
    bench.model.train(False)
    rows = bench.test_rows[job.start : job.stop]
    with torch.inference_mode():
        trained = Trained(bench.initial)
        if job.round > 0:
            trained = global_model(bench, broadcast, job.round)
        with _bound(bench, trained):
            stored = bench.test.batch(rows)
            if not bench.settings.evaluation.per_client:
                stored.pop("client", None)
            batch = bench.task.prepare_batch(stored, bench.device, bench.dtype)
            sums = bench.task.evaluate(bench.task.predict(bench.model, batch), batch)
    return EvalReport(round=job.round, start=job.start, sums=sums)


def _loss(bench: Workbench, rows: np.ndarray) -> Tensor:
    batch = bench.task.prepare_batch(bench.train.batch(rows), bench.device, bench.dtype)
    return bench.task.loss(bench.model.forward(**bench.task.inputs(batch)), batch)


def _check_finite(losses: Tensor, job: TrainJob, rate: float) -> None:
    if not torch.isfinite(losses).all():
        step = int((~torch.isfinite(losses)).nonzero()[0]) + 1
        raise FloatingPointError(
            f"training loss of client {job.client} is not finite at round {job.round}, local "
            f"step {step} (optimizer.lr={rate}): try a smaller learning rate"
        )


@contextmanager
def _bound(bench: Workbench, trained: Trained, grad: Tensor | None = None) -> Iterator[None]:
    """Let the model compute with a trained state inside, and as pretrained again after."""
    bench.model.bind(trained.vector, grad, trained.base, trained.constants)
    try:
        yield
    finally:
        bench.model.unbind()


@contextmanager
def _client_stream(bench: Workbench, purpose: str, *indices: int) -> Iterator[None]:
    """Give a client's dropout, which draws from torch's global stream, a random stream of its own.

    Afterwards the global stream is restored and the model is back in evaluation mode.
    """
    settings = bench.settings
    devices = [bench.device] if bench.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(torch_rng(settings.seed, purpose, *indices).initial_seed())
        bench.model.train(settings.model.dropout)
        try:
            yield
        finally:
            bench.model.train(False)
