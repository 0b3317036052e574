"""Decode images into a single array.

All images of a prepared dataset have the same size and mode. :func:`decode_images` requires this of
public datasets. :func:`decode_and_resize` converts user images: it applies the EXIF orientation,
resizes the short side (bilinear, with antialiasing), and crops the central square. The side is the
most frequent short side, at most :data:`MAX_SIDE`. All images are converted to RGB unless all are
gray. Transparent images are composited on white. Gray images with 16 bits are scaled to 8 bits.
Images with an unknown range are rejected: 32-bit integers or floats, and 16-bit images that use
fewer bits, such as 12.

Legend of shapes: N images, C channels, H x W pixels.
"""

import logging
import re
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from trishul_ray.data.columns import at_row, get_column, holds_images
from trishul_ray.errors import CorruptFileError, join_limited, one_line

# Python would print Pillow's log messages about malformed files.
logging.getLogger("PIL").addHandler(logging.NullHandler())

#: Pillow modes of stored images, and their numbers of channels.
MODE_CHANNELS = {"RGB": 3, "L": 1}

#: Maximum side of stored user images.
MAX_SIDE = 256

#: Increment it when the result of :func:`resize_images` changes; user images are then prepared
#: again.
PREPARATION_VERSION = 4

#: A 16-bit gray image with only smaller values uses fewer bits, such as a 12-bit sensor's image.
DARK = 2**13

#: Maximum number of broken images to name in a message.
MAX_NAMED = 100

#: Pillow's errors for files that are not images, are truncated or are malformed.
_UNREADABLE = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, struct.error),
    Image.DecompressionBombError,
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
    """Decode the images ``table[column]``, structs {bytes, path}, to uint8 [N, C, H, W].

    Every image must have the Pillow mode ``mode``, ``"RGB"`` or ``"L"``, and the (height, width)
    ``size``. ``where`` names the file in messages, and ``progress`` receives the completed
    fraction.

    Raises:
        CorruptFileError: The column does not contain images, or an image cannot be decoded or has
            another mode or size.
    """
    images = named_images(get_column(table, column, where), where)
    for encoded, name in images:
        with _open_image(encoded, name) as image:  # reads only the header
            if (image.mode, image.height, image.width) != (mode, *size):
                raise CorruptFileError(
                    f"{name}: the image is {image.mode} {image.width}x{image.height}, not {mode} "
                    f"{size[1]}x{size[0]}"
                )
    return resize_images(images, (MODE_CHANNELS[mode], *size), progress)


