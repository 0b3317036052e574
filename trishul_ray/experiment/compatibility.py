"""Check that the adapters of an experiment fit its backbone, and choose defaults that fit.

The checks need only the shapes of the layers; they do not load weights.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.model import ParameterOverrides
from trishul_ray.adapters.quantized import check_library, squared_norm
from trishul_ray.adapters.targets import classifier_parameters, find_layers, scored_layers
from trishul_ray.data.user.user_data import USER_DATA
from trishul_ray.errors import InputError
from trishul_ray.experiment.experiment import Experiment
from trishul_ray.methods.base import build_method
from trishul_ray.methods.base.messages import TargetLayers
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.stages import Stages
from trishul_ray.storage.durable import write_file
from trishul_ray.version import __version__


def with_builtin_defaults(experiment: Experiment, *, budget: bool, weights: bool) -> Experiment:
    """Set defaults that suit a built-in backbone on user data.

    Args:
        experiment: An experiment. Without user data or a built-in backbone it is returned
            unchanged.
        budget: Whether to replace a budget that does not fit by the largest power of two that fits.
        weights: Whether to use random weights if the backbone has no pretrained ones.
    """
    builtin = BUILTINS.get(experiment.model.name)
    if builtin is None or experiment.data.name not in USER_DATA:
        return experiment
    if weights and builtin.recipe is None:
        model = experiment.model.model_copy(update={"init": "random"})
        experiment = experiment.model_copy(update={"model": model})
    for rank in (experiment.budget, 16, 8, 4, 2, 1) if budget else ():
        choice = experiment.model_copy(update={"budget": rank})
        with suppress(InputError):
            check_adapters(choice)
            return choice
    return experiment


def random_weights_warning(experiment: Experiment) -> str | None:
    """Return a warning if a built-in backbone has random weights on user data, or None."""
    name, random = experiment.model.name, experiment.model.init == "random"
    if name not in BUILTINS or not random or experiment.data.name not in USER_DATA:
        return None
    return f"warning: the weights of {name} are random (model.init=random)"


def check_fits(experiment: Experiment) -> None:
    """Check that the adapters fit the layers of the backbone, without loading its weights.

    Raises:
        InputError: A rank, or heads x rank, exceeds the width of a layer; a target is unknown; a
            requested GPU does not exist; the library for ``model.quantize`` is missing; or the
            classification head has other layers than the linear ones that clients in one forward
            pass, and gradients per example, support.
    """
    if (kind := experiment.model.quantize) != "none":
        check_library(kind)
    resources = experiment.resources
    if resources.needs_gpu and not _may_have_gpu():
        share = f"gpus_per_actor={resources.gpus_per_actor}"
        setting = "device=cuda" if resources.device == "cuda" else share
        raise InputError(
            f"resources.{setting}: torch finds no GPU on this machine; set it to auto, which uses "
            "a GPU if available, or connect to a cluster with GPUs (RAY_ADDRESS)"
        )
    check_adapters(experiment)


def check_layers(experiment: Experiment) -> str:
    """Check only the adapters, with the layers that an earlier check of this backbone stored.

    This avoids importing the backbone's modules, which takes seconds. The modules are imported if
    no layers are stored or the adapters do not fit the stored ones.

    Returns:
        The reason that the adapters were not checked, if the backbone is not on this machine, or an
        empty string.

    Raises:
        InputError: The adapters do not fit, as in :func:`check_fits`.
    """
    note = _layers_note(experiment)
    with suppress(OSError, ValueError, TypeError, KeyError, InputError):
        stored = json.loads(note.read_bytes())
        layers, scored = (
            tuple(LayerSpec(**spec) for spec in stored[each]) for each in ("layers", "scored")
        )
        norms = dict.fromkeys((spec.name for spec in (*layers, *scored)), 0.0)
        targets = TargetLayers(
            layers, norms, experiment.lora_rank, experiment.adapter, scored=scored
        )
        _check_targets(targets, experiment)
        return ""
    try:
        shapes = _shapes(experiment)
    except InputError as error:
        return str(error)
    targets = target_layers(shapes, experiment)
    _check_targets(targets, experiment)
    found = {"layers": [*map(asdict, targets.layers)], "scored": [*map(asdict, targets.scored)]}
    with suppress(OSError):
        write_file(note, json.dumps(found).encode())
    return ""


def _layers_note(experiment: Experiment) -> Path:
    """Return the cache file with the layers that an experiment adapts or uses to score blocks."""
    scores = build_method(experiment.method).block_scores
    software = __version__, metadata.version("transformers")
    key = [*software, experiment.model.model_dump(mode="json"), experiment.adapter.targets, scores]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return experiment.storage.paths.cache / "layers" / f"{name}.json"


def check_adapters(experiment: Experiment) -> None:
    shapes = _shapes(experiment)
    _check_targets(target_layers(shapes, experiment), experiment)
    stages = Stages.of(experiment)
    stacked = experiment.federation.stacked > 1 or stages.of_gradients is not None
    if stacked and experiment.model.train_head:
        ParameterOverrides(shapes, classifier_parameters(shapes)).linear_layers()


def _shapes(experiment: Experiment) -> nn.Module:
    from trishul_ray.models.choose_backbone import (
        backbone_of,  # imports transformers, which takes seconds
    )

    return backbone_of(experiment.model, experiment.storage.paths).shapes


def _check_targets(targets: TargetLayers, experiment: Experiment) -> None:
    adapters = build_method(experiment.method, experiment.adapter).adapters(targets)
    for layer in targets.layers:
        rank = getattr(adapters.get(layer.name), "rank", 0)
        width = min(layer.d_out, layer.d_in)
        if rank > width:
            options = experiment.adapter
            setting = f"adapter.rank={options.rank}"
            if options.rank is None:
                setting = f"budget={experiment.budget}"
            raise InputError(
                f"{setting} gives {experiment.method.name} a rank of {rank} on {layer.name} "
                f"({layer.d_out}x{layer.d_in}); the rank must be at most {width}"
            )


def _may_have_gpu() -> bool:
    """Return whether this machine has a GPU or belongs to a cluster, which may have one."""
    ray = sys.modules.get("ray")
    on_cluster = os.environ.get("RAY_ADDRESS") not in (None, "", "local")
    return torch.cuda.is_available() or on_cluster or (ray is not None and ray.is_initialized())


def target_layers(
    model: torch.nn.Module, experiment: Experiment, known: dict[str, float] | None = None
) -> TargetLayers:
    """Find the layers of a backbone to adapt, with the squared norms of their weights.

    ``known`` maps layers to squared norms, and receives those computed here. Norms of layers on the
    meta device are zero.
    """
    known = {} if known is None else known
    layers = tuple(find_layers(model, experiment.adapter.targets))
    scores = build_method(experiment.method).block_scores
    scored = tuple(scored_layers(model, layers, scores))
    norms = {}
    for layer in dict.fromkeys((*layers, *scored)):
        if layer.name not in known:
            linear = model.get_submodule(layer.name)
            assert isinstance(linear, torch.nn.Linear)
            square = squared_norm(linear)
            known[layer.name] = 0.0 if square.is_meta else float(square)
        norms[layer.name] = known[layer.name]
    return TargetLayers(layers, norms, experiment.lora_rank, experiment.adapter, scored=scored)
