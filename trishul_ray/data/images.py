"""Decode images into one array per split.

A prepared dataset holds images of one size and mode. :func:`decode_images` requires it of a public
dataset's images. :func:`decode_and_resize` makes your own images meet it: images of other sizes
are resized (bilinear, with antialiasing) to the most frequent size, scaled down if necessary to at
most :data:`MAX_SIDE` a side; and unless all images are gray, all are converted to RGB, which drops
transparency. ``info.source`` tells how many images were resized.

Legend of shapes: N images, C channels, H x W pixels.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image, UnidentifiedImageError

from trishul_ray.data.tables import get_column
from trishul_ray.errors import CorruptFileError

#: Pillow modes of stored images, with their numbers of channels.
MODE_CHANNELS = {"RGB": 3, "L": 1}

#: Maximum side of your own images as stored. Backbones for 224 pixels crop from 256.
MAX_SIDE = 256

#: An encoded image or the path of its file, and its name in messages.
NamedImage = tuple[bytes | Path, str]


def decode_images(
    table: pa.Table,
    column: str,
    mode: str,
    size: tuple[int, int],
    where: str,
    progress: Callable[[float], None],
) -> np.ndarray:
    """Return the images of ``table[column]``, structs {bytes, path}, as uint8 [N, C, H, W].

    Every image must have the Pillow mode ``mode``, ``"RGB"`` or ``"L"``, and the (height, width)
    ``size``. ``where`` names the file in messages; ``progress`` gets the fraction done.

    Raises:
        CorruptFileError: the column does not hold images, or an image cannot be decoded or has
            another mode or size.
    """
    images = get_column(table, column, where)
    kind = images.type
    if not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        raise CorruptFileError(f"{where}: column {column!r} is {kind}, not an image with bytes")
    height, width = size
    pixels = np.empty((table.num_rows, MODE_CHANNELS[mode], height, width), dtype=np.uint8)
    row = 0
    for chunk in images.chunks:
        for encoded in chunk.field("bytes"):
            pixels[row] = _decode(encoded.as_py(), mode, size, f"{where}, row {row}")
            row += 1
            if row % 1000 == 0:
                progress(row / table.num_rows)
    progress(1.0)
    return pixels


def _decode(encoded: bytes | None, mode: str, size: tuple[int, int], where: str) -> np.ndarray:
    if encoded is None:
        raise CorruptFileError(f"{where}: the image has no bytes")
    with _open_image(encoded, where) as image:
        # Only the header has been read: an image of a huge size is refused before it is decoded.
        if (image.height, image.width) != size:
            raise CorruptFileError(
                f"{where}: image is {image.width}x{image.height}, not {size[1]}x{size[0]}"
            )
        if image.mode != mode:
            raise CorruptFileError(f"{where}: image mode is {image.mode}, not {mode}")
        return _to_array(image)


def decode_and_resize(
    splits: Mapping[str, Sequence[NamedImage]], progress: Callable[[str, float], None]
) -> tuple[dict[str, np.ndarray], str]:
    """Decode images of any size and mode, at least one, and convert them to one size and mode.

    Returns:
        the pixels of every split, uint8 [N, C, H, W], and a note for ``info.source`` on how many
        images were resized, empty if none.

    Raises:
        CorruptFileError: an image cannot be read; the message names it.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    all_gray = True
    for images in splits.values():
        for encoded, where in images:
            with _open_image(encoded, where) as image:
                sizes[image.height, image.width] += 1
                all_gray = all_gray and image.mode in ("1", "L")
    most_frequent = min(sizes, key=lambda size: (-sizes[size], size))
    scale = min(1.0, MAX_SIDE / max(most_frequent))
    height, width = (max(1, round(side * scale)) for side in most_frequent)
    mode = "L" if all_gray else "RGB"
    pixels = {}
    for split, images in splits.items():
        shape = (MODE_CHANNELS[mode], height, width)
        pixels[split] = resize_images(images, shape, partial(progress, split))
        progress(split, 1.0)
    resized = sizes.total() - sizes[height, width]
    note = f", {resized} of {sizes.total()} images resized to {width}x{height}"
    return pixels, note if resized else ""


def resize_images(
    images: Sequence[NamedImage],
    shape: tuple[int, int, int],
    progress: Callable[[float], None] = lambda done: None,
) -> np.ndarray:
    """Decode images of any size and mode, and convert them to one ``shape``, (C, H, W).

    Returns:
        the pixels, uint8 [N, C, H, W].

    Raises:
        CorruptFileError: an image cannot be read; the message names it.
    """
    channels, height, width = shape
    mode = next(mode for mode, count in MODE_CHANNELS.items() if count == channels)
    pixels = np.empty((len(images), *shape), dtype=np.uint8)
    for row, (encoded, where) in enumerate(images):
        with _open_image(encoded, where) as image:
            converted = image.convert(mode)
        if converted.size != (width, height):
            converted = converted.resize((width, height), Image.Resampling.BILINEAR)
        pixels[row] = _to_array(converted)
        if row % 500 == 0:
            progress(row / len(images))
    return pixels


@contextmanager
def _open_image(encoded: bytes | Path, where: str) -> Iterator[Image.Image]:
    """Open an image and read its header; convert errors in the body, too, to CorruptFileError."""
    try:
        with Image.open(encoded if isinstance(encoded, Path) else BytesIO(encoded)) as image:
            yield image
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise CorruptFileError(f"{where}: not a readable image ({error})") from error


def _to_array(image: Image.Image) -> np.ndarray:
    """Return the pixels of an image with a mode in :data:`MODE_CHANNELS`, uint8 [C, H, W]."""
    return np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)


def pixel_statistics(pixels: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of ``pixels`` / 255, uint8 [N, C, H, W].

    They are computed from 256-bin histograms, so the sums are exact integers for any N.
    """
    values = np.arange(256, dtype=np.float64) / 255
    means, stds = [], []
    for channel in range(pixels.shape[1]):
        counts = np.bincount(pixels[:, channel].reshape(-1), minlength=256)
        mean = float(counts @ values / counts.sum())
        means.append(round(mean, 6))
        stds.append(round(float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum())), 6))
    return tuple(means), tuple(stds)
