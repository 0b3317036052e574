"""Backbones with their weights, or on the meta device; nothing depends on a global seed.

Weights are read from safetensors only, on the CPU, in float32, with transformers' default
attention: scaled-dot-product wherever the architecture supports it. What a checkpoint does not
give (a head for another number of classes) is drawn from ``torch_rng(seed, ...)``; whatever
transformers draws while building happens on a forked global stream and is overwritten.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from trishul_ray.adapters.targets import head_parameters
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models.drawing import draw_head, draw_weights, head_to_draw
from trishul_ray.models.positions import resize_positions
from trishul_ray.models.registry import (
    load_model_config,
    not_found,
    quiet_transformers,
    resolve_model,
)
from trishul_ray.models.tiny import BUILTINS
from trishul_ray.models.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from trishul_ray.sections import ModelConfig
    from trishul_ray.tasks.base import Architecture

#: transformers' class for each architecture a task may ask for. (They are untyped.)
_AUTO: "dict[Architecture, Any]" = {
    "image-classification": AutoModelForImageClassification,
    "sequence-classification": AutoModelForSequenceClassification,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
    "causal-lm": AutoModelForCausalLM,
}
#: What a model of the wrong family cannot do, for messages.
_DOES = {
    "image-classification": "classify images",
    "sequence-classification": "classify texts",
    "seq2seq-lm": "answer text with text",
    "causal-lm": "continue a text",
}


def load_backbone(
    config: "ModelConfig",
    architecture: "Architecture",
    num_classes: int | None,
    *,
    seed: int,
    hub: Path | None,
    cache: Path,
) -> nn.Module:
    """A model of the kind a task needs, float32, on the CPU, in eval mode, in memory of its own.

    Args:
        config: name, pretrained or random weights, image size.
        architecture: which of transformers' model classes.
        num_classes: outputs of the head. Where the checkpoint has a head of this size it is
            kept; otherwise a head is drawn: weights N(0, 0.02^2), zero bias; with BERT's pooler
            where the checkpoint lacks that.
        seed: of whatever is drawn.
        hub: a local mirror.
        cache: folder of built-in backbones.

    Raises:
        InputError: no such model, or one of another kind.
        CorruptFileError: the checkpoint lacks tensors, or holds NaN or infinity; names the tensor.
    """
    shape = backbone_config(config, architecture, num_classes, hub=hub, cache=cache)
    if config.init == "random":
        model = build_module(config, shape, architecture)
        draw_weights(model, seed)
    else:
        model, drawn = load_checkpoint(config, shape, architecture, hub=hub, cache=cache)
        draw_head(model, drawn, seed)
    return model.eval()


def meta_backbone(
    config: "ModelConfig",
    architecture: "Architecture | None" = None,
    num_classes: int | None = None,
    *,
    hub: Path | None,
    cache: Path,
) -> nn.Module:
    """The model's modules on the meta device: shapes and counts, no weights.

    Needs no network for the models of :data:`~trishul_ray.models.architectures.KNOWN`.

    Args:
        config: names the model.
        architecture: which of transformers' model classes; default :func:`usual_architecture`.
        num_classes: outputs of a classification head.
        hub: a local mirror.
        cache: folder of built-in backbones.

    Raises:
        InputError: no such model, or one of another kind.
    """
    shape = load_model_config(config, hub=hub, cache=cache)
    if num_classes is not None:
        shape.num_labels = num_classes
    with torch.device("meta"):
        return build_module(config, shape, architecture or usual_architecture(shape)).eval()


def usual_architecture(shape: PretrainedConfig) -> "Architecture":
    """What a family is made for: images, text to text, continuing a text, or classifying it."""
    if type(shape) in AutoModelForImageClassification._model_mapping:
        return "image-classification"
    if shape.is_encoder_decoder:
        return "seq2seq-lm"
    if type(shape) in AutoModelForMaskedLM._model_mapping:
        return "sequence-classification"
    return "causal-lm"


def backbone_config(
    config: "ModelConfig",
    architecture: "Architecture",
    num_classes: int | None,
    *,
    hub: Path | None,
    cache: Path,
) -> PretrainedConfig:
    """The configuration that a run's model is built from: the checkpoint's own, fitted to the task.

    A decoder that classifies finds the end of a row by its padding token: where the checkpoint
    names none, it is the tokenizer's, which is what fills the rows.

    Args:
        config: names the model.
        architecture: which of transformers' model classes.
        num_classes: outputs of a classification head.
        hub: a local mirror.
        cache: folder of built-in backbones.

    Raises:
        InputError: no such model, or one of another kind.
    """
    if config.init == "random":
        shape = load_model_config(config, hub=hub, cache=cache)
    else:
        where = _checkpoint(config, hub, cache)
        with quiet_transformers():
            try:
                shape = AutoConfig.from_pretrained(where, trust_remote_code=False)
            except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
                raise not_found(config, where, hub, error) from error
    _check_family(config, shape, architecture)
    if num_classes is not None:
        shape.num_labels = num_classes
    if architecture == "sequence-classification" and shape.pad_token_id is None:
        shape.pad_token_id = load_tokenizer(config, hub=hub, cache=cache).pad_token_id
    return shape


def build_module(
    config: "ModelConfig", shape: PretrainedConfig, architecture: "Architecture"
) -> nn.Module:
    """The model's modules on the current default device, float32; weights mean nothing yet."""
    _check_family(config, shape, architecture)
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            model: nn.Module = _AUTO[architecture].from_config(shape, dtype=torch.float32)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"model.name={config.name!r} cannot be built: {reason}") from error
    if config.image_size is not None:
        resize_positions(model, config.image_size)
    return model