def named_images(
    values: pa.ChunkedArray, where: str, names: Sequence[str] | None = None
) -> list[NamedImage]:
    """Pair images, encoded or in structs {bytes, path}, with the names of their rows.

    Raises:
        CorruptFileError: The values are not images, or an image has no bytes.
    """
    kind = values.type
    if not (holds_images(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise CorruptFileError(f"{where}: the column of images is {kind}, not images")
    images = []
    for row, value in enumerate(values.to_pylist()):
        name = f"{where}, {names[row]}" if names else at_row(where, row)
        encoded = value["bytes"] if holds_images(kind) else value
        if encoded is None:
            raise CorruptFileError(f"{name}: the image has no bytes")
        images.append((encoded, name))
    return images


@dataclass(frozen=True)
class ResizedImages:
    """Images with the same size and mode.

    Attributes:
        pixels: The readable images, uint8 [n, C, H, W].
        broken: Faults of the unreadable images, keyed by name.
        notes: Numbers of scaled, transparent, resized and skipped images, for reports.
    """

    pixels: np.ndarray
    broken: Mapping[str, str]
    notes: tuple[str, ...]


def decode_and_resize(
    images: Sequence[NamedImage], progress: Callable[[float], None], *, skip_broken: bool = False
) -> ResizedImages:
    """Decode images of any size and mode, and convert them to the same size and mode.

    With ``skip_broken``, unreadable images are skipped.

    Raises:
        CorruptFileError: Images cannot be read; the message names them.
    """
    short_sides: Counter[int] = Counter()
    all_gray = True
    for encoded, where in images:
        # The second pass reports an unreadable header.
        with suppress(CorruptFileError), _open_image(encoded, where) as image:
            short_sides[min(image.size)] += 1
            all_gray = all_gray and (image.mode in ("1", "L") or _is_deep(image))
    side = min(short_sides, key=lambda side: (-short_sides[side], side), default=1)
    side = min(MAX_SIDE, side)
    shape = (MODE_CHANNELS["L" if all_gray else "RGB"], side, side)
    found = _resize(images, shape, progress)
    if found.broken and (not skip_broken or not len(found.pixels)):
        raise _broken_images(found.broken, "remove them, or set data.skip_broken=true")
    return found


def resize_images(
    images: Sequence[NamedImage],
    shape: tuple[int, int, int],
    progress: Callable[[float], None] = lambda done: None,
) -> np.ndarray:
    """Decode images of any size and mode to uint8 [N, C, H, W] with the ``shape`` (C, H, W).

    Raises:
        CorruptFileError: Images cannot be read; the message names them.
    """
    found = _resize(images, shape, progress)
    if found.broken:
        raise _broken_images(found.broken, "remove them")
    return found.pixels


def _resize(
    images: Sequence[NamedImage], shape: tuple[int, int, int], progress: Callable[[float], None]
) -> ResizedImages:
    channels, height, width = shape
    mode = next(mode for mode, count in MODE_CHANNELS.items() if count == channels)
    pixels = np.empty((len(images), *shape), dtype=np.uint8)
    broken: dict[str, str] = {}
    row = deep = resized = transparent = 0
    for number, (encoded, where) in enumerate(images):
        try:
            with _open_image(encoded, where) as image:
                upright = turn_upright(image)
                # otherwise Pillow would clip values at 255, and nearly all pixels would be white
                if _is_deep(upright):
                    values: np.ndarray = np.asarray(upright).astype(np.uint32)
                    if 0 < (top := int(values.max())) < DARK:
                        raise CorruptFileError(
                            f"{where}: a 16-bit image with values of at most {top:,} would become "
                            "nearly black; scale it to 8 or to the full 16 bits (from 12 bits: "
                            "value * 16)"
                        )
                    upright = Image.fromarray(((values + 128) // 257).astype(np.uint8))
                    deep += 1
                elif upright.has_transparency_data:
                    upright = upright.convert("RGBA")
                    transparent += upright.getchannel("A").getextrema() != (255, 255)
                    white = Image.new("RGBA", upright.size, "white")
                    upright = Image.alpha_composite(white, upright)
                upright = upright.convert(mode)
                if upright.size != (width, height):
                    bilinear = Image.Resampling.BILINEAR
                    upright = ImageOps.fit(upright, (width, height), bilinear)
                    resized += 1
        except CorruptFileError as error:
            broken[where] = str(error)
            continue
        pixels[row] = np.asarray(upright).reshape(height, width, channels).transpose(2, 0, 1)
        row += 1
        if number % 500 == 0:
            progress(number / len(images))
    progress(1.0)
    counts = {
        f"of {row} images scaled from 16 to 8 bits": deep,
        f"of {row} transparent images composited on white": transparent,
        f"of {row} images resized and cropped to {width}x{height}": resized,
        "broken images skipped": len(broken),
    }
    notes = tuple(f"{count} {what}" for what, count in counts.items() if count)
    return ResizedImages(pixels[:row], broken, notes)


def turn_upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation of an image."""
    image.load()  # raises if the image cannot be decoded
    try:
        return ImageOps.exif_transpose(image)
    except _UNREADABLE:
        return image  # a readable image with broken EXIF data


def _is_deep(image: Image.Image) -> bool:
    """Return whether an image is gray with 16 bits; Pillow reads color images with 8 bits."""
    return image.mode.startswith("I;16")


def check_mode(image: Image.Image, where: str) -> None:
    """Raise a CorruptFileError for an image whose values have no known range."""
    if image.mode in ("I", "F"):
        raise CorruptFileError(f"{where}: 32-bit pixels have an unknown range; store 8 or 16 bits")


def _broken_images(broken: Mapping[str, str], advice: str) -> CorruptFileError:
    """Build the error for all images in ``broken``, which maps names to faults."""
    found = next(iter(broken.values()))
    if len(broken) > 1:
        names = join_limited(list(broken), MAX_NAMED)
        found = f"{len(broken)} images cannot be read: {names}; the first: {found}"
    return CorruptFileError(f"{found}; {advice}")


@contextmanager
def _open_image(encoded: bytes | Path, where: str) -> Iterator[Image.Image]:
    """Open an image and read its header; convert errors, also in the body, to CorruptFileError.

    Pillow's warnings about readable images are suppressed.
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


def pixel_statistics(pixels: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation per channel of ``pixels`` / 255, uint8 [N, C, H, W].

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
