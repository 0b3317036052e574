"""Configure how a loaded backbone computes: precision, attention, activation checkpointing.

All functions change modules of transformers in place. Apart from :func:`cast`, none changes a
weight.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from trishul_ray.config import ModelConfig


def run_dtype(config: "ModelConfig") -> torch.dtype:
    """Return the dtype that ``model.precision`` stands for."""
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and persistent buffers to ``dtype``.

    Buffers that are computed, such as the frequencies of rotary positions, keep their dtype: a
    position in the hundreds times a frequency in bfloat16 would be off by whole steps.
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


def configure_compute(model: nn.Module, config: "ModelConfig") -> None:
    """Set attention and activation checkpointing as configured, and turn the key-value cache off.

    Raises:
        InputError: ``model.gradient_checkpointing`` is set, but the model does not support it.
    """
    # Only a process that loads a backbone imports the models of transformers, which takes seconds.
    from trishul_ray.models.attention import recompute_activations, set_attention

    untyped: Any = model
    if getattr(untyped.config, "use_cache", False):
        # Training needs no cached keys and values; generation has a setting of its own.
        untyped.config.use_cache = False
    set_attention(model)
    if config.gradient_checkpointing:
        recompute_activations(model, dropout=config.dropout)
