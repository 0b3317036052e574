"""The limit and a whole local step, timed by turns on the same batches.

The limit is what no adapter can go below: the frozen backbone's forward, the loss, and the
backward that carries the gradient to the output of the embeddings, with no weight gradient at all.

A step is not re-implemented here: the clock hangs on the seams of the library's own client loop
(:func:`trishul_ray.federation.worker.local.train_client`), and the limit runs inside the loop's
call for the next batch, so that both see the same batch, the same weights and the same machine.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trishul_ray.adapters.model import Trained
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.worker.context import WorkerContext, build_context
from trishul_ray.federation.worker.local import train_client

#: Parts of a step, in order.
PARTS = ("data", "forward", "backward", "optimizer", "prox")


def now(device: torch.device) -> float:
    """Seconds on a clock that waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Limit:
    """The frozen backbone's forward and input gradient. Shares its weights with ``context``."""

    def __init__(self, context: WorkerContext) -> None:
        """Copy the model's structure, not its weights."""
        self.device, self.dtype, self.task = context.device, context.dtype, context.task
        self.model = context.model.merge(Trained(context.initial))
        adapted = dict(context.model.model.named_parameters())
        for name, _ in list(self.model.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            # An untrained update leaves every weight as it is, so sharing changes no number.
            self.model.get_submodule(owner)._parameters[attribute] = adapted[name]
        self.model.requires_grad_(False).eval()
        model: Any = self.model
        # A ViT's embeddings include patches and positions; a text model's are a table, which the
        # parts of an encoder-decoder may hold as modules of their own.
        embeddings: list[Any] = [getattr(model.base_model, "embeddings", None)]
        if embeddings[0] is None:
            shape = model.get_input_embeddings().weight.shape
            tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
            embeddings = [table for table in tables if table.weight.shape == shape]
        for module in embeddings:
            module.register_forward_hook(_as_leaf)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a prepared batch; its backward ends at the output of the embeddings."""
        return self.task.loss(self.model(**self.task.inputs(batch)), batch)

    def seconds(self, batch: Mapping[str, Tensor]) -> tuple[float, float]:
        """Seconds of forward with loss, and of backward, on a prepared batch."""
        began = now(self.device)
        loss = self.loss(batch)
        middle = now(self.device)
        loss.backward()
        return middle - began, now(self.device) - middle


def _as_leaf(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_()


@dataclass
class Steps:
    """Seconds of each measured step by part, and of the limit beside it."""

    parts: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PARTS})
    forward: list[float] = field(default_factory=list)  # of the limit
    backward: list[float] = field(default_factory=list)  # of the limit

    @property
    def step(self) -> list[float]:
        """Whole steps."""
        return [sum(values) for values in zip(*self.parts.values(), strict=True)]

    @property
    def limit(self) -> list[float]:
        """Whole limits."""
        return [a + b for a, b in zip(self.forward, self.backward, strict=True)]


class _Clocked:
    """The training rows of a workbench whose steps are timed; runs the limit before each."""

    def __init__(self, context: WorkerContext) -> None:
        self.rows, self.device, self.steps = context.train, context.device, Steps()
        self.limit = Limit(context)
        self.marks: list[float] = []
        context.train = self  # type: ignore[assignment]  # in the place of the rows
        self._prepare = context.task.prepare_batch
        self._after(context.task, "prepare_batch")
        self._after(context.task, "loss")
        self._before(context.method, "before_step")
        self._before(context.method, "after_steps")
        self._after(context.method, "after_steps")

    def _mark(self) -> None:
        if self.marks:  # empty while the limit runs
            self.marks.append(now(self.device))
        if len(self.marks) == len(PARTS) + 1:
            for part, (first, second) in zip(PARTS, pairwise(self.marks), strict=True):
                self.steps.parts[part].append(second - first)
            self.marks = []

    def _before(self, owner: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def marked(*args: Any) -> Any:
            self._mark()
            return plain(*args)

        setattr(owner, name, marked)

    def _after(self, owner: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def marked(*args: Any) -> Any:
            found = plain(*args)
            self._mark()
            return found

        setattr(owner, name, marked)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """First the limit on this batch, then the batch itself, from where a step's clock runs."""
        prepared = self._prepare(self.rows.batch(indices), self.device, self.limit.dtype)
        forward, backward = self.limit.seconds(prepared)
        self.steps.forward.append(forward)
        self.steps.backward.append(backward)
        del prepared
        self.marks = [now(self.device)]
        return self.rows.batch(indices)


def time_steps(experiment: Experiment, prepared: Prepared, steps: int) -> Steps:
    """Time ``steps`` local steps of one client, by turns with the limit.

    One step before them warms up; one after them ends the client's round, and keeps the cores for
    the statistics of its prox. Neither is among the measured ones.
    """
    fed = experiment.federation.model_copy(update={"local_steps": steps + 2})
    experiment = experiment.model_copy(update={"federation": fed})
    context = build_context(experiment, prepared)
    start = context.method.initial_state(context.model.layout, context.initial, {}).map(to_array)
    clocked = _Clocked(context)
    train_client(context, start, TrainJob(round=1, client=0))
    found = clocked.steps
    inner = slice(1, -1)
    return Steps(
        {part: values[inner] for part, values in found.parts.items()},
        found.forward[inner],
        found.backward[inner],
    )
