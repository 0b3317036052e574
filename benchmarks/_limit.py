"""Measure the limit and a local step alternately on the same batches.

The limit is a lower bound for a step with any adapter: the forward pass of the frozen backbone, the
loss, and the backward pass to the output of the embeddings, without weight gradients.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from _results import Times
from torch import Tensor, nn

from trishul_ray.adapters.model import Trained
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.worker.context import WorkerContext, build_context
from trishul_ray.federation.worker.local import LocalSteps


def now(device: torch.device) -> float:
    """Return the time in seconds after synchronizing with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Limit:
    """Forward pass and input gradient of the frozen backbone, with the weights of ``context``."""

    def __init__(self, context: WorkerContext) -> None:
        """Copy the structure of the model, but not its weights."""
        self.device, self.dtype, self.task = context.device, context.dtype, context.task
        self.model = context.model.merge(Trained(context.initial))
        adapted = dict(context.model.model.named_parameters())
        for name, _ in list(self.model.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            # The initial adapter does not change the weights, so they can be shared.
            self.model.get_submodule(owner)._parameters[attribute] = adapted[name]
        self.model.requires_grad_(False).eval()
        model: Any = self.model
        # The embeddings of a ViT include patches and positions. A text model has a table, which may
        # be a separate module in the encoder and the decoder.
        embeddings: list[Any] = [getattr(model.base_model, "embeddings", None)]
        if embeddings[0] is None:
            shape = model.get_input_embeddings().weight.shape
            tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
            embeddings = [table for table in tables if table.weight.shape == shape]
        for module in embeddings:
            module.register_forward_hook(_as_leaf)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of a prepared batch. Its backward pass ends after the embeddings."""
        return self.task.loss(self.model(**self.task.inputs(batch)), batch)

    def seconds(self, batch: Mapping[str, Tensor]) -> float:
        """Measure the loss and its backward pass on a prepared batch, in seconds."""
        began = now(self.device)
        self.loss(batch).backward()
        return now(self.device) - began


def _as_leaf(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_()


def first_steps(context: WorkerContext) -> LocalSteps:
    """Prepare the local steps of client 0 in round 1, to be computed inside ``bound()``."""
    start = context.method.initial_state(context.model.layout, context.initial, {}).map(to_array)
    return LocalSteps(context, start, [TrainJob(round=1, client=0)])


def time_steps(experiment: Experiment, prepared: Prepared, count: int) -> tuple[Times, Times]:
    """Measure local steps and the limit alternately on the same batches, in seconds.

    The first step is a warm-up. The last step of the round is not measured, because it also copies
    the cores for the statistics of its prox.
    """
    fed = experiment.federation.model_copy(update={"local_steps": count + 2})
    context = build_context(experiment.model_copy(update={"federation": fed}), prepared)
    limit, local = Limit(context), first_steps(context)
    steps, limits = [], []
    with local.bound():
        for number in range(1, count + 2):
            began = now(context.device)
            batch = local.batch(number)
            read = now(context.device) - began
            limits.append(limit.seconds(batch))
            began = now(context.device)
            local.compute(number, batch)
            steps.append(read + now(context.device) - began)
    return Times.of(steps[1:]), Times.of(limits[1:])
