"""One client's round, as a pure function.

The same inputs give the same bytes in any process: every random draw comes from a stream named by
``(seed, purpose, round, client)``, the optimizer is fresh, and the resident backbone is unchanged.
Nothing here needs Ray.

Legend: P trainables of a client, S local steps, b batch size.
"""

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.model import Trained
from trishul_ray.data.sampling import batch_order
from trishul_ray.errors import FailsAgainError
from trishul_ray.federation.messages import (
    TrainJob,
    TrainReport,
    Upload,
    to_array,
    to_tensor,
)
from trishul_ray.federation.reduce import configured_weight
from trishul_ray.federation.worker.context import WorkerContext, bound, client_stream, new_run
from trishul_ray.federation.worker.survey import answer_survey
from trishul_ray.methods.base import Method
from trishul_ray.methods.base.messages import LocalRun, State, Tensors, count_numbers
from trishul_ray.plugins.loading import named
from trishul_ray.runtime.memory import memory_of, peak_memory
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import ArrayState, Change, Sender

if TYPE_CHECKING:
    from trishul_ray.config.fields import OptimizerConfig

#: What takes less memory.
_LESS = "lower {}, set model.gradient_checkpointing=true or model.precision=bf16"


def train_client(
    context: WorkerContext, broadcast: ArrayState, job: TrainJob
) -> tuple[Upload, TrainReport]:
    """Run one client's round: ``(broadcast, client state, shard, round, rng) -> (update, state)``.

    The host waits for a GPU after the last step, where the time of the local steps ends, and to
    copy the results. Only a method's ``start`` and ``upload`` may make it wait more often. Round 0
    is the method's survey, at the pretrained model.

    Raises:
        FailsAgainError: The training loss is not finite, and no stage hides clients; names client
            and step.
        RunError: The memory of the device, or this process's share of it, is too small.
    """
    if job.round == 0:
        return answer_survey(context, job)
    with (
        memory_of(
            f"client {job.client} in round {job.round}", _LESS.format("federation.batch_size")
        ),
        client_stream(context, "dropout", job.round, job.client),
    ):
        steps = LocalSteps(context, _started(context, broadcast, job), job)
        losses, seconds = _timed_steps(context, steps)
        upload, state = _uploaded(context, steps, job, losses)
    return _answer(context, job, steps.run, upload, state, losses, seconds)


def train_together(
    context: WorkerContext, broadcast: ArrayState, jobs: Sequence[TrainJob]
) -> list[tuple[Upload, TrainReport]]:
    """Run the rounds of several clients in one forward and backward pass per step.

    A single one is :func:`train_client`. Otherwise each result is what the client alone would give,
    up to the last bits; its seconds are its share of those of all.

    Raises:
        FailsAgainError: The training loss of a client is not finite, and no stage hides clients.
        RunError: The memory of the device, or this process's share of it, is too small.
    """
    if len(jobs) == 1:
        return [train_client(context, broadcast, jobs[0])]
    number, clients = jobs[0].round, ", ".join(str(job.client) for job in jobs)
    with (
        memory_of(
            f"clients {clients} in round {number}", _LESS.format("federation.stacked or batch_size")
        ),
        client_stream(context, "dropout", number, jobs[0].client),  # no dropout: see Experiment
    ):
        vectors = context.initial.new_empty(len(jobs), len(context.initial))
        grads = torch.zeros_like(vectors)
        each = []
        for vector, grad, job in zip(vectors, grads, jobs, strict=True):
            run = _started(context, broadcast, job)
            run.vector, run.grad = vector, grad
            each.append(LocalSteps(context, run, job))
        losses, seconds = _timed_steps(context, SharedSteps(context, each, vectors, grads))
        own = zip(each, jobs, losses.T, strict=True)
        sent = [_uploaded(context, *client) for client in own]
    return [
        _answer(context, job, steps.run, *what, losses[:, i], seconds / len(jobs))
        for i, (job, steps, what) in enumerate(zip(jobs, each, sent, strict=True))
    ]


def _started(context: WorkerContext, broadcast: ArrayState, job: TrainJob) -> LocalRun:
    run = new_run(context, broadcast, job.round, job.client)
    run.client_state = {k: to_tensor(v).to(context.device) for k, v in job.state.items()}
    return run


def _timed_steps(context: WorkerContext, steps: "LocalSteps | SharedSteps") -> tuple[Tensor, float]:
    """Run all steps; return their losses, float64 [S] or [S, k] on the host, and the seconds."""
    shape = (steps.last, *steps.losses)
    losses = torch.empty(shape, dtype=torch.float64, device=context.device)
    with steps.bound():
        began = time.perf_counter()
        for step in range(1, steps.last + 1):
            losses[step - 1] = steps.compute(step, steps.batch(step))
        losses = losses.cpu()
        return losses, time.perf_counter() - began


