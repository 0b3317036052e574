"""Another image size for a ViT: its position embeddings, interpolated once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trishul_ray.errors import InputError


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
