"""How a loaded backbone computes: precision, attention, recomputed activations.

None of it changes a weight. Everything here acts on modules of transformers, in place.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from trishul_ray.config import ModelConfig

#: Scaled-dot-product attention as :func:`wide_attention` calls it.
WIDE = "sdpa-wide"


def run_dtype(config: "ModelConfig") -> torch.dtype:
    """What ``model.precision`` means."""
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, and buffers that are part of the state, to ``dtype``.

    Buffers that are computed (frequencies of rotary positions) stay as they are: positions in the
    hundreds times a frequency in bfloat16 would be off by whole steps.
    """
    kept = set(model.state_dict())
    for prefix, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if buffer.is_floating_point() and full in kept:
                module._buffers[name] = buffer.to(dtype)


def set_up(model: nn.Module, config: "ModelConfig") -> None:
    """Switch what ``config`` asks for: attention for the precision, checkpointing, no cache.

    Raises:
        InputError: the model has no blocks whose activations could be recomputed.
    """
    settings: Any = model
    if getattr(settings.config, "use_cache", False):
        # Keys and values kept for later tokens are of no use in training; generation has a switch
        # of its own (generation_config).
        settings.config.use_cache = False
    if config.precision == "bf16" and settings.config._attn_implementation == "sdpa":
        settings.set_attn_implementation(WIDE)
    if config.gradient_checkpointing:
        recompute_activations(model, dropout=config.dropout)


def wide_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """SDPA, with bfloat16 heads computed in float32 on a CPU.

    PyTorch's fused kernel for CPUs does bfloat16 backward passes three to ten times slower than
    float32 ones at up to 128 tokens (measured, torch 2.13, AVX512-BF16), which made the whole step
    of a small BERT twice as long. Elsewhere this is plain SDPA.

    Args:
        module: the attention module.
        query: [b, heads, n, d].
        key: [b, key heads, m, d].
        value: [b, key heads, m, d].
        attention_mask: broadcasts to [b, heads, n, m]; bool, or added to the scores.
        position_bias: broadcasts likewise, added to the scores (T5).
        options: as transformers gives them.
    """
    dtype = query.dtype
    if dtype != torch.bfloat16 or query.device.type != "cpu":
        found = sdpa_attention_forward(
            module, query, key, value, attention_mask, position_bias=position_bias, **options
        )
        return found[0], None
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    output, _ = sdpa_attention_forward(
        module,
        query.float(),
        key.float(),
        value.float(),
        attention_mask,
        position_bias=None if position_bias is None else position_bias.float(),
        **options,
    )
    return output.to(dtype), None


AttentionInterface.register(WIDE, wide_attention)
AttentionMaskInterface.register(WIDE, sdpa_mask)


def recompute_activations(model: nn.Module, *, dropout: bool) -> None:
    """Keep only each block's input in a forward that is differentiated; recompute the rest.

    transformers' own switch works in training mode alone, which is dropout's switch, too; a
    backbone without dropout stays in evaluation mode. The input need not ask for a gradient
    (frozen embeddings).

    Args:
        model: of transformers.
        dropout: whether dropout may be on, so that a repeated forward must draw the same.

    Raises:
        InputError: the model's blocks are not made for it.
    """
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not blocks:
        raise InputError(
            f"model.gradient_checkpointing: {type(model).__name__} has no blocks whose "
            "activations can be recomputed; set it to false"
        )
    for block in blocks:
        # An instance's attribute goes before the class's method.
        block.forward = _Recomputed(block, dropout)


class _Recomputed:
    """A block's forward, checkpointed where gradients are wanted; copies with its block."""

    def __init__(self, block: nn.Module, dropout: bool) -> None:
        self.block, self.dropout = block, dropout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain: Callable[..., Any] = type(self.block).forward
        if not torch.is_grad_enabled():
            return plain(self.block, *args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            # A repeated forward would append to the cache a second time.
            kwargs["past_key_values"] = None
        return checkpoint(
            plain,
            self.block,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.dropout,
            **kwargs,
        )
