"""Decode images into one array.

A prepared dataset holds images of one size and mode. :func:`decode_images` requires it of a public
dataset's images. :func:`decode_and_resize` converts user images: each is turned upright (its EXIF
orientation), resized so that its short side fits (bilinear, with antialiasing), and cropped to the
square in its center. The side is the most frequent short side, at most :data:`MAX_SIDE`. Unless all
images are gray, all are converted to RGB, which drops transparency. Gray images of 16 bits are
scaled to 8; images of 32-bit integers or floats, whose range is unknown, are rejected.

Legend of shapes: N images, C channels, H x W pixels.
"""

import logging
import re
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from trishul_ray.data.columns import get_column, holds_images
from trishul_ray.errors import CorruptFileError, join_limited, one_line

# Python would print what Pillow logs on malformed files.
logging.getLogger("PIL").addHandler(logging.NullHandler())

#: Pillow modes of stored images, with their numbers of channels.
MODE_CHANNELS = {"RGB": 3, "L": 1}

#: Maximum side of user images as stored.
MAX_SIDE = 256

#: Raise it when :func:`resize_images` changes its result: user images are prepared again.
PREPARATION_VERSION = 3

#: Broken images to name in one message.
MAX_NAMED = 100

#: Errors of Pillow for files that are no images, are truncated or are malformed.
_UNREADABLE = (
    Image.DecompressionBombError,
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    struct.error,
)

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
    if not holds_images(images.type):
        kind = images.type
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
        # Only the header has been read: a huge image is rejected before it is decoded.
        if (image.height, image.width) != size:
            raise CorruptFileError(
                f"{where}: image is {image.width}x{image.height}, not {size[1]}x{size[0]}"
            )
        if image.mode != mode:
            raise CorruptFileError(f"{where}: image mode is {image.mode}, not {mode}")
        return _to_array(image)


@dataclass(frozen=True)
class ResizedImages:
    """Images of one size and mode.

    Attributes:
        pixels: The readable images, uint8 [n, C, H, W].
        readable: Whether each image could be read, bool [N].
        skipped: Names of the images that could not be read.
        notes: How many were scaled, resized, cropped or skipped, for reports.
    """

    pixels: np.ndarray
    readable: np.ndarray
    skipped: tuple[str, ...]
    notes: tuple[str, ...]


def decode_and_resize(
    images: Sequence[NamedImage], progress: Callable[[float], None], *, skip_broken: bool = False
) -> ResizedImages:
    """Decode images of any size and mode, at least one, and convert them to one size and mode.

    With ``skip_broken``, images that cannot be read are left out.

    Raises:
        CorruptFileError: Images cannot be read; the message names them.
    """
    broken: dict[str, str] = {}
    while True:
        shape, sizes = _common_shape([each for each in images if each[1] not in broken], broken)
        readable = [each for each in images if each[1] not in broken]
        pixels, deep = _resize(readable, shape, progress, broken)
        if broken and not skip_broken:
            raise _broken_images(broken, "remove them, or set data.skip_broken=true")
        if len(pixels) == sizes.total():
            break
        # The header of a broken image may have been readable: its size must not count.
    progress(1.0)
    total, side = len(pixels), shape[1]
    counts = {
        f"of {total} images scaled from 16 to 8 bits": deep,
        f"of {total} images resized and cropped to {side}x{side}": total - sizes[side, side],
        "broken images skipped": len(broken),
    }
    notes = tuple(f"{count} {what}" for what, count in counts.items() if count)
    kept = np.array([name not in broken for _, name in images])
    return ResizedImages(pixels, kept, tuple(broken), notes)


