"""What a checkpoint does not give is drawn from the experiment's seed, name by name."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
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
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.lookup import (
    load_model_config,
    not_found,
    quiet_transformers,
    resolve_model,
)
from trishul_ray.models.tokenizers import load_tokenizer
from trishul_ray.rng import torch_rng

if TYPE_CHECKING:
    from trishul_ray.config import ModelConfig
    from trishul_ray.tasks.base import Architecture


#: Standard deviation of drawn weights where the architecture names none.
INIT_STD = 0.02


def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw every weight anew, in place, each from its own stream ``(seed, "init", name)``.

    Linear, convolution and embedding weights are N(0, s^2) with the architecture's
    ``initializer_range`` s (0.02 if it has none), biases 0, normalization 1 and 0; further
    tensors of two or more dimensions (class tokens, position embeddings) N(0, s^2) as well, and
    further vectors keep the constants the architecture gives them. T5, whose attention does not
    divide by the head's width, has standard deviations of its own. A tensor shared by several
    modules is drawn once, under its first name.
    """
    settings: Any = model.config
    usual = float(getattr(settings, "initializer_range", None) or INIT_STD)
    is_t5 = settings.model_type in ("t5", "mt5")
    drawn: set[nn.Parameter] = set()
    with torch.no_grad():
        for prefix, module in model.named_modules():
            norm = "Norm" in type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in drawn:
                    continue
                drawn.add(parameter)
                if name == "bias":
                    parameter.zero_()
                elif norm:
                    parameter.fill_(1.0)
                elif parameter.ndim >= 2:
                    generator = torch_rng(seed, "init", f"{prefix}.{name}")
                    std = _t5_std(settings, module, prefix) if is_t5 else usual
                    parameter.normal_(0.0, std, generator=generator)


def _t5_std(settings: Any, module: nn.Module, path: str) -> float:
    """Standard deviation of a T5 weight: 1 for tokens, 1/sqrt(fan in) else, queries smaller.

    Raffel et al. 2020's initialization, with the factor that the configuration names.
    """
    factor = float(settings.initializer_factor)
    last = path.rpartition(".")[2]
    if last == "relative_attention_bias":
        return factor / math.sqrt(settings.d_model)
    if not isinstance(module, nn.Linear) or last == "lm_head":
        return factor
    std = factor / math.sqrt(module.in_features)
    return std / math.sqrt(settings.d_kv) if last == "q" else std


def head_to_draw(model: nn.Module, lacking: Collection[str]) -> list[str]:
    """Which parameters are drawn when a checkpoint lacks some: the head, whole.

    Args:
        model: of transformers.
        lacking: names that the checkpoint lacks.

    Returns:
        Nothing where it lacks nothing; else everything outside the base model and, within it, the
        pooler where that is lacking, in the model's order.
    """
    settings: Any = model
    base = f"{settings.base_model_prefix}."
    if not lacking:
        return []
    return [
        name for name, _ in model.named_parameters() if not name.startswith(base) or name in lacking
    ]


def draw_head(model: nn.Module, names: Sequence[str], seed: int) -> None:
    """Draw the parameters ``names``, in place: weights N(0, 0.02^2), vectors zero."""
    generator = torch_rng(seed, "head")
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            if parameter.ndim >= 2:
                parameter.normal_(0.0, INIT_STD, generator=generator)
            else:
                parameter.zero_()


def resize_positions(model: nn.Module, size: int) -> None:
    """Interpolate a ViT's position embeddings [1, 1 + n, d] once, for images of side ``size``.

    Bicubic on the patch grid, as Dosovitskiy et al. 2021 do for another resolution.
    """
    settings: Any = model.config
    if getattr(settings, "image_size", None) in (size, None):
        return
    embeddings: Any = getattr(model.base_model, "embeddings", None)
    patches = getattr(embeddings, "patch_embeddings", None)
    positions: Tensor | None = getattr(embeddings, "position_embeddings", None)
    if patches is None or positions is None:
        raise InputError(
            f"model.image_size={size}: this {settings.model_type} model takes only images of "
            f"{settings.image_size}"
        )
    patch = settings.patch_size
    if size % patch:
        raise InputError(f"model.image_size={size} is no multiple of the model's patch, {patch}")
    grid, old = size // patch, settings.image_size // patch
    extra = positions.shape[1] - old * old  # class token, and distillation token of DeiT
    with torch.no_grad():
        table = positions[:, extra:].reshape(1, old, old, -1).permute(0, 3, 1, 2)  # [1, d, g, g]
        table = F.interpolate(table, size=(grid, grid), mode="bicubic", align_corners=False)
        table = table.permute(0, 2, 3, 1).reshape(1, grid * grid, -1)
        embeddings.position_embeddings = nn.Parameter(torch.cat([positions[:, :extra], table], 1))
    patches.image_size = embeddings.image_size = (size, size)
    patches.num_patches = grid * grid
    settings.image_size = size


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

    Needs no network for the models of :data:`~trishul_ray.models.lookup.KNOWN`.

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
