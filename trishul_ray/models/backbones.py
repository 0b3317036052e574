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
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)

from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models.registry import (
    load_model_config,
    not_found,
    quiet_transformers,
    resolve_model,
)
from trishul_ray.models.tiny import BUILTINS
from trishul_ray.rng import torch_rng

if TYPE_CHECKING:
    from trishul_ray.experiment import ModelConfig

#: Standard deviation of drawn weights where the architecture names none.
INIT_STD = 0.02


def load_backbone(
    config: "ModelConfig", num_classes: int, *, seed: int, hub: Path | None, cache: Path
) -> nn.Module:
    """An image classifier with ``num_classes`` outputs, float32, on the CPU, in eval mode.

    Args:
        config: name, pretrained or random weights, image size.
        num_classes: outputs of the head. Where the checkpoint has a head of this size it is
            kept; otherwise a head is drawn: weights N(0, 0.02^2), zero bias.
        seed: of whatever is drawn.
        hub: a local mirror.
        cache: folder of built-in backbones.

    Raises:
        InputError: no such model, or one that does not classify images.
        CorruptFileError: the checkpoint lacks tensors, or holds NaN or infinity; names the tensor.
    """
    if config.init == "random":
        architecture = load_model_config(config, hub=hub, cache=cache)
        architecture.num_labels = num_classes
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            model = _build(config, architecture)
        draw_weights(model, seed)
    else:
        model = _from_checkpoint(config, num_classes, seed, hub, cache)
    if config.image_size is not None:
        _resize_positions(model, config.image_size)
    return model.eval()


def meta_backbone(
    config: "ModelConfig", num_classes: int | None = None, *, hub: Path | None, cache: Path
) -> nn.Module:
    """The model's modules on the meta device: shapes and counts, no weights.

    Needs no network for the models of :data:`~trishul_ray.models.architectures.KNOWN`.
    An image architecture becomes a classifier of ``num_classes``, T5 a sequence-to-sequence
    model, any other a causal language model.

    Raises:
        InputError: no such model.
    """
    architecture = load_model_config(config, hub=hub, cache=cache)
    if num_classes is not None:
        architecture.num_labels = num_classes
    with quiet_transformers(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        return _build(config, architecture).eval()


def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw every weight anew, in place, each from its own stream ``(seed, "init", name)``.

    Linear, convolution and embedding weights are N(0, s^2) with the architecture's
    ``initializer_range`` s (0.02 if it has none), biases 0, normalization 1 and 0; further
    tensors of two or more dimensions (class tokens, position embeddings) N(0, s^2) as well, and
    further vectors keep the constants the architecture gives them.
    """
    std = float(getattr(model.config, "initializer_range", None) or INIT_STD)
    with torch.no_grad():
        for prefix, module in model.named_modules():
            norm = "Norm" in type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias":
                    parameter.zero_()
                elif norm:
                    parameter.fill_(1.0)
                elif parameter.ndim >= 2:
                    generator = torch_rng(seed, "init", f"{prefix}.{name}")
                    parameter.normal_(0.0, std, generator=generator)


def _build(config: "ModelConfig", architecture: PretrainedConfig) -> nn.Module:
    auto: Any = AutoModelForCausalLM
    if type(architecture) in AutoModelForImageClassification._model_mapping:
        auto = AutoModelForImageClassification
    elif architecture.is_encoder_decoder:
        auto = AutoModelForSeq2SeqLM
    try:
        model: nn.Module = auto.from_config(architecture)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"model.name={config.name!r} cannot be built: {reason}") from error
    return model


def _from_checkpoint(
    config: "ModelConfig", num_classes: int, seed: int, hub: Path | None, cache: Path
) -> nn.Module:
    where = resolve_model(config, hub=hub, cache=cache)
    if config.name in BUILTINS and isinstance(where, Path) and not where.is_dir():
        raise InputError(
            f"model.name={config.name!r} is not pretrained yet in {cache} (storage.cache): run "
            f"`trishul pretrain {config.name}`"
        )
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        try:
            architecture = AutoConfig.from_pretrained(where, trust_remote_code=False)
            if type(architecture) not in AutoModelForImageClassification._model_mapping:
                raise InputError(
                    f"model.name={config.name!r} is a {architecture.model_type} model, which "
                    "does not classify images"
                )
            architecture.num_labels = num_classes
            model, info = AutoModelForImageClassification.from_pretrained(
                where,
                config=architecture,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except InputError:
            raise
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
    base = f"{model.base_model_prefix}."
    lost = sorted(name for name in lacking if name.startswith(base))
    if lost:
        raise CorruptFileError(
            f"model.name={config.name!r}: checkpoint {where} lacks {len(lost)} tensors of its "
            f"architecture, or has them in another shape; the first is {lost[0]}"
        )
    if lacking:
        _draw_head(model, base, seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CorruptFileError(
                f"model.name={config.name!r}: tensor {name} of checkpoint {where} holds NaN or "
                "infinity"
            )
    return model  # type: ignore[no-any-return]  # transformers' Auto classes are untyped


def _draw_head(model: nn.Module, base: str, seed: int) -> None:
    """Draw every parameter outside the base model: weights N(0, 0.02^2), vectors zero."""
    generator = torch_rng(seed, "head")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(base):
                continue
            if parameter.ndim >= 2:
                parameter.normal_(0.0, INIT_STD, generator=generator)
            else:
                parameter.zero_()


def _resize_positions(model: nn.Module, size: int) -> None:
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