def _uploaded(
    context: WorkerContext, steps: "LocalSteps", job: TrainJob, losses: Tensor
) -> tuple[State, Tensors]:
    vector, settings = steps.run.vector, context.settings
    hidden, finite = context.stages.hide_clients, bool(torch.isfinite(losses).all())
    if not finite and not hidden:
        step = int((~torch.isfinite(losses)).nonzero()[0]) + 1
        remedy = f"(optimizer.lr={settings.optimizer.lr}): try a smaller learning rate"
        if job.round == step == 1:
            remedy = (
                "before any step was made: what is not finite comes from the backbone, the data, "
                f"or start() of {named(type(context.method))}"
            )
        raise FailsAgainError(
            f"training loss of client {job.client} is not finite at round {job.round}, local "
            f"step {step} {remedy}"
        )
    if hidden:
        # Ending the run would reveal something of this client: its upload is refused, as zeros.
        finite = finite and bool(torch.isfinite(vector).all())
        vector.nan_to_num_(0.0, 0.0, 0.0)
    with torch.no_grad():
        upload, state = context.method.upload(steps.run, steps.last)
    _check_shapes(context, upload)
    if not finite:
        upload = replace(upload, shared=torch.full_like(upload.shared, math.nan))
    # Break the cycle of references: the run is freed before the next garbage collection.
    del steps.run.gradient
    return upload, state


def _check_shapes(context: WorkerContext, upload: State) -> None:
    """Raise a FailsAgainError if an upload has other tensors than its method declares."""
    declared = context.method.upload_lengths(context.model.layout)
    found = {name: tuple(x.shape) for name, x in {"shared": upload.shared, **upload.extra}.items()}
    expected = {name: (length,) for name, length in declared.items()}
    for name in sorted(found.keys() | expected.keys()):
        if (sent := found.get(name)) != (wanted := expected.get(name)):
            raise FailsAgainError(
                f"upload() of {named(type(context.method))} returns "
                f"{'no' if sent is None else f'shape {sent} as'} {name!r}, and upload_lengths() "
                f"declares {'none' if wanted is None else f'{wanted[0]} numbers'}"
            )


def _answer(
    context: WorkerContext,
    job: TrainJob,
    run: LocalRun,
    upload: State,
    state: Tensors,
    losses: Tensor,
    seconds: float,
) -> tuple[Upload, TrainReport]:
    active = None if run.active is None else run.active.numpy()
    rows = len(context.shards.shard(job.client))
    report = TrainReport(
        client=job.client,
        state={name: to_array(value) for name, value in state.items()},
        loss=float(losses.mean()),
        seconds=seconds,
        uploaded=uploaded_parameters(run, upload, context.method),
        unsent=run.unsent,
        metrics=run.metrics,
        spectra=run.spectra,
        memory=peak_memory(context.device),
    )
    tokens = 0 if context.tokens is None else int(context.tokens[job.client])
    return Upload(job.client, rows, upload.map(to_array), active, tokens=tokens), report


def send_change(
    context: WorkerContext,
    broadcast: ArrayState,
    job: TrainJob,
    upload: Upload,
    report: TrainReport,
) -> tuple[Upload, TrainReport]:
    """Return a client's upload as a change that has passed the stages, and what it reports then."""
    method, settings = context.method, context.settings
    units = tuple(context.model.layout.units(method.wire(context.model.layout)))
    moved = upload.arrays.shared - broadcast.shared
    if upload.active is not None:
        moved[np.repeat(~upload.active, [unit.size for unit in units])] = 0
    weight = configured_weight(settings.federation.weighting, upload)
    change = context.stages.send(
        Change(moved, upload.arrays.extra),
        Sender(
            settings.seed, job.round, job.client, weight, units, upload.active, job.kept,
            job.instructions,
        ),
    )  # fmt: skip
    # Client and server must continue with the same numbers (see `Method.mirrored`).
    read = {} if change.extra is upload.arrays.extra else change.extra
    corrected = {n: job.state.get(n, 0.0) + read[n] for n in method.mirrored if n in read}
    arrays = replace(upload.arrays, shared=change.shared, extra=change.extra)
    report = replace(
        report,
        state={**report.state, **corrected},
        uploaded_bytes=change.uploaded_bytes,
        kept=change.kept,
        stages=change.metrics,
    )
    return replace(upload, arrays=arrays), report


