"""Image classification: uint8 pixels to normalised images, cross-entropy, accuracy.

Legend of shapes: b images, C channels, H x W pixels as stored, S the model's side, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trishul_ray.errors import InputError
from trishul_ray.tasks.base import Task, class_sums, group_of, logits_of, merge_classes

if TYPE_CHECKING:
    from trishul_ray.data.prepared import DatasetInfo
    from trishul_ray.models.lookup import Preprocessing

#: ITU-R 601 luma, the weights of Pillow's mode "L".
_LUMA = (0.299, 0.587, 0.114)


class ImageClassification(Task):
    """Images of any stored size and 1 or 3 channels, for a model of side S.

    Args:
        mean: per model channel, of pixels / 255.
        std: likewise; positive.
        image_size: the model's side S; images of another size are resized (bilinear, antialias).
        channels: the model's channels, 1 or 3; gray is repeated, color becomes luma.
        num_classes: K.
        groups: names of parts of the test rows, in the order of their ``group`` column.

    Raises:
        InputError: the numbers do not fit together.
    """

    architecture = "image-classification"
    targets = ("labels", "group")

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
        """Check that the numbers fit together, and keep them."""
        if channels not in (1, 3):
            raise InputError(f"image channels={channels}: the model must take 1 or 3")
        if len(mean) != channels or len(std) != channels:
            raise InputError(
                f"image mean has {len(mean)} and std {len(std)} entries: both need one for each "
                f"of the model's {channels} channels"
            )
        if min(std) <= 0:
            raise InputError(f"image std={tuple(std)}: every entry must be positive")
        if image_size < 1 or num_classes < 1:
            raise InputError(
                f"image_size={image_size} and num_classes={num_classes} must be at least 1"
            )
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        self.image_size = image_size
        self.channels = channels
        self.num_classes = num_classes
        self.groups = tuple(groups)

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """``pixels`` uint8 [b, C, H, W] and ``label`` [b] to the model's input.

        Bytes cross to the device as uint8; all arithmetic is float32 there.

        Returns:
            ``pixel_values`` [b, channels, S, S] in ``dtype`` and ``labels`` int64 [b]; ``group``
            where the rows have it.
        """
        images = batch["pixels"].to(device, non_blocking=True).to(torch.float32).div_(255)
        images = self._channels(images)
        side = (self.image_size, self.image_size)
        if images.shape[-2:] != side:
            images = F.interpolate(
                images, size=side, mode="bilinear", align_corners=False, antialias=True
            )
        mean = images.new_tensor(self.mean).view(1, -1, 1, 1)
        std = images.new_tensor(self.std).view(1, -1, 1, 1)
        return {
            "pixel_values": ((images - mean) / std).to(dtype),
            "labels": batch["label"].to(device, non_blocking=True),
            **group_of(batch),
        }

    def _channels(self, images: Tensor) -> Tensor:
        have = images.shape[1]
        if have == self.channels:
            return images
        if have == 1:
            return images.expand(-1, self.channels, -1, -1)
        if have == 3:
            luma = images.new_tensor(_LUMA).view(1, 3, 1, 1)
            return (images * luma).sum(dim=1, keepdim=True)
        raise InputError(f"images have {have} channels; only 1 and 3 can become {self.channels}")

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of logits [b, K], in float32."""
        return F.cross_entropy(logits_of(outputs).float(), batch["labels"])

    def evaluate(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss_sum``, ``correct`` and ``count`` over the batch, summed in float64.

        A row whose logits are not finite counts as wrong: argmax would call NaN class 0.
        """
        return class_sums(logits_of(outputs), batch, self.groups)

    def merge(self, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """``loss`` and ``accuracy`` over all batches, and ``accuracy`` by group.

        Raises:
            ValueError: nothing was counted.
        """
        return merge_classes(sums, self.groups)


def image_task(backbone: "Preprocessing", info: "DatasetInfo") -> ImageClassification:
    """The task of a dataset for a backbone: what the backbone leaves open, the dataset decides.

    A backbone that names no normalization gets the dataset's: repeated where gray images go into
    a color model, averaged over channels where color goes into a gray one.

    Args:
        backbone: image size, channels, mean and std the model was trained with, as far as known.
        info: the dataset's description.

    Raises:
        InputError: sizes, channels or statistics do not fit together.
    """
    stored, height, width = info.image_shape
    channels = backbone.channels or stored
    if backbone.image_size is None and height != width:
        raise InputError(
            f"dataset {info.name} has images of {width}x{height}: set model.image_size, since the "
            "model names no size and only squares are taken"
        )
    mean, std = backbone.mean, backbone.std
    if mean is None or std is None:
        mean, std = info.mean, info.std
        if len(mean) != channels:
            mean = (sum(mean) / len(mean),) * channels
            std = (sum(std) / len(std),) * channels
    return ImageClassification(
        mean=mean,
        std=std,
        image_size=backbone.image_size or height,
        channels=channels,
        num_classes=info.num_classes,
        groups=info.groups,
    )
