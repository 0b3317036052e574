"""The last block of a transformer, computed only for the token that the model's head reads.

A classifier reads one token of a row: the first of a ViT or a BERT, or the last of a decoder that
computes one position. In the last block, this token attends to all tokens through their keys and
values. Their queries and the later operations, mainly the MLP, do not affect the output, and have
no gradient. Without them, outputs and gradients are the same up to rounding, for about a sixth of
the block's products. A copy that leaves the run computes everything again
(:class:`~trishul_ray.adapters.model.BlockForward`).

Shapes: b rows, n tokens, d width; ``at`` is the slice of the one token that is read.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertForSequenceClassification,
    LlamaForCausalLM,
    ViTForImageClassification,
)
from transformers.models.llama.modeling_llama import rotate_half

from trishul_ray.adapters.model import BlockForward
from trishul_ray.models.attention import ATTENTION, attention, recomputed

FIRST, LAST = slice(0, 1), slice(-1, None)

#: Paths to the blocks of the supported models.
_BLOCKS = {
    ViTForImageClassification: "vit.layers",
    BertForSequenceClassification: "bert.encoder.layer",
    LlamaForCausalLM: "model.layers",
}


def last_block(model: nn.Module) -> str | None:
    """Return the name of the block whose output the head reads at one token, or None."""
    untyped: Any = model
    blocks = _BLOCKS.get(type(model))
    if blocks is None or getattr(untyped.config, "is_decoder", False):
        return None
    return f"{blocks}.{len(untyped.get_submodule(blocks)) - 1}"


def narrow_last_block(model: nn.Module) -> None:
    """Restrict the last block to the token that the head reads, in place, if supported."""
    untyped: Any = model
    if (name := last_block(model)) is None or untyped.config._attn_implementation != ATTENTION:
        return
    block = model.get_submodule(name)
    if isinstance(model, ViTForImageClassification):
        block.forward = _ReadToken(block, _vit_block, FIRST)
    elif isinstance(model, BertForSequenceClassification):
        block.forward = _ReadToken(block, _bert_block, FIRST)
    else:
        block.forward = _ReadToken(block, _llama_block, LAST, asked=False)
        model.register_forward_pre_hook(_ask, with_kwargs=True)
        model.register_forward_hook(_answered, always_call=True)


class _ReadToken(BlockForward):
    """Forward of the last block for one token, or for all tokens in training mode (dropout)."""

    def __init__(
        self, block: nn.Module, compute: Callable[..., Tensor], at: slice, asked: bool = True
    ) -> None:
        super().__init__(block)
        self.compute, self.at, self.asked = compute, at, asked
        self.recomputing: BlockForward | None = vars(block).get("forward")

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.block.training or not self.asked or kwargs.get("past_key_values") is not None:
            forward: Any = self.recomputing or partial(type(self.block).forward, self.block)
            return forward(hidden_states, *args, **kwargs)
        mask = args[0] if args else kwargs.get("attention_mask")
        if mask is not None:
            mask = mask[..., self.at, :]
        again = self.recomputing is not None and torch.is_grad_enabled()
        compute = partial(recomputed, self.compute) if again else self.compute
        return compute(self.block, hidden_states, mask, self.at, **kwargs)


def _ask(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record whether a decoder's forward pass needs only one position."""
    _set_asked(model, kwargs.get("logits_to_keep") == 1)


def _answered(model: Any, *_: Any) -> None:
    """Reset the record: the decoder may be called without its head next."""
    _set_asked(model, False)


def _set_asked(model: Any, asked: bool) -> None:
    forward = model.model.layers[-1].__dict__.get("forward")
    if isinstance(forward, _ReadToken):
        forward.asked = asked


def _vit_block(block: Any, x: Tensor, mask: Tensor | None, at: slice, **_: Any) -> Tensor:
    own, seen = block.attention, block.layernorm_before(x)
    projections = own.q_proj, own.k_proj, own.v_proj
    read = own.o_proj(_attend(own, projections, own.head_dim, seen, mask, at)) + x[:, at]
    y: Tensor = block.mlp(block.layernorm_after(read)) + read
    return y


def _bert_block(block: Any, x: Tensor, mask: Tensor | None, at: slice, **_: Any) -> Tensor:
    own = block.attention.self
    projections = own.query, own.key, own.value
    read = _attend(own, projections, own.attention_head_size, x, mask, at)
    y: Tensor = block.feed_forward_chunk(block.attention.output(read, x[:, at]))
    return y


def _llama_block(
    block: Any,
    x: Tensor,
    mask: Tensor | None,
    at: slice,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    own, seen = block.self_attn, block.input_layernorm(x)
    projections = own.q_proj, own.k_proj, own.v_proj
    read = _attend(own, projections, own.head_dim, seen, mask, at, position_embeddings)
    read = x[:, at] + own.o_proj(read)
    y: Tensor = read + block.mlp(block.post_attention_layernorm(read))
    return y


def _attend(
    module: nn.Module,
    projections: tuple[nn.Module, nn.Module, nn.Module],
    width: int,
    seen: Tensor,
    mask: Tensor | None,
    at: slice,
    positions: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the attention [b, 1, ...] of the read token to the tokens ``seen`` [b, n, d].

    ``width`` is the width of an attention head. ``positions`` are rotary, [b, n, width] each.
    """
    inputs = (seen[:, at], seen, seen)
    query, key, value = (
        projection(each).unflatten(-1, (-1, width)).transpose(1, 2)
        for projection, each in zip(projections, inputs, strict=True)
    )
    if positions is not None:
        cos, sin = (each[:, None] for each in positions)  # [b, 1, n, width]
        key = key * cos + rotate_half(key) * sin
        query = query * cos[..., at, :] + rotate_half(query) * sin[..., at, :]
    scaling: Any = module.scaling
    read, _ = attention(module, query, key, value, mask, scaling=scaling)
    return torch.flatten(read, 2)
