"""One client's round, as a pure function.

The same inputs give the same bytes in any process: every random draw comes from a stream named by
``(seed, purpose, round, client)``, the optimizer is fresh, and the resident backbone is unchanged.
Nothing here needs Ray.

Legend: P trainables of a client, S local steps, b batch size.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trishul_ray import plugins
from trishul_ray.adapters.model import Trained
from trishul_ray.data.dataset import Split
from trishul_ray.errors import FailsAgainError
from trishul_ray.federation.messages import (
    TrainJob,
    TrainReport,
    Upload,
    to_array,
    to_tensor,
)
from trishul_ray.federation.reduce import configured_weight
from trishul_ray.federation.workbench import Workbench, bound, new_run
from trishul_ray.memory import memory_of, peak_memory
from trishul_ray.methods.base import LocalRun, Method, State, Tensors, count_numbers
from trishul_ray.rng import numpy_rng, torch_rng
from trishul_ray.stages import ArrayState, Change, Sender, StepFlops

if TYPE_CHECKING:
    from trishul_ray.config import OptimizerConfig

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
        return _answer_survey(bench, job)
    with (
        memory_of(
            f"client {job.client} in round {job.round}", _LESS.format("federation.batch_size")
        ),
        _client_stream(bench, "dropout", job.round, job.client),
    ):
        steps = LocalSteps(bench, _started(bench, broadcast, job), job)
        losses, seconds = _timed_steps(bench, steps)
        upload, state = _uploaded(bench, steps, job, losses)
    return _answer(bench, job, steps.run, upload, state, losses, seconds)


def train_together(
    bench: Workbench, broadcast: ArrayState, jobs: Sequence[TrainJob]
) -> list[tuple[Upload, TrainReport]]:
    """Run the rounds of clients of equally many steps in one forward and backward pass a step.

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
        _client_stream(bench, "dropout", number, jobs[0].client),  # no dropout: see Experiment
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
                f"or start() of {plugins.named(type(bench.method))}"
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
                f"upload() of {plugins.named(type(bench.method))} returns "
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
        squared_loss=float(losses.square().mean()),
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
    change, read = bench.stages.send(
        Change(moved, upload.arrays.extra),
        Sender(
            settings.seed, job.round, job.client, weight, units, upload.active, job.kept,
            job.instructions, broadcast.shared,
        ),
    )  # fmt: skip
    corrected = {n: job.state.get(n, 0.0) + read[n] for n in method.mirrored if n in read}
    arrays = replace(upload.arrays, shared=change.shared, extra=change.extra)
    report = replace(
        report,
        state={**report.state, **corrected},
        uploaded_bytes=change.uploaded_bytes,
        kept=change.kept,
        stages=change.metrics,
    )
    return replace(upload, arrays=arrays, weighted=change.weighted), report


