"""Cross-entropy of labeled positions in chunks, without the logits of a whole batch.

The head of the model is frozen, so it needs no gradient, and the gradient of the hidden states can
be computed in the forward pass, without storing the logits of a chunk.

Legend: M labeled positions, d width, V vocabulary size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Number of positions whose logits are computed at once.
CHUNK = 512


@dataclass(frozen=True)
class LabelScores:
    """Scores of a model on the labels of a batch.

    Attributes:
        losses: Loss of each label, float32 or wider [M].
        right: Whether each label is the most likely token, bool [M].
    """

    losses: Tensor
    right: Tensor


class _WeightedLosses(torch.autograd.Function):
    """Losses [M], each times its weight; see :func:`weighted_losses`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: nn.Linear, labels: Tensor, weights: Tensor, chunk: int
    ) -> Tensor:
        losses, gradients = [], []
        for h, y, w in zip(
            hidden.split(chunk), labels.split(chunk), weights.split(chunk), strict=True
        ):
            logits = widened(head(h))
            w = w.to(logits.dtype)
            total, at = logits.logsumexp(dim=-1), y[:, None]
            losses.append((total - logits.gather(1, at)[:, 0]) * w)
            slope = (logits - total[:, None]).exp_()
            slope.scatter_(1, at, slope.gather(1, at) - 1.0)
            gradients.append((slope * w[:, None]).to(head.weight.dtype) @ head.weight)
        ctx.save_for_backward(torch.cat(gradients).to(hidden.dtype))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * incoming[0][:, None].to(gradient.dtype), None, None, None, None


def weighted_losses(
    hidden: Tensor, head: nn.Linear, labels: Tensor, weights: Tensor, chunk: int = CHUNK
) -> Tensor:
    """Compute the loss of each label times its weight, float32 or wider [M].

    It is differentiable only in ``hidden``, and equal to the cross-entropy of the logits for any
    chunk.

    Args:
        hidden: Hidden states before the labels, [M, d].
        head: The frozen head [V, d].
        labels: int64 [M].
        weights: Constants, float [M].
        chunk: Number of positions whose logits are computed at once.
    """
    found: Tensor = _WeightedLosses.apply(hidden, head, labels, weights, chunk)  # type: ignore[no-untyped-call]
    return found


def label_scores(
    hidden: Tensor, head: nn.Linear, labels: Tensor, chunk: int = CHUNK
) -> LabelScores:
    """Compute losses and hits of labels [M], given the hidden states before them [M, d]."""
    parts = [
        scores_of(widened(head(h)), y)
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True)
    ]
    losses = torch.cat([part.losses for part in parts])
    return LabelScores(losses, torch.cat([part.right for part in parts]))


def scores_of(logits: Tensor, labels: Tensor) -> LabelScores:
    """Compute losses and hits of labels [M], given their logits [M, V] in float32 or wider."""
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return LabelScores(losses, (logits.argmax(dim=-1) == labels) & losses.isfinite())


def widened(logits: Tensor) -> Tensor:
    """Convert logits to float32; float64 is unchanged."""
    return logits if logits.dtype == torch.float64 else logits.float()
