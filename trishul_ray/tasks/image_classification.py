"""Image classification: normalized images, cross-entropy, accuracy.

Legend: b images, C channels, H x W stored pixels, S side of the model's images, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.tasks.base import (
    Classification,
    constant,
    group_column,
    register,
    to_device,
)

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.data.dataset import DatasetInfo
    from trishul_ray.models.backbone import Backbone
    from trishul_ray.models.find_model import Preprocessing

#: Luma weights of ITU-R 601, as used by Pillow's mode "L".
_LUMA = (0.299, 0.587, 0.114)


@register("classification")
class ImageClassification(Classification):
    """Classify images of any stored size, with 1 or 3 channels.

    Args:
        mean: Mean of each model channel, for pixels / 255.
        std: Standard deviation of each model channel; positive.
        image_size: Side S; images of another size are resized (bilinear, antialiased).
        channels: Channels of the model, 1 or 3. Gray images are repeated, color becomes luma.
        num_classes: K.
        groups: Names of groups of test rows, in the order of their ``group`` column.

    Raises:
        InputError: The values are inconsistent.
    """

    reads = "image"
    families = ("image-classification",)
    model_kind = "image-classification"
    fields_read = frozenset()

    def __init__(
        self,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        image_size: int,
        channels: int,
        num_classes: int,
        groups: Sequence[str] = (),
    ) -> None:
        if channels not in (1, 3):
            raise InputError(f"image channels={channels} must be 1 or 3")
        if len(mean) != channels or len(std) != channels:
            raise InputError(
                f"image mean has {len(mean)} and std {len(std)} entries: both must have one per "
                f"channel of the model ({channels})"
            )
        if min(std) <= 0:
            raise InputError(f"image std={tuple(std)} must be positive")
        if image_size < 1 or num_classes < 1:
            raise InputError(
                f"image_size={image_size} and num_classes={num_classes} must be at least 1"
            )
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        self.image_size, self.channels = image_size, channels
        self.num_classes, self.groups = num_classes, tuple(groups)

    @classmethod
    def build(
        cls, config: TaskConfig, info: DatasetInfo, backbone: Backbone
    ) -> ImageClassification:
        """Create the task for images in the format of the backbone."""
        return image_task(backbone.preprocessing, info, cls)

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Convert ``pixels`` uint8 [b, C, H, W] and ``label`` [b] to the model's inputs.

        Pixels are copied to the device as uint8 and converted to float32 there.

        Returns:
            ``pixel_values`` [b, channels, S, S] in ``dtype`` and ``labels`` int64 [b]; ``group`` if
            the rows have it.
        """
        moved = to_device({"pixels": batch["pixels"], "labels": batch["label"]}, device)
        images = self._match_channels(moved["pixels"] / 255)
        side = (self.image_size, self.image_size)
        if images.shape[-2:] != side:
            images = torch.nn.functional.interpolate(
                images, size=side, mode="bilinear", align_corners=False, antialias=True
            )
        mean, std = (_per_channel(values, images) for values in (self.mean, self.std))
        return {
            "pixel_values": ((images - mean) / std).to(dtype),
            "labels": moved["labels"],
            **group_column(batch),
        }

    def _match_channels(self, images: Tensor) -> Tensor:
        channels = images.shape[1]
        if channels == self.channels:
            return images
        if channels == 1:
            return images.expand(-1, self.channels, -1, -1)
        if channels == 3:
            return (images * _per_channel(_LUMA, images)).sum(dim=1, keepdim=True)
        raise InputError(
            f"images have {channels} channels; only 1 and 3 can be converted to {self.channels}"
        )


def _per_channel(values: tuple[float, ...], images: Tensor) -> Tensor:
    """Return one number per channel as [1, C, 1, 1], on the device of the images."""
    return constant(values, images.dtype, images.device).view(1, -1, 1, 1)


def image_task(
    expected: Preprocessing,
    info: DatasetInfo,
    task: type[ImageClassification] = ImageClassification,
) -> ImageClassification:
    """Create the task of a dataset for a backbone with this preprocessing.

    The dataset provides the values that the backbone does not declare. If the backbone declares no
    normalization, the dataset's is used: repeated for gray images in a color model, averaged over
    channels for color images in a gray model.

    Raises:
        InputError: Sizes, channels or statistics are inconsistent.
    """
    stored_channels, height, width = info.image_shape
    channels = expected.channels or stored_channels
    if expected.image_size is None and height != width:
        raise InputError(
            f"dataset {info.name} has images of {width}x{height}: set model.image_size, since the "
            "model declares no size and images must be square"
        )
    mean, std = expected.mean, expected.std
    if mean is None or std is None:
        mean, std = info.mean, info.std
        if len(mean) != channels:
            mean = (sum(mean) / len(mean),) * channels
            std = (sum(std) / len(std),) * channels
    return task(
        mean=mean,
        std=std,
        image_size=expected.image_size or height,
        channels=channels,
        num_classes=info.num_classes,
        groups=info.groups,
    )