def load_checkpoint(
    config: "ModelConfig",
    shape: PretrainedConfig,
    architecture: "Architecture",
    *,
    hub: Path | None,
    cache: Path,
) -> tuple[nn.Module, list[str]]:
    """The model with the checkpoint's weights, float32, and the parameters yet to be drawn.

    Args:
        config: names the model.
        shape: of :func:`backbone_config`.
        architecture: which of transformers' model classes.
        hub: a local mirror.
        cache: folder of built-in backbones.

    Raises:
        InputError: no such model.
        CorruptFileError: see :func:`load_backbone`.
    """
    where = _checkpoint(config, hub, cache)
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        try:
            model, info = _AUTO[architecture].from_pretrained(
                where,
                config=shape,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            RuntimeError,
            SafetensorError,
        ) as error:
            raise not_found(config, where, hub, error) from error
    lacking = set(info["missing_keys"]) | {entry[0] for entry in info["mismatched_keys"]}
    # A classification head may be new; a language model's head is part of what was pretrained.
    may_lack = set(head_parameters(model)) if architecture.endswith("classification") else set()
    lost = sorted(lacking - may_lack)
    if lost:
        raise CorruptFileError(
            f"model.name={config.name!r}: checkpoint {where} lacks {len(lost)} tensors of its "
            f"architecture, or has them in another shape; the first is {lost[0]}"
        )
    for name, tensor in model.state_dict().items():
        if name in lacking or not tensor.is_floating_point():
            continue
        if not torch.isfinite(tensor).all():
            raise CorruptFileError(
                f"model.name={config.name!r}: tensor {name} of checkpoint {where} holds NaN or "
                "infinity"
            )
    if config.image_size is not None:
        resize_positions(model, config.image_size)
    return model, head_to_draw(model, lacking)


def _checkpoint(config: "ModelConfig", hub: Path | None, cache: Path) -> Path | str:
    where = resolve_model(config, hub=hub, cache=cache)
    if config.name in BUILTINS and isinstance(where, Path) and not where.is_dir():
        raise InputError(
            f"model.name={config.name!r} is not pretrained yet in {cache} (storage.cache): run "
            f"`trishul pretrain {config.name}`"
        )
    return where


def _check_family(
    config: "ModelConfig", shape: PretrainedConfig, architecture: "Architecture"
) -> None:
    if type(shape) not in _AUTO[architecture]._model_mapping:
        raise InputError(
            f"model.name={config.name!r} is a {shape.model_type} model, which does not "
            f"{_DOES[architecture]}"
        )
