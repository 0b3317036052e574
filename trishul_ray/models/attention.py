"""How the blocks of a backbone compute: attention, and activations that are not kept.

This module imports the models of transformers, which takes seconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from trishul_ray.adapters.model import BlockForward
from trishul_ray.errors import InputError

#: Name under which :func:`attention` and :func:`unread_mask` are registered with transformers.
ATTENTION = "trishul-sdpa"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute scaled-dot-product attention; on a CPU, compute bfloat16 inputs in float32.

    PyTorch's fused CPU kernel runs bfloat16 backward passes three to ten times slower than float32
    ones at up to 128 tokens (measured with torch 2.13 on AVX512-BF16), which doubled the step time
    of a small BERT. On other devices and dtypes this is plain SDPA.

    ``query`` is [b, attention heads, n, d], ``key`` and ``value`` [b, key heads, m, d]. The mask
    (bool, or added to the scores) and ``position_bias`` (added; T5) broadcast to [b, attention
    heads, n, m]. Returns the output [b, n, attention heads, d] in the query's dtype, and None for
    the weights.
    """
    dtype = query.dtype
    if dtype == torch.bfloat16 and query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        position_bias = None if position_bias is None else position_bias.float()
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, position_bias=position_bias, **options
    )
    return output.to(dtype), None


def unread_mask(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Build the mask of SDPA; on a GPU, do so without reading ``attention_mask``.

    Transformers leaves out a mask that hides nothing. To find out, the host would wait for the GPU
    in every forward pass.
    """
    if attention_mask is not None and attention_mask.device.type != "cpu":
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, **options)
    return mask


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, unread_mask)


def set_attention(model: nn.Module) -> None:
    """Let every part of a model that uses SDPA use :func:`attention`."""
    for part in model.modules():
        # T5's encoder and decoder have configurations of their own, which transformers 5.17 leaves
        # as they are.
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation == "sdpa":
            part.set_attn_implementation(ATTENTION)


def recompute_activations(model: nn.Module, *, dropout: bool) -> None:
    """Keep only the input of each block in a differentiated forward pass, and recompute the rest.

    The switch of transformers works in training mode only, which also turns dropout on; a backbone
    without dropout stays in eval mode. The input of a block need not require a gradient (frozen
    embeddings). With ``dropout``, a repeated forward pass restores the random state.

    Raises:
        InputError: The model's blocks do not support it.
    """
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not blocks:
        raise InputError(
            f"model.gradient_checkpointing: {type(model).__name__} has no blocks whose "
            "activations can be recomputed; set it to false"
        )
    for block in blocks:
        # An attribute of the instance takes precedence over the method of its class.
        block.forward = _CheckpointedForward(block, dropout)


class _CheckpointedForward(BlockForward):
    """Forward of a block, checkpointed while gradients are enabled."""

    def __init__(self, block: nn.Module, dropout: bool) -> None:
        super().__init__(block)
        self.dropout = dropout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = type(self.block).forward
        if not torch.is_grad_enabled():
            return forward(self.block, *args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            # A repeated forward pass would append to the cache twice.
            kwargs["past_key_values"] = None
        kwargs |= {"use_reentrant": False, "preserve_rng_state": self.dropout}
        return checkpoint(forward, self.block, *args, **kwargs)