class LocalSteps:
    """The local steps of one client's round.

    A step has a part of the host, :meth:`batch`, and a part of the device, :meth:`compute`. The
    latter never waits for the device, and its kernels, shapes and addresses do not depend on
    values, so that the host prepares the next batches in the meantime, and CUDA graphs can hold its
    forward and backward pass and the prox (``resources.cuda_graphs``). ``run`` is a new run of the
    client, which the steps change; ``last`` is S, the number of the last step. A client that makes
    fewer steps than the round has makes the first ones, with their batches and rates.
    """

    losses = ()  # the shape of what :meth:`compute` returns

    def __init__(self, bench: Workbench, run: LocalRun, job: TrainJob) -> None:
        self.bench, self.run = bench, run
        settings, method, fed = bench.settings, bench.method, bench.settings.federation
        rng = numpy_rng(settings.seed, "batches", job.round, job.client)
        rows = bench.shards.shard(job.client)
        self._order = batch_order(rows, fed.local_steps, fed.batch_size, rng)  # [steps, b]
        self.last = run.steps = job.steps or fed.local_steps
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
        self.optimizer = make_optimizer(settings.optimizer, run.vector)

    def bound(self) -> AbstractContextManager[None]:
        """Let the model compute with the client's vector inside, as :meth:`compute` needs it."""
        return _ready(self.bench, self._trained, self.run.grad)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the prepared mini-batch of a step (from 1); its copies may still be under way."""
        return _prepare(self.bench, self.bench.train, self.rows(step))

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the mini-batch of a step (from 1), [b]."""
        rows: np.ndarray = self._order[step - 1]
        return rows

    def compute(self, step: int, batch: Mapping[str, Tensor]) -> Tensor:
        """Run a step on a prepared batch and return its loss, a scalar on the device."""
        loss = self._backward(batch)
        self.update(step, loss)
        return loss

    def update(self, step: int, loss: Tensor) -> None:
        """End a step whose gradient is in ``run.grad``: correct it, step, and what follows."""
        run, method, settings = self.run, self.bench.method, self.bench.settings
        run.step, run.loss = step, loss
        method.before_step(run)
        if self._mask is not None:
            run.grad.mul_(self._mask)
        if settings.optimizer.clip_norm is not None:
            # Clip what the optimizer reads: corrected, and without inactive core heads.
            torch.nn.utils.clip_grad_norm_([run.vector], settings.optimizer.clip_norm)
        self.optimizer.param_groups[0]["lr"] = run.rates[step - 1]
        with torch.no_grad():
            self.optimizer.step()
            if self._untrained is not None and self._mask is not None:
                run.vector.mul_(self._mask).add_(self._untrained)
            method.after_step(run, step, self.last)

    def _backward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return _backward(self.bench, self._trained, self.run.grad, batch, 1)[0]

    def _gradient(self, step: int) -> Tensor:
        with self.bound():
            return self._backward(self.batch(step))


class SharedSteps:
    """The local steps of k clients in one forward and backward pass; else as :class:`LocalSteps`.

    Args:
        bench: The workbench.
        each: The clients' own steps, of equal number.
        vectors: [k, P], whose rows are the clients' vectors.
        grads: [k, P], whose rows are their gradients.
    """

    def __init__(
        self, bench: Workbench, each: Sequence[LocalSteps], vectors: Tensor, grads: Tensor
    ) -> None:
        self.bench, self.each, self.last = bench, each, each[0].last
        self.losses, self._grads = (len(each),), grads
        broadcast = each[0].run.broadcast
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
        return _prepare(self.bench, self.bench.train, rows)

    def compute(self, step: int, batch: Mapping[str, Tensor]) -> Tensor:
        """Run a step of every client and return their losses [k], on the device."""
        losses = _backward(self.bench, self._trained, self._grads, batch, len(self.each))
        for steps, loss in zip(self.each, losses, strict=True):
            steps.update(step, loss)
        return losses


@contextmanager
def _ready(bench: Workbench, trained: Trained, grad: Tensor) -> Iterator[None]:
    """Let :func:`_backward` compute with a trained state inside."""
    if bench.graphs is None:
        with bound(bench, trained, grad):
            yield
    else:  # each graph binds copies
        with bound(bench, None), bench.graphs.active():
            yield


def _backward(
    bench: Workbench, trained: Trained, grad: Tensor, batch: Mapping[str, Tensor], clients: int
) -> Tensor:
    """Put the gradient of a batch into ``grad`` and return the loss of each client [k]."""
    if bench.graphs is None:
        return _pass(bench, grad, batch, clients)

    def graph(*given: Tensor) -> tuple[Tensor, ...]:
        tensor = iter(given)
        held = Trained(
            next(tensor),
            {layer: next(tensor) for layer in trained.base},
            {layer: {n: next(tensor) for n in own} for layer, own in trained.constants.items()},
        )
        values, found = {name: next(tensor) for name in batch}, torch.empty_like(held.vector)
        with bound(bench, held, found):
            return _pass(bench, found, values, clients), found

    constants = (tensor for own in trained.constants.values() for tensor in own.values())
    given = trained.vector, *trained.base.values(), *constants, *batch.values()
    losses, found = bench.graphs.call(("pass", clients), graph, *given)
    grad.copy_(found)
    return losses.clone()


def _pass(bench: Workbench, grad: Tensor, batch: Mapping[str, Tensor], clients: int) -> Tensor:
    grad.zero_()
    # A client's loss is the mean over its own rows, and the gradient of the sum is its own.
    losses = bench.task.losses(bench.model, batch, clients)
    losses.sum().backward()
    return losses.detach()


