"""Images of any size and mode to one array: one's own, which no one has prepared.

A prepared dataset holds images of one size. Where they differ, each is resized (bilinear, with
antialiasing) to the size that most of them have, at most :data:`MAX_SIDE` a side; and where not
all are gray, gray ones and those with transparency become RGB. ``info.source`` says how many were
resized.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image, UnidentifiedImageError

from trishul_ray.data.tables import take
from trishul_ray.errors import CorruptFileError

#: Pillow mode and channels of what a dataset may hold.
MODE_CHANNELS = {"RGB": 3, "L": 1}


def pixel_statistics(pixels: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of ``pixels`` / 255, uint8 [N, C, H, W].

    Counted through 256-bin histograms, so sums are exact integers whatever N.
    """
    values = np.arange(256, dtype=np.float64) / 255
    means, stds = [], []
    for channel in range(pixels.shape[1]):
        counts = np.bincount(pixels[:, channel].reshape(-1), minlength=256)
        mean = float(counts @ values / counts.sum())
        means.append(round(mean, 6))
        stds.append(round(float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum())), 6))
    return tuple(means), tuple(stds)


def decode_images(
    table: pa.Table,
    column: str,
    mode: str,
    size: tuple[int, int],
    where: str,
    progress: Callable[[float], None],
) -> np.ndarray:
    """Decode ``table[column]``, structs {bytes, path} as the hub stores images.

    Args:
        table: rows as read from the file.
        column: name of the image column.
        mode: Pillow mode every image must have, ``"RGB"`` or ``"L"``.
        size: (height, width) every image must have.
        where: the file, for messages.
        progress: called with the fraction done.

    Returns:
        uint8 [N, C, H, W].

    Raises:
        CorruptFileError: the column or a row is not as required.
    """
    images = take(table, column, where)
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
    with open_image(encoded, where) as image:
        # Checked from the header, before a hostile size could be decoded.
        if (image.height, image.width) != size:
            raise CorruptFileError(
                f"{where}: image is {image.width}x{image.height}, not {size[1]}x{size[0]}"
            )
        if image.mode != mode:
            raise CorruptFileError(f"{where}: image mode is {image.mode}, not {mode}")
        return planes(image)


def planes(image: Image.Image) -> np.ndarray:
    """The pixels of an image of a mode in :data:`MODE_CHANNELS`, uint8 [C, H, W]."""
    return np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)


@contextmanager
def open_image(encoded: bytes | Path, where: str) -> Iterator[Image.Image]:
    """An image, its header read and its pixels not yet; what goes wrong inside is named.

    Raises:
        CorruptFileError: the image cannot be read or decoded.
    """
    try:
        with Image.open(encoded if isinstance(encoded, Path) else BytesIO(encoded)) as image:
            yield image
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise CorruptFileError(f"{where}: not a readable image ({error})") from error


#: Larger images are stored with this longer side: 256 is what backbones for 224 crop from.
MAX_SIDE = 256


#: An encoded image or its file, and what to call it in messages.
Item = tuple[bytes | Path, str]


def decode_all(
    splits: Mapping[str, Sequence[Item]], tell: Callable[[str, float], None]
) -> tuple[dict[str, np.ndarray], str]:
    """Pixels of every split, uint8 [N, C, H, W], and what was done to them, for people.

    Args:
        splits: the images by split; not all empty.
        tell: told of the split and the fraction done.

    Raises:
        CorruptFileError: an image cannot be read; names it.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    gray = True
    for items in splits.values():
        for encoded, where in items:
            with open_image(encoded, where) as image:
                sizes[image.height, image.width] += 1
                gray = gray and image.mode in ("1", "L")
    common = min(sizes, key=lambda size: (-sizes[size], size))
    shrink = min(1.0, MAX_SIDE / max(common))
    height, width = (max(1, round(side * shrink)) for side in common)
    mode = "L" if gray else "RGB"
    pixels = {}
    for split, items in splits.items():
        stored = np.empty((len(items), MODE_CHANNELS[mode], height, width), dtype=np.uint8)
        for row, (encoded, where) in enumerate(items):
            with open_image(encoded, where) as image:
                whole = image.convert(mode)
            if whole.size != (width, height):
                whole = whole.resize((width, height), Image.Resampling.BILINEAR)
            stored[row] = planes(whole)
            if row % 500 == 0:
                tell(split, row / len(items))
        pixels[split] = stored
        tell(split, 1.0)
    resized = sum(sizes.values()) - sizes[height, width]
    note = f", {resized} of {sum(sizes.values())} images resized to {width}x{height}"
    return pixels, note if resized else ""
