"""The optimizer of local steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.config.fields import OptimizerConfig


def make_optimizer(settings: OptimizerConfig, vectors: list[Tensor]) -> torch.optim.Optimizer:
    """Build a fresh optimizer over flat vectors [P], by the section ``optimizer``."""
    lr, decay, betas = settings.lr, settings.weight_decay, (settings.beta1, settings.beta2)
    if settings.name == "sgd":
        return torch.optim.SGD(vectors, lr=lr, momentum=settings.momentum, weight_decay=decay)
    return torch.optim.AdamW(vectors, lr=lr, betas=betas, weight_decay=decay, fused=True)