def count_flops(bench: Workbench) -> StepFlops:
    """Count the FLOPs of a local step, by the shapes of the first rows of the training split.

    Counted are the matrix products, convolutions and attention (as plain matrix products on every
    device) of the loss and its gradient; not the elementwise work, the optimizer, or what a method
    adds to a step. Without trainables a step would cost twice the forward pass: nothing has
    gradients of weights then. The rest is the adapters' and the classification head's.
    """
    size = bench.settings.federation.batch_size
    batch = _prepare(bench, bench.train, np.resize(np.arange(min(size, len(bench.train))), size))
    grad = torch.zeros_like(bench.initial)
    with sdpa_kernel(SDPBackend.MATH):
        trained = Trained(bench.initial.clone())
        with bound(bench, trained, grad), _flop_counter() as whole:
            _loss(bench, batch).backward()
        with _flop_counter() as forward, torch.no_grad():
            _loss(bench, batch)
    total = float(whole.get_total_flops())
    backbone = min(2.0 * forward.get_total_flops(), total)
    return StepFlops(backbone, total - backbone)


def _flop_counter() -> FlopCounterMode:
    """Return torch's counter; of itself it does not count products that are added in place."""

    def product(added: torch.Size, first: torch.Size, second: torch.Size, **_: object) -> int:
        return 2 * first.numel() * second[-1]

    in_place = {torch.ops.aten.addmm_: product, torch.ops.aten.baddbmm_: product}
    return FlopCounterMode(display=False, custom_mapping=in_place)


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


def _answer_survey(bench: Workbench, job: TrainJob) -> tuple[Upload, TrainReport]:
    plan, settings = bench.method.survey_plan, bench.settings
    assert plan is not None  # a method without one has no round 0
    rng = numpy_rng(settings.seed, "survey-batches", job.client)
    size = plan.batch_size or settings.federation.batch_size
    shard = bench.shards.shard(job.client)
    batches = batch_order(shard, plan.batches, size, rng)
    layers = {spec.name: bench.model.model.get_submodule(spec.name) for spec in bench.model.specs}

    def gradients() -> Iterator[Tensors]:
        for rows in batches:
            with weight_gradients(layers) as found:
                _loss(bench, _prepare(bench, bench.train, rows)).backward()
            yield {name: found[name].float() for name in layers}

    began = time.perf_counter()
    with _client_stream(bench, "survey-dropout", job.client):
        answer = State(torch.empty(0), extra=bench.method.survey(gradients())).map(to_array)
    answer = replace(answer, extra=bench.stages.answer(answer.extra, job.instructions))
    seconds, numbers = time.perf_counter() - began, sum(a.size for a in answer.extra.values())
    return (
        Upload(job.client, len(shard), answer),
        TrainReport(job.client, {}, math.nan, seconds, uploaded=numbers),
    )


@contextmanager
def weight_gradients(layers: Mapping[str, nn.Module]) -> Iterator[Tensors]:
    """Collect the gradients of linear layers' weights from the backward passes inside.

    Each is the sum of ``dY^T X`` over the layer's calls, [d_out, d_in] in the dtype of X, whether
    or not the weight is a tensor that autograd could differentiate by.
    """
    found: Tensors = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = inputs[0].detach()
            x = x.reshape(-1, x.shape[-1])
            if not output.requires_grad:  # nothing before it is trained
                output = output.detach().requires_grad_().clone()

            def add(dy: Tensor) -> None:
                gradient = dy.reshape(-1, dy.shape[-1]).t() @ x
                found[name] = found[name] + gradient if name in found else gradient

            output.register_hook(add)
            return output

        return after

    hooks = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _prepare(bench: Workbench, split: Split, rows: np.ndarray) -> dict[str, Tensor]:
    return bench.task.prepare_batch(split.batch(rows), bench.device, bench.dtype)


def _loss(bench: Workbench, batch: Mapping[str, Tensor]) -> Tensor:
    return bench.task.losses(bench.model, batch, 1)[0]


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
