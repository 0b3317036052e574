"""One client's round as a pure function, and one chunk of evaluation. No Ray here.

The same inputs give the same bytes in whichever process they are called: every random draw comes
from a stream named by ``(seed, purpose, round, client)``, the optimizer is fresh, and the resident
backbone is never changed.

Legend: P trainables of a client, U units of aggregation, S local steps, b batch size.
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
from trishul_ray.federation.reduce import unit_sizes
from trishul_ray.federation.workbench import Workbench, frozen_part, global_model, new_run
from trishul_ray.methods.base import LocalRun, Method, State
from trishul_ray.rng import numpy_rng, torch_rng

if TYPE_CHECKING:
    from trishul_ray.config import OptimizerConfig


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


@contextmanager
def _client_stream(bench: Workbench, purpose: str, *indices: int) -> Iterator[None]:
    """Let a client compute in its own mode and, for dropout, its own random stream.

    Dropout draws from torch's global stream: inside, that is a stream of this client's; after,
    it is as it was, and the model is back in evaluation mode.

    Args:
        bench: whose model computes.
        purpose: names the stream, with ``indices`` (round and client).
        indices: see :func:`~trishul_ray.rng.torch_rng`.
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


def train_client(bench: Workbench, broadcast: Arrays, job: TrainJob) -> tuple[Upload, TrainReport]:
    """One client's round: ``(broadcast, client state, shard, round, rng) -> (update, state)``.

    Raises:
        FloatingPointError: the training loss is not finite; the message names client and step.
    """
    with _client_stream(bench, "dropout", job.round, job.client):
        return _train(bench, broadcast, job)


def _train(bench: Workbench, broadcast: Arrays, job: TrainJob) -> tuple[Upload, TrainReport]:
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

    def probe(step: int) -> None:
        model.bind(vector, run.grad, *frozen)
        try:
            backward(order[step - 1])
        finally:
            model.unbind()

    run.gradient = probe
    method.start(run, bench.initial)
    mask = gradient_mask(run, method.wire(run.layout))
    # Without a gradient only weight decay moves anything: what does not train is put back.
    decays = settings.optimizer.weight_decay > 0
    held = vector * (1 - mask) if decays and mask is not None else None
    vector.grad = run.grad
    optimizer = make_optimizer(settings.optimizer, vector)
    losses = torch.empty(fed.local_steps, dtype=torch.float64)
    model.bind(vector, run.grad, *frozen)
    try:
        for step in range(1, fed.local_steps + 1):
            losses[step - 1] = backward(order[step - 1])
            method.before_step(run)
            if mask is not None:
                run.grad.mul_(mask)
            if settings.optimizer.clip_norm is not None:
                # Of what the optimizer sees: the method's correction made, inactive heads out.
                torch.nn.utils.clip_grad_norm_([vector], settings.optimizer.clip_norm)
            optimizer.param_groups[0]["lr"] = run.rates[step - 1]
            with torch.no_grad():
                optimizer.step()
                if held is not None and mask is not None:
                    vector.mul_(mask).add_(held)
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
        with _client_stream(bench, "survey-dropout", job.client):
            return to_arrays(bench.method.survey(gradients()))
    finally:
        for weight in weights.values():
            weight.requires_grad_(False)


def evaluate_chunk(bench: Workbench, broadcast: Arrays, job: EvalJob) -> EvalReport:
    """Sums of loss and correct answers of the global model over one chunk of test rows.

    Round 0 is the pretrained backbone for every method, also for one whose first broadcast is
    already an update of it (Fed-SB).
    """
    bench.model.train(False)
    with torch.inference_mode():
        untouched = job.round == 0
        trained = Trained(bench.initial) if untouched else global_model(bench, broadcast, job.round)
        bench.model.bind(trained.vector, None, trained.base, trained.constants)
        try:
            batch = bench.task.prepare_batch(
                bench.test.batch(bench.test_rows[job.start : job.stop]), bench.device, bench.dtype
            )
            sums = bench.task.evaluate(bench.task.predict(bench.model, batch), batch)
        finally:
            bench.model.unbind()
    return EvalReport(round=job.round, start=job.start, sums=sums)
