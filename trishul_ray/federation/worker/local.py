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
from trishul_ray.federation.worker.survey import answer_survey
from trishul_ray.federation.worker.workbench import Workbench, bound, client_stream, new_run
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
    bench: Workbench, broadcast: ArrayState, job: TrainJob
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
        return answer_survey(bench, job)
    with (
        memory_of(
            f"client {job.client} in round {job.round}", _LESS.format("federation.batch_size")
        ),
        client_stream(bench, "dropout", job.round, job.client),
    ):
        steps = LocalSteps(bench, _started(bench, broadcast, job), job)
        losses, seconds = _timed_steps(bench, steps)
        upload, state = _uploaded(bench, steps, job, losses)
    return _answer(bench, job, steps.run, upload, state, losses, seconds)


def train_together(
    bench: Workbench, broadcast: ArrayState, jobs: Sequence[TrainJob]
) -> list[tuple[Upload, TrainReport]]:
    """Run the rounds of several clients in one forward and backward pass per step.

    A single one is :func:`train_client`. Otherwise each result is what the client alone would give,
    up to the last bits; its seconds are its share of those of all.

    Raises:
        FailsAgainError: The training loss of a client is not finite, and no stage hides clients.
        RunError: The memory of the device, or this process's share of it, is too small.
    """
    if len(jobs) == 1:
        return [train_client(bench, broadcast, jobs[0])]
    number, clients = jobs[0].round, ", ".join(str(job.client) for job in jobs)
    with (
        memory_of(
            f"clients {clients} in round {number}", _LESS.format("federation.stacked or batch_size")
        ),
        client_stream(bench, "dropout", number, jobs[0].client),  # no dropout: see Experiment
    ):
        vectors = bench.initial.new_empty(len(jobs), len(bench.initial))
        grads = torch.zeros_like(vectors)
        each = []
        for vector, grad, job in zip(vectors, grads, jobs, strict=True):
            run = _started(bench, broadcast, job)
            run.vector, run.grad = vector, grad
            each.append(LocalSteps(bench, run, job))
        losses, seconds = _timed_steps(bench, SharedSteps(bench, each, vectors, grads))
        own = zip(each, jobs, losses.T, strict=True)
        sent = [_uploaded(bench, *client) for client in own]
    return [
        _answer(bench, job, steps.run, *what, losses[:, i], seconds / len(jobs))
        for i, (job, steps, what) in enumerate(zip(jobs, each, sent, strict=True))
    ]


def _started(bench: Workbench, broadcast: ArrayState, job: TrainJob) -> LocalRun:
    run = new_run(bench, broadcast, job.round, job.client)
    run.client_state = {k: to_tensor(v).to(bench.device) for k, v in job.state.items()}
    return run


def _timed_steps(bench: Workbench, steps: "LocalSteps | SharedSteps") -> tuple[Tensor, float]:
    """Run all steps; return their losses, float64 [S] or [S, k] on the host, and the seconds."""
    shape = (steps.last, *steps.losses)
    losses = torch.empty(shape, dtype=torch.float64, device=bench.device)
    with steps.bound():
        began = time.perf_counter()
        for step in range(1, steps.last + 1):
            losses[step - 1] = steps.compute(step, steps.batch(step))
        losses = losses.cpu()
        return losses, time.perf_counter() - began


