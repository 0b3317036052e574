"""One client's round, as a pure function.

The same inputs give the same bytes in any process: every random draw comes from a stream identified
by ``(seed, purpose, round, client)``, the optimizer is fresh, and the shared backbone is unchanged.
This module does not need Ray.

Legend: P trainables of a client, S local steps, b batch size, k clients that train together.
"""

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.model import Trained
from trishul_ray.data.sampling import batch_order
from trishul_ray.errors import PermanentError
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
from trishul_ray.methods.base.optimizer import make_optimizer
from trishul_ray.plugins.loading import named
from trishul_ray.runtime.memory import memory_of, peak_memory
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import ArrayState, Change, ClientRoundInfo, LocalStep, Stage

#: Advice for errors of too little memory.
_LESS = (
    "lower federation.batch_size or federation.stacked, set model.gradient_checkpointing=true or "
    "model.precision=bf16"
)


def train_client(
    context: WorkerContext, broadcast: ArrayState, job: TrainJob
) -> tuple[Upload, TrainReport]:
    """Run one client's round; see :func:`train_clients`."""
    return train_clients(context, broadcast, [job])[0]


def train_clients(
    context: WorkerContext, broadcast: ArrayState, jobs: Sequence[TrainJob]
) -> list[tuple[Upload, TrainReport]]:
    """Run clients' rounds: ``(broadcast, client state, shard, round, rng) -> (update, state)``.

    Several clients share the forward and backward pass of each step. Their results differ from
    separate calls only in the last bits, and the total time is divided equally among them. Round 0
    is the method's survey, at the pretrained model.

    The host waits for a GPU after the last step, when the time of the local steps ends, and to copy
    the results. Only a method's ``start`` and ``upload`` may make it wait more often.

    Raises:
        PermanentError: The training loss is not finite, and no stage hides clients. The message
            reports client and step.
        RunError: The memory of the device, or this process's share of it, is too small.
    """
    number, clients = jobs[0].round, " and ".join(str(job.client) for job in jobs)
    if number == 0:
        return [answer_survey(context, job) for job in jobs]
    with (
        memory_of(f"client {clients} in round {number}", _LESS),
        # Dropout is not used with several clients; see Experiment.
        client_stream(context, "dropout", number, jobs[0].client),
    ):
        steps = LocalSteps(context, broadcast, jobs)
        losses, seconds = steps.run()
        sent = [_upload(context, *own) for own in zip(steps.clients, losses.T, strict=True)]
    return [
        _result(context, client, upload, state, float(own.mean()), seconds / len(jobs))
        for client, own, (upload, state) in zip(steps.clients, losses.T, sent, strict=True)
    ]


def _upload(context: WorkerContext, client: "LocalClient", losses: Tensor) -> tuple[State, Tensors]:
    """Return a client's upload and its new state."""
    run, settings = client.run, context.settings
    hidden, finite = context.stages.hide_clients, bool(torch.isfinite(losses).all())
    if not finite and not hidden:
        step = int((~torch.isfinite(losses)).nonzero()[0]) + 1
        remedy = f"(optimizer.lr={settings.optimizer.lr}): try a smaller learning rate"
        if run.round == step == 1:
            remedy = (
                "before the first update: the cause is the backbone, the data, or start() of "
                f"{named(type(context.method))}"
            )
        raise PermanentError(
            f"training loss of client {run.client} is not finite at round {run.round}, local "
            f"step {step} {remedy}"
        )
    if hidden:
        # Ending the run would reveal information about this client: its upload is rejected, as
        # zeros.
        finite = finite and bool(torch.isfinite(run.vector).all())
        run.vector.nan_to_num_(0.0, 0.0, 0.0)
    with torch.no_grad():
        upload, state = context.method.upload(run, run.steps)
    _check_shapes(context, upload)
    if not finite:
        upload = replace(upload, shared=torch.full_like(upload.shared, math.nan))
    # Break the reference cycle, so that the run is freed before the next garbage collection.
    del run.gradient
    return upload, state


def _check_shapes(context: WorkerContext, upload: State) -> None:
    """Raise a PermanentError if an upload has other tensors than its method declares."""
    declared = context.method.upload_lengths(context.model.layout)
    found = {name: tuple(x.shape) for name, x in {"shared": upload.shared, **upload.extra}.items()}
    expected = {name: (length,) for name, length in declared.items()}
    for name in sorted(found.keys() | expected.keys()):
        if (sent := found.get(name)) != (wanted := expected.get(name)):
            raise PermanentError(
                f"upload() of {named(type(context.method))} returns "
                f"{'no' if sent is None else f'shape {sent} as'} {name!r}, and upload_lengths() "
                f"declares {'none' if wanted is None else f'{wanted[0]} numbers'}"
            )


