"""Computation of a backbone's blocks: attention, and recomputed activations.

This module imports the models of transformers, which takes seconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.import_utils import is_cuda_stream_capturing

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
    """Compute scaled-dot-product attention; on a CPU, bfloat16 inputs with :class:`_Products`.

    On other devices and dtypes this is plain SDPA. With dropout or a trained bias, bfloat16 inputs
    on a CPU use SDPA in float32.

    Args:
        module: The attention module.
        query: [b, attention heads, n, d].
        key: [b, key heads, m, d].
        value: [b, key heads, m, d].
        attention_mask: Bool, or added to the scores; broadcasts to [b, attention heads, n, m].
        position_bias: Added to the scores (T5); broadcasts likewise.
        **options: Options of SDPA in transformers.

    Returns:
        The output [b, n, attention heads, d] in the query's dtype, and None for the weights.
    """
    dtype = query.dtype
    if dtype == torch.bfloat16 and query.device.type == "cpu":
        trained = position_bias is not None and position_bias.requires_grad
        if not (trained or options.get("dropout")):
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            bias = _bias(query, key, attention_mask, position_bias, causal=causal)
            return _by_products(query, key, value, bias, options.get("scaling")), None
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        position_bias = None if position_bias is None else position_bias.float()
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, position_bias=position_bias, **options
    )
    return output.to(dtype), None


def _bias(
    query: Tensor, key: Tensor, mask: Tensor | None, added: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Return the mask plus the bias, float32, broadcast to [b, heads, n, m]; None for 0."""
    n, m = query.shape[2], key.shape[2]
    if mask is None and causal and n > 1:
        mask = torch.ones(n, m, dtype=torch.bool).tril()
    bias = None if added is None else added.float()
    if mask is None:
        return bias
    if mask.dtype != torch.bool:
        return mask.float() if bias is None else bias + mask
    return torch.where(mask, 0.0 if bias is None else bias, torch.finfo(torch.float32).min)


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float | None
) -> Tensor:
    """Compute the attention [b, n, heads, d] of bfloat16 tensors shaped as in :func:`attention`."""
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = _Products.apply(query, key, value, bias, scaling)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous()


class _Products(torch.autograd.Function):
    """Attention of bfloat16 tensors with batched products, as exact as PyTorch's kernel for them.

    Scores and softmax are float32; the attention weights and the values are bfloat16. Up to 200
    tokens, PyTorch's CPU kernel takes three to ten times as long, and its float32 kernel about
    twice as long (torch 2.13, AVX512-BF16).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float
    ) -> Tensor:
        ctx.scaling, ctx.shapes = scaling, (query.shape, key.shape)
        query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
        scores = torch.bmm(query.float().mul_(scaling), key.float().mT)  # [b heads, n, m]
        if bias is not None:
            scores.view(*ctx.shapes[0][:2], *scores.shape[1:]).add_(bias)
        weights = scores.softmax(dim=-1).to(value.dtype)
        ctx.save_for_backward(query, key, value, weights)
        return torch.bmm(weights, value).view(ctx.shapes[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        need_query, need_key, need_value = ctx.needs_input_grad[:3]
        dy = dy.reshape(query.shape)
        dq = dk = dv = None
        if need_value:
            dv = torch.bmm(weights.mT, dy).view(ctx.shapes[1])
        if need_query or need_key:
            ds = torch.bmm(dy, value.mT).mul_(weights)  # [b heads, n, m]
            ds = ds.sub_(weights * ds.sum(dim=-1, keepdim=True))
        if need_query:
            dq = torch.bmm(ds, key).mul_(ctx.scaling).view(ctx.shapes[0])
        if need_key:
            dk = torch.bmm(ds.mT, query).mul_(ctx.scaling).view(ctx.shapes[1])
        return dq, dk, dv, None, None


def unread_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> Tensor | None:
    """Build the mask of SDPA; on a GPU, do so without reading ``attention_mask``.

    Transformers omits a mask that hides nothing. To detect this, the host would wait for the GPU in
    every forward pass. During the capture of a CUDA graph, transformers always builds a mask, which
    the fast kernels do not support; this function omits it as usual.
    """
    if attention_mask is not None and attention_mask.device.type != "cpu":
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if attention_mask is None and is_cuda_stream_capturing():
        causal = options.get("allow_is_causal_skip", True) and q_length in (1, kv_length)
        whole = local_size is None or kv_length < local_size
        if whole and (causal or options.get("allow_is_bidirectional_skip", False)):
            return None
    mask: Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        **options,
    )
    return mask


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, unread_mask)


def set_attention(model: nn.Module) -> None:
    """Make every part of a model that uses SDPA use :func:`attention`."""
    for part in model.modules():
        # T5's encoder and decoder have separate configurations, which transformers 5.17 does not
        # change.
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation == "sdpa":
            part.set_attn_implementation(ATTENTION)


def recomputed(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``forward``, and call it again in the backward pass instead of storing activations.

    The second call draws the same dropout. A CUDA graph does not support dropout, because the
    random state cannot be read.
    """
    drawn_alike = not is_cuda_stream_capturing()
    options |= {"use_reentrant": False, "preserve_rng_state": drawn_alike}
    return checkpoint(forward, *args, **options)


def recompute_activations(model: nn.Module) -> None:
    """Store only the input of each block in a differentiated forward, and recompute the rest.

    The option of transformers applies only in training mode, which also enables dropout; a backbone
    without dropout stays in eval mode. The input of a block need not require a gradient (frozen
    embeddings).

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
        block.forward = _CheckpointedForward(block)


class _CheckpointedForward(BlockForward):
    """Forward of a block, checkpointed while gradients are enabled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = type(self.block).forward
        if not torch.is_grad_enabled():
            return forward(self.block, *args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            # A repeated forward pass would append to the cache twice.
            kwargs["past_key_values"] = None
        return recomputed(forward, self.block, *args, **kwargs)