def _common_shape(
    images: Sequence[NamedImage], broken: dict[str, str]
) -> tuple[tuple[int, int, int], Counter[tuple[int, int]]]:
    """Return (C, side, side) for all images, and the number of images per stored size.

    Only headers are read. Images without a readable header are added to ``broken``.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    all_gray = True
    for encoded, where in images:
        try:
            with _open_image(encoded, where) as image:
                sizes[image.height, image.width] += 1
                all_gray = all_gray and (image.mode in ("1", "L") or _is_deep(image))
        except CorruptFileError as error:
            broken[where] = str(error)
    if not sizes:
        raise _broken_images(broken, "replace them")
    short_sides: Counter[int] = Counter()
    for size, count in sizes.items():
        short_sides[min(size)] += count
    side = min(MAX_SIDE, min(short_sides, key=lambda side: (-short_sides[side], side)))
    return (MODE_CHANNELS["L" if all_gray else "RGB"], side, side), sizes


def resize_images(images: Sequence[NamedImage], shape: tuple[int, int, int]) -> np.ndarray:
    """Decode images of any size and mode to uint8 [N, C, H, W] of one ``shape``, (C, H, W).

    Images that cannot be read are a CorruptFileError that names them.
    """
    broken: dict[str, str] = {}
    pixels, _ = _resize(images, shape, lambda done: None, broken)
    if broken:
        raise _broken_images(broken, "remove them")
    return pixels


def _resize(
    images: Sequence[NamedImage],
    shape: tuple[int, int, int],
    progress: Callable[[float], None],
    broken: dict[str, str],
) -> tuple[np.ndarray, int]:
    """Return the pixels of the readable images, and how many have 16 bits.

    The other images are added to ``broken``, with their faults.
    """
    channels, height, width = shape
    mode = next(mode for mode, count in MODE_CHANNELS.items() if count == channels)
    pixels = np.empty((len(images), *shape), dtype=np.uint8)
    row = deep = 0
    for number, (encoded, where) in enumerate(images):
        try:
            with _open_image(encoded, where) as image:
                upright = turn_upright(image)
                if _is_deep(upright):  # Pillow would clip values at 255: nearly all pixels white
                    values: np.ndarray = np.asarray(upright).astype(np.uint32)
                    upright = Image.fromarray(((values + 128) // 257).astype(np.uint8))
                    deep += 1
                upright = upright.convert(mode)
                if upright.size != (width, height):
                    bilinear = Image.Resampling.BILINEAR
                    upright = ImageOps.fit(upright, (width, height), bilinear)
        except CorruptFileError as error:
            broken[where] = str(error)
            continue
        pixels[row] = _to_array(upright)
        row += 1
        if number % 500 == 0:
            progress(number / len(images))
    return pixels[:row], deep


def turn_upright(image: Image.Image) -> Image.Image:
    """Return an image as its EXIF orientation says that it is seen."""
    image.load()  # an image that cannot be decoded fails here
    try:
        return ImageOps.exif_transpose(image)
    except _UNREADABLE:
        return image  # a readable image with broken EXIF data


def _is_deep(image: Image.Image) -> bool:
    """Return whether an image is gray with 16 bits; Pillow reads color images with 8."""
    return image.mode.startswith("I;16")


def check_mode(image: Image.Image, where: str) -> None:
    """Raise a CorruptFileError for an image whose values have no known range."""
    if image.mode in ("I", "F"):
        raise CorruptFileError(
            f"{where}: pixels of 32 bits, whose range is unknown; write 8 or 16 bits"
        )


def _broken_images(broken: Mapping[str, str], advice: str) -> CorruptFileError:
    """Return the error that names all images in ``broken``, which has their faults by name."""
    found = next(iter(broken.values()))
    if len(broken) > 1:
        found = f"{len(broken)} images cannot be read: {join_limited(list(broken), MAX_NAMED)}"
    return CorruptFileError(f"{found}; {advice}")


@contextmanager
def _open_image(encoded: bytes | Path, where: str) -> Iterator[Image.Image]:
    """Open an image and read its header; convert errors in the body, too, to CorruptFileError.

    Warnings of Pillow are not shown: what is wrong but readable needs no attention.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")
            with Image.open(encoded if isinstance(encoded, Path) else BytesIO(encoded)) as image:
                check_mode(image, where)
                yield image
    except CorruptFileError:
        raise
    except _UNREADABLE as error:
        reason = re.sub(r" <_io\.BytesIO object at \w+>", "", one_line(error))
        raise CorruptFileError(f"{where}: not a readable image ({reason})") from error


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