def _result(
    context: WorkerContext,
    trained: "LocalClient",
    upload: State,
    state: Tensors,
    loss: float,
    seconds: float,
) -> tuple[Upload, TrainReport]:
    run, client = trained.run, trained.run.client
    assert client is not None
    report = TrainReport(
        client=client,
        state={name: to_array(value) for name, value in state.items()},
        loss=loss,
        seconds=seconds,
        uploaded=uploaded_parameters(run, upload, context.method),
        unsent=run.unsent,
        metrics=run.metrics,
        spectra=run.spectra,
        stages=trained.metrics,
        memory=peak_memory(context.device),
    )
    active = None if run.active is None else run.active.numpy()
    rows = len(context.shards.shard(client))
    tokens = 0 if context.tokens is None else int(context.tokens[client])
    return Upload(client, rows, upload.map(to_array), active, tokens=tokens), report


def send_change(
    context: WorkerContext,
    broadcast: ArrayState,
    job: TrainJob,
    upload: Upload,
    report: TrainReport,
) -> tuple[Upload, TrainReport]:
    """Pass a client's change through the stages, and update its upload and its report."""
    method, settings = context.method, context.settings
    units = tuple(context.model.layout.units(method.wire(context.model.layout)))
    moved = upload.arrays.shared - broadcast.shared
    if upload.active is not None:
        moved[np.repeat(~upload.active, [unit.size for unit in units])] = 0
    weight = configured_weight(settings.federation.weighting, upload)
    change = context.stages.send(
        Change(moved, upload.arrays.extra),
        ClientRoundInfo(
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
        stages=report.stages | change.metrics,
    )
    return replace(upload, arrays=arrays), report


class LocalClient:
    """A client that trains.

    Attributes:
        run: Its run, modified by the steps.
        order: [S, b], the rows of its mini-batches.
        trained: The parameters of its model.
        metrics: Numbers of the stage that computes gradients, by name.
    """

    def __init__(
        self,
        context: WorkerContext,
        broadcast: ArrayState,
        job: TrainJob,
        vector: Tensor,
        grad: Tensor,
    ) -> None:
        settings, method, fed = context.settings, context.method, context.settings.federation
        self._context = context
        shard = context.shards.shard(job.client)
        steps, size = fed.steps_of(len(shard))
        self.run = run = new_run(context, broadcast, job.round, job.client, steps, vector, grad)
        self._job, self._shard, self._size = job, shard, size
        self.metrics: dict[str, float] = {}
        run.client_state = {k: to_tensor(v).to(context.device) for k, v in job.state.items()}
        run.gradient = self._gradient
        rng = numpy_rng(settings.seed, "batches", job.round, job.client)
        self.order = batch_order(shard, steps, size, rng)
        self.trained = Trained(vector, run.broadcast.base, run.broadcast.constants)
        method.start(run, context.initial)
        self._mask = gradient_mask(run, method.wire(run.layout))
        # Weight decay also changes parameters without a gradient: restore the untrained ones.
        decays = settings.optimizer.weight_decay > 0
        self._untrained = None
        if decays and self._mask is not None:
            self._untrained = vector * (1 - self._mask)
        vector.grad = grad

    def correct(self, step: int, loss: Tensor) -> None:
        """Correct the gradient of a step, in ``run.grad``."""
        run, clip_norm = self.run, self._context.settings.optimizer.clip_norm
        run.step, run.loss = step, loss
        self._context.method.before_step(run)
        if self._mask is not None:
            run.grad.mul_(self._mask)
        if clip_norm is not None:
            # Clip the gradient that the optimizer reads: corrected, without inactive core heads.
            torch.nn.utils.clip_grad_norm_([run.vector], clip_norm)

    def restore(self) -> None:
        """Restore untrained parameters after a step."""
        if self._untrained is not None and self._mask is not None:
            self.run.vector.mul_(self._mask).add_(self._untrained)

    def step(self, number: int) -> LocalStep:
        """Return a step for the stage that computes its gradient."""
        job = self._job
        return LocalStep(
            self._context.settings.seed, job.round, job.client, number, self._shard, self._size,
            self.run.grad, self._mask, job.instructions, self.metrics, self._examples,
        )  # fmt: skip

    def _examples(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return losses [k] and gradients [k, P] of k rows: one stacked client per row."""
        context, count = self._context, len(rows)
        vectors = self.trained.vector.expand(count, -1)
        grads = torch.empty(vectors.shape, device=context.device)
        with bound(context, replace(self.trained, vector=vectors), grads):
            losses = _forward_backward(context, grads, context.train_batch(rows), count)
        return losses, grads if self._mask is None else grads.mul_(self._mask)

    def _gradient(self, step: int) -> Tensor:
        context, grad = self._context, self.run.grad
        if (stage := context.stages.of_gradients) is not None:
            raise PermanentError(
                f"{named(type(context.method))} reads run.gradient(), and the section {stage.name} "
                "computes the gradients of local steps: use another method"
            )
        with _ready(context, self.trained, grad):
            batch = context.train_batch(self.order[step - 1])
            return _compute_gradient(context, self.trained, grad, batch, 1)[0]


class LocalSteps:
    """The local steps of clients that share the forward and backward pass of each step.

    A step has a host part, :meth:`batch`, and a device part, :meth:`compute`. The device part never
    waits for the device, and its kernels, shapes and addresses do not depend on values. Thus the
    host can prepare the next batches in the meantime, and CUDA graphs can capture the forward and
    backward pass and the prox (``resources.cuda_graphs``). ``last`` is S, the number of the last
    step.
    """

    def __init__(
        self, context: WorkerContext, broadcast: ArrayState, jobs: Sequence[TrainJob]
    ) -> None:
        vectors = context.initial.new_empty(len(jobs), len(context.initial))  # [k, P]
        grads = torch.zeros_like(vectors)
        self.clients = [
            LocalClient(context, broadcast, job, vector, grad)
            for job, vector, grad in zip(jobs, vectors, grads, strict=True)
        ]
        settings, first = context.settings, self.clients[0]
        self.context, self.last = context, first.run.steps
        self._runs = [client.run for client in self.clients]
        self._optimizer = make_optimizer(settings.optimizer, [run.vector for run in self._runs])
        self._stage: Stage | None = context.stages.of_gradients
        self._trained, self._grads = first.trained, first.run.grad
        if len(jobs) > 1:
            self._trained, self._grads = replace(first.trained, vector=vectors), grads

    def run(self) -> tuple[Tensor, float]:
        """Run all steps; return their losses, float64 [S, k] on the host, and the seconds."""
        shape = self.last, len(self.clients)
        losses = torch.empty(shape, dtype=torch.float64, device=self.context.device)
        with self.bound():
            began = time.perf_counter()
            for step in range(1, self.last + 1):
                losses[step - 1] = self._step(step)
            losses = losses.cpu()
            return losses, time.perf_counter() - began

    def _step(self, step: int) -> Tensor:
        if self._stage is None:
            return self.compute(step, self.batch(step))
        losses = [self._stage.gradient(client.step(step)) for client in self.clients]
        return self.finish(step, torch.stack(losses))

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Bind the clients' vectors to the model for :meth:`compute`."""
        with warnings.catch_warnings(), _ready(self.context, self._trained, self._grads):
            # The gradients of a tensor are rows of a matrix of all clients.
            warnings.filterwarnings("ignore", message="grad and param do not obey the gradient")
            yield

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the prepared mini-batches of a step (from 1), one client after another.

        Copies to the device may still be in progress.
        """
        rows = np.concatenate([client.order[step - 1] for client in self.clients])
        return self.context.train_batch(rows)

    def compute(self, step: int, batch: Mapping[str, Tensor]) -> Tensor:
        """Run a step on prepared batches and return the losses [k], on the device."""
        count = len(self.clients)
        losses = _compute_gradient(self.context, self._trained, self._grads, batch, count)
        return self.finish(step, losses)

    def finish(self, step: int, losses: Tensor) -> Tensor:
        """Correct the gradients of a step, move the clients' vectors, and return the losses."""
        for client, loss in zip(self.clients, losses, strict=True):
            client.correct(step, loss)
        self._optimizer.param_groups[0]["lr"] = self._runs[0].rates[step - 1]
        with torch.no_grad():
            self._optimizer.step()
            for client in self.clients:
                client.restore()
            self.context.method.after_steps(self._runs, step, self.last)
        return losses


@contextmanager
def _ready(context: WorkerContext, trained: Trained, grad: Tensor) -> Iterator[None]:
    """Prepare the model for :func:`_compute_gradient` with a trained state."""
    if context.graphs is None:
        with bound(context, trained, grad):
            yield
    else:  # Each graph binds copies.
        with bound(context, None), context.graphs.active():
            yield


def _compute_gradient(
    context: WorkerContext,
    trained: Trained,
    grad: Tensor,
    batch: Mapping[str, Tensor],
    clients: int,
) -> Tensor:
    """Compute the gradient of a batch into ``grad``, and return the loss of each client [k]."""
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
    # A client's loss is the mean over its rows, so the gradient of the sum is per client.
    losses = context.task.losses(context.model, batch, clients)
    torch.autograd.backward(losses, _ones(clients, losses.dtype, losses.device))
    return losses.detach()


@cache
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return cached ones [count]: steps launch no kernels for them, and graphs may read them."""
    return torch.ones(count, dtype=dtype, device=device)


def gradient_mask(run: LocalRun, wire: tuple[str, ...]) -> Tensor | None:
    """Return [P] float32, 1 for trained entries and 0 for others; None if all are trained."""
    if run.active is None:
        return None if run.entries is None else run.entries.float()
    mask = torch.ones(run.vector.shape)  # on the host, and copied only once
    for unit, active in zip(run.layout.units(wire), run.active.tolist(), strict=True):
        if not active:
            mask[unit.span] = 0
            if unit.scalar is not None:
                mask[unit.scalar] = 0
    mask = mask.to(run.vector.device)
    return mask if run.entries is None else mask * run.entries


def uploaded_parameters(run: LocalRun, upload: State, method: Method) -> int:
    """Count the sent numbers, without inactive core heads and components beyond the rank."""
    count = upload.shared.numel() + count_numbers(upload.extra) - run.unsent
    if run.active is None:
        return count
    units = run.layout.units(method.wire(run.layout))
    inactive = (u.size for u, active in zip(units, run.active.tolist(), strict=True) if not active)
    return count - sum(inactive)
