"""Round 0: a client's response to the survey of a method, at the pretrained model."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from trishul_ray.data.sampling import batch_order
from trishul_ray.federation.messages import TrainJob, TrainReport, Upload, to_array
from trishul_ray.federation.worker.context import WorkerContext, client_stream
from trishul_ray.methods.base.messages import State, Tensors
from trishul_ray.runtime.random_streams import numpy_rng


def answer_survey(context: WorkerContext, job: TrainJob) -> tuple[Upload, TrainReport]:
    """Compute a client's response to the survey of the method, and its report."""
    plan, settings = context.method.survey_plan, context.settings
    assert plan is not None  # A method without a survey has no round 0.
    rng = numpy_rng(settings.seed, "survey-batches", job.client)
    size = plan.batch_size or settings.federation.batch_size
    shard = context.shards.shard(job.client)
    batches = batch_order(shard, plan.batches, size, rng)
    layers = {
        spec.name: context.model.model.get_submodule(spec.name) for spec in context.model.specs
    }

    def gradients() -> Iterator[Tensors]:
        for rows in batches:
            with weight_gradients(layers) as found:
                context.task.losses(context.model, context.train_batch(rows), 1)[0].backward()
            yield {name: found[name].float() for name in layers}

    began = time.perf_counter()
    with client_stream(context, "survey-dropout", job.client):
        answer = State(torch.empty(0), extra=context.method.survey(gradients())).map(to_array)
    answer = replace(answer, extra=context.stages.answer(answer.extra, job.instructions))
    seconds, numbers = time.perf_counter() - began, sum(a.size for a in answer.extra.values())
    return (
        Upload(job.client, len(shard), answer),
        TrainReport(job.client, {}, math.nan, seconds, uploaded=numbers),
    )


@contextmanager
def weight_gradients(layers: Mapping[str, nn.Module]) -> Iterator[Tensors]:
    """Collect the gradients of linear layers' weights from backward passes in the context.

    Each gradient is the sum of ``dY^T X`` over the layer's calls, [d_out, d_in] in the dtype of X,
    even if autograd cannot differentiate with respect to the stored weight.
    """
    found: Tensors = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = inputs[0].detach()
            x = x.reshape(-1, x.shape[-1])
            if not output.requires_grad:  # Nothing before the layer is trained.
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