class LocalSteps:
    """The local steps of one client's round.

    A step has a part of the host, :meth:`batch`, and a part of the device, :meth:`compute`. The
    latter never waits for the device, and its kernels, shapes and addresses do not depend on
    values, so that the host prepares the next batches in the meantime, and CUDA graphs can hold its
    forward and backward pass and the prox (``resources.cuda_graphs``). ``run`` is a new run of the
    client, which the steps change; ``last`` is S, the number of the last step.
    """

    losses = ()  # the shape of what :meth:`compute` returns

    def __init__(self, context: WorkerContext, run: LocalRun, job: TrainJob) -> None:
        self.context, self.run = context, run
        settings, method, fed = context.settings, context.method, context.settings.federation
        rng = numpy_rng(settings.seed, "batches", job.round, job.client)
        rows = context.shards.shard(job.client)
        self._order = batch_order(rows, fed.local_steps, fed.batch_size, rng)  # [steps, b]
        self.last = run.steps = fed.local_steps
        self._trained = Trained(run.vector, run.broadcast.base, run.broadcast.constants)
        run.gradient = self._gradient
        method.start(run, context.initial)
        self._mask = gradient_mask(run, method.wire(run.layout))
        # Weight decay moves even what has no gradient: put back what is not trained.
        decays = settings.optimizer.weight_decay > 0
        self._untrained = None
        if decays and self._mask is not None:
            self._untrained = run.vector * (1 - self._mask)
        run.vector.grad = run.grad

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the vector of a client that trains alone."""
        return make_optimizer(self.context.settings.optimizer, [self.run.vector])

    def bound(self) -> AbstractContextManager[None]:
        """Let the model compute with the client's vector inside, as :meth:`compute` needs it."""
        return _ready(self.context, self._trained, self.run.grad)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the prepared mini-batch of a step (from 1); its copies may still be under way."""
        return self.context.train_batch(self.rows(step))

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the mini-batch of a step (from 1), [b]."""
        rows: np.ndarray = self._order[step - 1]
        return rows

    def compute(self, step: int, batch: Mapping[str, Tensor]) -> Tensor:
        """Run a step on a prepared batch and return its loss, a scalar on the device."""
        loss = self._differentiate(batch)
        _end_step(self.context, self.optimizer, [self], step, [loss])
        return loss

    def correct(self, step: int, loss: Tensor) -> None:
        """Correct the gradient of a step, which is in ``run.grad``."""
        run, clip_norm = self.run, self.context.settings.optimizer.clip_norm
        run.step, run.loss = step, loss
        self.context.method.before_step(run)
        if self._mask is not None:
            run.grad.mul_(self._mask)
        if clip_norm is not None:
            # Clip what the optimizer reads: corrected, and without inactive core heads.
            torch.nn.utils.clip_grad_norm_([run.vector], clip_norm)

    def restore(self) -> None:
        """Put back what is not trained."""
        if self._untrained is not None and self._mask is not None:
            self.run.vector.mul_(self._mask).add_(self._untrained)

    def _differentiate(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Put the gradient of a batch into ``run.grad`` and return the loss."""
        return _compute_gradient(self.context, self._trained, self.run.grad, batch, 1)[0]

    def _gradient(self, step: int) -> Tensor:
        with self.bound():
            return self._differentiate(self.batch(step))


class SharedSteps:
    """The local steps of k clients in one forward and backward pass; else as :class:`LocalSteps`.

    Args:
        context: The worker context.
        each: The clients' own steps.
        vectors: [k, P], whose rows are the clients' vectors.
        grads: [k, P], whose rows are their gradients.
    """

    def __init__(
        self, context: WorkerContext, each: Sequence[LocalSteps], vectors: Tensor, grads: Tensor
    ) -> None:
        self.context, self.each, self.last = context, each, each[0].last
        self.losses, self._grads = (len(each),), grads
        broadcast, optimizer = each[0].run.broadcast, context.settings.optimizer
        self._optimizer = make_optimizer(optimizer, [steps.run.vector for steps in each])
        self._trained = Trained(vectors, broadcast.base, broadcast.constants)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the model compute with the vectors of all clients inside."""
        with warnings.catch_warnings(), _ready(self.context, self._trained, self._grads):
            # Those of a tensor have gaps: they lie in the rows of all clients.
            warnings.filterwarnings("ignore", message="grad and param do not obey the gradient")
            yield

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the prepared mini-batches of a step (from 1), one after the other."""
        rows = np.concatenate([steps.rows(step) for steps in self.each])
        return self.context.train_batch(rows)

    def compute(self, step: int, batch: Mapping[str, Tensor]) -> Tensor:
        """Run a step of every client and return their losses [k], on the device."""
        losses = _compute_gradient(self.context, self._trained, self._grads, batch, len(self.each))
        _end_step(self.context, self._optimizer, self.each, step, losses)
        return losses


def _end_step(
    context: WorkerContext,
    optimizer: torch.optim.Optimizer,
    each: Sequence[LocalSteps],
    step: int,
    losses: Iterable[Tensor],
) -> None:
    """End a step of clients whose gradients are computed: they have one optimizer and one prox."""
    for steps, loss in zip(each, losses, strict=True):
        steps.correct(step, loss)
    runs = [steps.run for steps in each]
    optimizer.param_groups[0]["lr"] = runs[0].rates[step - 1]  # all have the rates of the round
    with torch.no_grad():
        optimizer.step()
        for steps in each:
            steps.restore()
        context.method.after_steps(runs, step, each[0].last)


@contextmanager
def _ready(context: WorkerContext, trained: Trained, grad: Tensor) -> Iterator[None]:
    """Let :func:`_compute_gradient` compute with a trained state inside."""
    if context.graphs is None:
        with bound(context, trained, grad):
            yield
    else:  # each graph binds copies
        with bound(context, None), context.graphs.active():
            yield


def _compute_gradient(
    context: WorkerContext,
    trained: Trained,
    grad: Tensor,
    batch: Mapping[str, Tensor],
    clients: int,
) -> Tensor:
    """Put the gradient of a batch into ``grad`` and return the loss of each client [k]."""
    if context.graphs is None:
        return _forward_backward(context, grad, batch, clients)

    def graph(*given: Tensor) -> tuple[Tensor, ...]:
        tensor = iter(given)
        held = Trained(
            next(tensor),
            {layer: next(tensor) for layer in trained.base},
            {layer: {n: next(tensor) for n in own} for layer, own in trained.constants.items()},
        )
        values, found = {name: next(tensor) for name in batch}, torch.empty_like(held.vector)
        with bound(context, held, found):
            return _forward_backward(context, found, values, clients), found

    constants = (tensor for own in trained.constants.values() for tensor in own.values())
    given = trained.vector, *trained.base.values(), *constants, *batch.values()
    losses, found = context.graphs.call(("pass", clients), graph, *given)
    grad.copy_(found)
    return losses.clone()


def _forward_backward(
    context: WorkerContext, grad: Tensor, batch: Mapping[str, Tensor], clients: int
) -> Tensor:
    grad.zero_()
    # A client's loss is the mean over its own rows, and the gradient of the sum is its own.
    losses = context.task.losses(context.model, batch, clients)
    torch.autograd.backward(losses, _ones(clients, losses.dtype, losses.device))
    return losses.detach()


@cache
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones [count], made once: steps launch nothing for them, and graphs may read them."""
    return torch.ones(count, dtype=dtype, device=device)


def make_optimizer(settings: "OptimizerConfig", vectors: list[Tensor]) -> torch.optim.Optimizer:
    """Build a fresh optimizer over flat vectors [P]."""
    lr, decay, betas = settings.lr, settings.weight_decay, (settings.beta1, settings.beta2)
    if settings.name == "sgd":
        return torch.optim.SGD(vectors, lr=lr, momentum=settings.momentum, weight_decay=decay)
    return torch.optim.AdamW(vectors, lr=lr, betas=betas, weight_decay=decay, fused=True)


def gradient_mask(run: LocalRun, wire: tuple[str, ...]) -> Tensor | None:
    """Return [P] float32, 1 for what is trained and 0 for the rest; None if all is trained."""
    if run.active is None:
        return None if run.entries is None else run.entries.float()
    mask = torch.ones(run.vector.shape)  # on the host, and copied once
    for unit, active in zip(run.layout.units(wire), run.active.tolist(), strict=True):
        if not active:
            mask[unit.span] = 0
            if unit.scalar is not None:
                mask[unit.scalar] = 0
    mask = mask.to(run.vector.device)
    return mask if run.entries is None else mask * run.entries


def uploaded_parameters(run: LocalRun, upload: State, method: Method) -> int:
    """Count what is really sent: no inactive core heads, no components beyond a client's rank."""
    count = upload.shared.numel() + count_numbers(upload.extra) - run.unsent
    if run.active is None:
        return count
    units = run.layout.units(method.wire(run.layout))
    inactive = (u.size for u, active in zip(units, run.active.tolist(), strict=True) if not active)
    return count - sum(inactive)
