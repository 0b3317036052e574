"""Configure the computation of a loaded backbone: precision, attention, checkpointing.

All functions modify models in place. Only :func:`cast` and :func:`quantize_layers` change weights.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trishul_ray.adapters.quantized import QuantizedLinear, check_library
from trishul_ray.adapters.targets import classifier_module
from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from trishul_ray.config.fields import ModelConfig, Quantization


def run_dtype(config: "ModelConfig") -> torch.dtype:
    """Return the dtype of ``model.precision``."""
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and persistent buffers to ``dtype``.

    Computed buffers, such as the frequencies of rotary positions, keep their dtype: a position in
    the hundreds times a frequency in bfloat16 would be off by whole steps.
    """
    persistent = set(model.state_dict())
    for prefix, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            if buffer.is_floating_point() and full_name in persistent:
                module._buffers[name] = buffer.to(dtype)


def quantize_layers(model: nn.Module, kind: "Quantization", dtype: torch.dtype) -> None:
    """Quantize the linear layers of a model's blocks, in place; ``none`` changes nothing.

    Embeddings, normalization and all heads are unchanged.

    Raises:
        InputError: No layer is in a block (has a number in its path), or bitsandbytes is not
            installed.
    """
    if kind == "none":
        return
    check_library(kind)
    layers = [
        (name, module)
        for name, module in model.named_modules()
        # Exclude subclasses: attention in torch reads the weight of a special linear layer.
        if type(module) is nn.Linear
        and any(part.isdigit() for part in name.split("."))
        and classifier_module(name) is None
    ]
    if not layers:
        raise InputError(
            f"model.quantize={kind!r}: {type(model).__name__} has no linear layer in a block (with "
            "a number in its path, as in layers.0.query); use none"
        )
    for name, linear in layers:
        model.set_submodule(name, QuantizedLinear(linear, kind, dtype).train(linear.training))


def configure_compute(model: nn.Module, config: "ModelConfig") -> None:
    """Configure attention and activation checkpointing, and disable the key-value cache.

    Raises:
        InputError: ``model.gradient_checkpointing`` is set, but the model does not support it.
    """
    # Only a process that loads a backbone imports the models of transformers, which takes seconds.
    from trishul_ray.models.attention import recompute_activations, set_attention
    from trishul_ray.models.last_block import narrow_last_block

    untyped: Any = model
    if getattr(untyped.config, "use_cache", False):
        # Training needs no cached keys and values; generation has a separate setting.
        untyped.config.use_cache = False
    set_attention(model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    narrow_last_block(model)
