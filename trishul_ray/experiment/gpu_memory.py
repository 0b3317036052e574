"""Estimated GPU memory of an actor, from the shapes of its model: an upper bound.

Of a local step, all inputs and outputs of the linear layers are counted. They stand for what the
backward pass needs: some of them, and the inputs of normalizations and activations, as large.
"""

from collections import Counter
from functools import partial
from math import prod
from typing import Any

import torch

from trishul_ray.adapters.model import scales_logits
from trishul_ray.adapters.targets import block_of, classifier_module
from trishul_ray.config.fields import TaskConfig
from trishul_ray.experiment.experiment import Experiment
from trishul_ray.experiment.fit import build_site
from trishul_ray.methods.base import build_method
from trishul_ray.models.compute import run_dtype
from trishul_ray.models.shape import DECODER, KEYS_AND_VALUES, shape_of
from trishul_ray.tasks.label_loss import CHUNK

#: Bytes of a weight in a block by ``model.quantize``, with its share of the scales.
STORED = {"nf4": 0.6, "int8": 1.1}
#: Bytes of a trained number of a client, in float32: the broadcast, the client's model and its
#: gradient, Adam's two moments, casts, and two more that an update computes.
TRAINED = 8 * 4
#: Bytes of an entry that a root-mean-square norm (it has no bias) keeps: it computes in float32.
NORM = 12
#: Bytes of a logit: as the head returns it, in float32, its probability, and two gradients.
LOGIT = 4 * 5
#: So many times what the largest block takes in a step are alive at once in an evaluation.
ALIVE = 1.5


#: Estimates by all that they depend on. Cells of a sweep differ often in their seeds alone.
_ESTIMATES: dict[str, float] = {}


def estimated_bytes(experiment: Experiment) -> float:
    """Return the most bytes that the tensors of one actor take on its GPU.

    Raises:
        InputError: The model is not on this machine, or the adapters do not fit it.
    """
    key = experiment.model_dump_json(exclude={"seed", "resources"})
    if key not in _ESTIMATES:
        _ESTIMATES[key] = _estimate(experiment)
    return _ESTIMATES[key]


def _estimate(experiment: Experiment) -> float:
    fed, model, task = experiment.federation, experiment.model, experiment.task
    shape, item = shape_of(model, experiment.storage.places), run_dtype(model).itemsize
    (n, m), module = shape.lengths(task), shape.module
    linear = {k: x for k, x in module.named_modules() if isinstance(x, torch.nn.Linear)}
    parameters = dict(module.named_parameters())
    method = build_method(experiment.method, experiment.adapter)
    site = build_site(module, experiment)
    adapters = method.adapters(site)
    weights, trained = 0.0, 0
    blocks, first, cached = Counter[str](), Counter[str](), 0  # bytes of one row
    head = linear.pop("lm_head", None)
    for name, layer in linear.items():
        block, size = block_of(name), item * shape.tokens_through(name, n, m)
        blocks[block] += size * (layer.in_features + layer.out_features)
        first[block] = first[block] or size * layer.in_features
        if name.startswith(DECODER) and name.endswith((*KEYS_AND_VALUES, ".k", ".v")):
            cached += size * layer.out_features
    for spec in site.layers:
        if (adapter := adapters.get(spec.name)) is not None:
            # With one token, every entry of a factor is multiplied once.
            entries = adapter.multiplications(spec, 1, training=False, path="factored")
            weights += item * (entries + spec.d_out * spec.d_in)  # and a merged weight
            size = item * shape.tokens_through(spec.name, n, m)
            blocks[spec.block] += int(2 * size * entries / (spec.d_out + spec.d_in))
            trained += sum(map(prod, adapter.shapes(spec).values()))
    for name, parameter in parameters.items():
        owner, block, size = name.removesuffix(".weight"), block_of(name), parameter.numel()
        in_block = owner in linear and block != name
        weights += size * (STORED.get(model.quantize, item) if in_block else item)
        trained += size * (method.train_all or classifier_module(name) is not None)
        if owner != name and parameter.dim() == 1 and f"{owner}.bias" not in parameters:
            blocks[block] += NORM * size * shape.tokens_through(owner, n, m)
    row, largest = sum(blocks.values()), max(blocks.values())
    if model.gradient_checkpointing:
        row = sum(first.values()) + largest
    config: Any = module.config
    if config.is_encoder_decoder:  # a bias for each head and pair of positions, and the mask
        bias = 2 * item * config.num_attention_heads * n * n
        row, cached = row + bias, cached + bias

    every = n if method.train_all or scales_logits(module) else 0
    logits = partial(_logits, task, m, every, head.out_features if head else 0)
    clients, scored = min(fed.stacked, fed.clients_per_round), experiment.evaluation.batch_size
    step = fed.batch_size * row + logits(fed.batch_size) + TRAINED * trained
    evaluation = scored * (ALIVE * largest + cached) + logits(scored)
    return weights + max(clients * step, evaluation)


def _logits(task: TaskConfig, m: int, every: int, size: int, rows: int) -> int:
    """Return the bytes of the logits of rows, each of m targets, that are alive at once.

    ``every`` is the number of tokens of a row if an instruction's logits are all computed, else 0.
    """
    positions = rows * m
    if task.kind == "instruction":
        positions = rows * every if every else min(positions, CHUNK)
    return positions * size * LOGIT