def _uploaded(
    bench: Workbench, steps: "LocalSteps", job: TrainJob, losses: Tensor
) -> tuple[State, Tensors]:
    vector, settings = steps.run.vector, bench.settings
    hidden, finite = bench.stages.hide_clients, bool(torch.isfinite(losses).all())
    if not finite and not hidden:
        step = int((~torch.isfinite(losses)).nonzero()[0]) + 1
        remedy = f"(optimizer.lr={settings.optimizer.lr}): try a smaller learning rate"
        if job.round == step == 1:
            remedy = (
                "before any step was made: what is not finite comes from the backbone, the data, "
                f"or start() of {named(type(bench.method))}"
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
        upload, state = bench.method.upload(steps.run, steps.last)
    _check_shapes(bench, upload)
    if not finite:
        upload = replace(upload, shared=torch.full_like(upload.shared, math.nan))
    # It refers to the run and the workbench: let them be freed before the next garbage collection.
    del steps.run.gradient
    return upload, state


def _check_shapes(bench: Workbench, upload: State) -> None:
    """Raise a FailsAgainError if an upload has other tensors than its method declares."""
    declared = bench.method.upload_lengths(bench.model.layout)
    found = {name: tuple(x.shape) for name, x in {"shared": upload.shared, **upload.extra}.items()}
    expected = {name: (length,) for name, length in declared.items()}
    for name in sorted(found.keys() | expected.keys()):
        if (sent := found.get(name)) != (wanted := expected.get(name)):
            raise FailsAgainError(
                f"upload() of {named(type(bench.method))} returns "
                f"{'no' if sent is None else f'shape {sent} as'} {name!r}, and upload_lengths() "
                f"declares {'none' if wanted is None else f'{wanted[0]} numbers'}"
            )


def _answer(
    bench: Workbench,
    job: TrainJob,
    run: LocalRun,
    upload: State,
    state: Tensors,
    losses: Tensor,
    seconds: float,
) -> tuple[Upload, TrainReport]:
    active = None if run.active is None else run.active.numpy()
    rows = len(bench.shards.shard(job.client))
    report = TrainReport(
        client=job.client,
        state={name: to_array(value) for name, value in state.items()},
        loss=float(losses.mean()),
        seconds=seconds,
        uploaded=uploaded_parameters(run, upload, bench.method),
        unsent=run.unsent,
        metrics=run.metrics,
        spectra=run.spectra,
        memory=peak_memory(bench.device),
    )
    tokens = 0 if bench.tokens is None else int(bench.tokens[job.client])
    return Upload(job.client, rows, upload.map(to_array), active, tokens=tokens), report


def send_change(
    bench: Workbench,
    broadcast: ArrayState,
    job: TrainJob,
    upload: Upload,
    report: TrainReport,
) -> tuple[Upload, TrainReport]:
    """Return a client's upload as a change that has passed the stages, and what it reports then."""
    method, settings = bench.method, bench.settings
    units = tuple(bench.model.layout.units(method.wire(bench.model.layout)))
    moved = upload.arrays.shared - broadcast.shared
    if upload.active is not None:
        moved[np.repeat(~upload.active, [unit.size for unit in units])] = 0
    weight = configured_weight(settings.federation.weighting, upload)
    change = bench.stages.send(
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

    def __init__(self, bench: Workbench, run: LocalRun, job: TrainJob) -> None:
        self.bench, self.run = bench, run
        settings, method, fed = bench.settings, bench.method, bench.settings.federation
        rng = numpy_rng(settings.seed, "batches", job.round, job.client)
        rows = bench.shards.shard(job.client)
        self._order = batch_order(rows, fed.local_steps, fed.batch_size, rng)  # [steps, b]
        self.last = run.steps = fed.local_steps
        self._trained = Trained(run.vector, run.broadcast.base, run.broadcast.constants)
        run.gradient = self._gradient
        method.start(run, bench.initial)
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
        return make_optimizer(self.bench.settings.optimizer, [self.run.vector])

    def bound(self) -> AbstractContextManager[None]:
        """Let the model compute with the client's vector inside, as :meth:`compute` needs it."""
        return _ready(self.bench, self._trained, self.run.grad)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the prepared mini-batch of a step (from 1); its copies may still be under way."""
        return self.bench.train_batch(self.rows(step))

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the mini-batch of a step (from 1), [b]."""
        rows: np.ndarray = self._order[step - 1]
        return rows

    def compute(self, step: int, batch: Mapping[str, Tensor]) -> Tensor:
        """Run a step on a prepared batch and return its loss, a scalar on the device."""
        loss = self._differentiate(batch)
        _end_step(self.bench, self.optimizer, [self], step, [loss])
        return loss

    def correct(self, step: int, loss: Tensor) -> None:
        """Correct the gradient of a step, which is in ``run.grad``."""
        run, clip_norm = self.run, self.bench.settings.optimizer.clip_norm
        run.step, run.loss = step, loss
        self.bench.method.before_step(run)
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
        return _compute_gradient(self.bench, self._trained, self.run.grad, batch, 1)[0]

    def _gradient(self, step: int) -> Tensor:
        with self.bound():
            return self._differentiate(self.batch(step))


class SharedSteps:
    """The local steps of k clients in one forward and backward pass; else as :class:`LocalSteps`.

    Args:
        bench: The workbench.
        each: The clients' own steps.
        vectors: [k, P], whose rows are the clients' vectors.
        grads: [k, P], whose rows are their gradients.
    """

    def __init__(
        self, bench: Workbench, each: Sequence[LocalSteps], vectors: Tensor, grads: Tensor
    ) -> None:
        self.bench, self.each, self.last = bench, each, each[0].last
        self.losses, self._grads = (len(each),), grads
        broadcast, optimizer = each[0].run.broadcast, bench.settings.optimizer
        self._optimizer = make_optimizer(optimizer, [steps.run.vector for steps in each])
        self._trained = Trained(vectors, broadcast.base, broadcast.constants)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the model compute with the vectors of all clients inside."""
        with warnings.catch_warnings(), _ready(self.bench, self._trained, self._grads):
            # Those of a tensor have gaps: they lie in the rows of all clients.
            warnings.filterwarnings("ignore", message="grad and param do not obey the gradient")
            yield

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the prepared mini-batches of a step (from 1), one after the other."""
        rows = np.concatenate([steps.rows(step) for steps in self.each])
        return self.bench.train_batch(rows)

    def compute(self, step: int, batch: Mapping[str, Tensor]) -> Tensor:
        """Run a step of every client and return their losses [k], on the device."""
        losses = _compute_gradient(self.bench, self._trained, self._grads, batch, len(self.each))
        _end_step(self.bench, self._optimizer, self.each, step, losses)
        return losses


def _end_step(
    bench: Workbench,
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
        bench.method.after_steps(runs, step, each[0].last)


@contextmanager
def _ready(bench: Workbench, trained: Trained, grad: Tensor) -> Iterator[None]:
    """Let :func:`_compute_gradient` compute with a trained state inside."""
    if bench.graphs is None:
        with bound(bench, trained, grad):
            yield
    else:  # each graph binds copies
        with bound(bench, None), bench.graphs.active():
            yield


def _compute_gradient(
    bench: Workbench, trained: Trained, grad: Tensor, batch: Mapping[str, Tensor], clients: int
) -> Tensor:
    """Put the gradient of a batch into ``grad`` and return the loss of each client [k]."""
    if bench.graphs is None:
        return _forward_backward(bench, grad, batch, clients)

    def graph(*given: Tensor) -> tuple[Tensor, ...]:
        tensor = iter(given)
        held = Trained(
            next(tensor),
            {layer: next(tensor) for layer in trained.base},
            {layer: {n: next(tensor) for n in own} for layer, own in trained.constants.items()},
        )
        values, found = {name: next(tensor) for name in batch}, torch.empty_like(held.vector)
        with bound(bench, held, found):
            return _forward_backward(bench, found, values, clients), found

    constants = (tensor for own in trained.constants.values() for tensor in own.values())
    given = trained.vector, *trained.base.values(), *constants, *batch.values()
    losses, found = bench.graphs.call(("pass", clients), graph, *given)
    grad.copy_(found)
    return losses.clone()


def _forward_backward(
    bench: Workbench, grad: Tensor, batch: Mapping[str, Tensor], clients: int
) -> Tensor:
    grad.zero_()
    # A client's loss is the mean over its own rows, and the gradient of the sum is its own.
    losses = bench.task.losses(bench.model, batch, clients)
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
