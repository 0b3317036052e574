"""Decode images into one array per split.

A prepared dataset holds images of one size and mode. :func:`decode_images` requires it of a public
dataset's images. :func:`decode_and_resize` makes your own images meet it: each is turned upright
(its EXIF orientation), resized so that its short side fits (bilinear, with antialiasing), and
cropped to the square in its centre. The side is the most frequent short side, at most
:data:`MAX_SIDE`. Unless all images are gray, all are converted to RGB, which drops transparency.
Gray images of 16 bits are scaled to 8; those of 32-bit integers or floats are refused, because
nothing says which values are black and white. ``info.source`` tells how many images were scaled,
resized or cropped, and how many were skipped.

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
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from trishul_ray.data.columns import get_column, holds_images
from trishul_ray.errors import CorruptFileError, InputError, join_limited, one_line
from trishul_ray.storage.integrity import is_lfs_pointer, lfs_pointer

# Python would print what Pillow logs on malformed files.
logging.getLogger("PIL").addHandler(logging.NullHandler())

#: Pillow modes of stored images, with their numbers of channels.
MODE_CHANNELS = {"RGB": 3, "L": 1}

#: Maximum side of your own images as stored.
MAX_SIDE = 256

#: Raise it when :func:`resize_images` changes what it returns: own images are prepared anew.
PREPARATION_VERSION = 3

#: Images of 16 bits that all stay below this value have fewer, such as those of a 12-bit sensor: of
#: the 256 levels of 8 bits they would have 32.
_DARK = 2**13

#: Pillow's modes of pixels whose range of values is unknown.
_WIDE_MODES = {"I": "32-bit integers", "F": "32-bit floats"}
_WIDE_ADVICE = "write 8 or 16 bits"

#: Suffixes of photos as phones take them, in a format that Pillow cannot read.
HEIC_SUFFIXES = (".heic", ".heif")

#: Broken images to name in one message.
MAX_NAMED = 100

#: Errors of Pillow for files that are no images, are cut off or are malformed.
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
        # Only the header has been read: an image of a huge size is refused before it is decoded.
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
        pixels: the images of every split, uint8 [N, C, H, W].
        retained: where they were in the split's list, int64 [N], ascending.
        skipped: names of the images that cannot be read.
        note: how many were scaled, resized, cropped or skipped, for ``info.source``; empty if none.
    """

    pixels: dict[str, np.ndarray]
    retained: dict[str, np.ndarray]
    skipped: tuple[str, ...]
    note: str


def decode_and_resize(
    splits: Mapping[str, Sequence[NamedImage]],
    progress: Callable[[str, float], None],
    *,
    skip_broken: bool = False,
) -> ResizedImages:
    """Decode images of any size and mode, at least one, and convert them to one size and mode.

    With ``skip_broken``, images that cannot be read are left out, as if they were not there.

    Raises:
        CorruptFileError: images cannot be read, or have 16 bits of which they use few; the message
            names them.
    """
    broken: dict[str, str] = {}
    deep: dict[str, int] = {}
    while True:
        readable = {s: [i for i in images if i[1] not in broken] for s, images in splits.items()}
        shape, sizes = _common_shape(readable, broken)
        pixels = {}
        for split, images in readable.items():
            images = [image for image in images if image[1] not in broken]
            pixels[split] = _resize(images, shape, partial(progress, split), broken, deep)
            progress(split, 1.0)
        if broken and not skip_broken:
            raise _broken_images(broken)
        if sum(map(len, pixels.values())) == sizes.total():
            break
        # The header of a broken image may have been readable: its size must not count.
    retained = {
        split: np.array([n for n, (_, where) in enumerate(images) if where not in broken], int)
        for split, images in splits.items()
    }
    brightest = max(deep.values(), default=_DARK)
    if brightest < _DARK:
        raise CorruptFileError(
            f"{len(deep)} images of 16 bits have values of at most {brightest:,} of 65,535, such "
            f"as {join_limited(list(deep), 3)}: of 256 levels of gray, {brightest // 257 + 1} "
            "would be left; scale them to 8 or to all 16 bits (12 bits: value * 16)"
        )
    side = shape[1]
    resized = sizes.total() - sizes[side, side]
    note = ""
    if deep:
        note = f", {len(deep)} of {sizes.total()} images scaled from 16 to 8 bits"
    if resized:
        note += f", {resized} of {sizes.total()} images resized and cropped to {side}x{side}"
    if broken:
        note += f", {len(broken)} broken image{'s' * (len(broken) > 1)} skipped"
    return ResizedImages(pixels, retained, tuple(broken), note)


def _common_shape(
    splits: Mapping[str, Sequence[NamedImage]], broken: dict[str, str]
) -> tuple[tuple[int, int, int], Counter[tuple[int, int]]]:
    """Return (C, side, side) for all images, and how many have which size as stored.

    Only headers are read. Images without a readable one are added to ``broken``, with the fault.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    all_gray = True
    for images in splits.values():
        for encoded, where in images:
            try:
                with _open_image(encoded, where) as image:
                    sizes[image.height, image.width] += 1
                    all_gray = all_gray and (image.mode in ("1", "L") or _is_deep(image))
            except CorruptFileError as error:
                broken[where] = str(error)
    if not sizes:
        raise _broken_images(broken)
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
    pixels = _resize(images, shape, lambda done: None, broken, {})
    if broken:
        raise _broken_images(broken, skippable=False)
    return pixels


def _resize(
    images: Sequence[NamedImage],
    shape: tuple[int, int, int],
    progress: Callable[[float], None],
    broken: dict[str, str],
    deep: dict[str, int],
) -> np.ndarray:
    """Return the pixels of the images that can be read; add the others to ``broken``.

    Images of 16 bits are added to ``deep``, with their largest value.
    """
    channels, height, width = shape
    mode = next(mode for mode, count in MODE_CHANNELS.items() if count == channels)
    pixels = np.empty((len(images), *shape), dtype=np.uint8)
    row = 0
    for number, (encoded, where) in enumerate(images):
        try:
            with _open_image(encoded, where) as image:
                upright = turn_upright(image)
                if _is_deep(upright):  # Pillow would clip values at 255: nearly all pixels white
                    values: np.ndarray = np.asarray(upright).astype(np.uint32)
                    deep[where] = int(values.max())
                    upright = Image.fromarray(((values + 128) // 257).astype(np.uint8))
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
    return pixels[:row]


def turn_upright(image: Image.Image) -> Image.Image:
    """Return an image as its EXIF orientation says that it is seen."""
    image.load()  # an image that cannot be decoded fails here
    try:
        return ImageOps.exif_transpose(image)
    except _UNREADABLE:
        return image  # broken EXIF data say nothing on a readable image


def _is_deep(image: Image.Image) -> bool:
    """Return whether an image is gray with 16 bits; Pillow reads those in color with 8."""
    return image.mode.startswith("I;16")


def check_mode(image: Image.Image, where: str) -> None:
    """Raise a CorruptFileError for an image whose values have no known range."""
    if image.mode in _WIDE_MODES:
        raise CorruptFileError(
            f"{where}: pixels of {_WIDE_MODES[image.mode]}, of which nothing says what is black "
            f"and what is white; {_WIDE_ADVICE}"
        )


def _broken_images(broken: Mapping[str, str], skippable: bool = True) -> CorruptFileError:
    """Return the error that names all images in ``broken``, which has their faults by name."""
    advice = []
    if any(name.lower().endswith(HEIC_SUFFIXES) for name in broken):
        advice.append("convert HEIC to JPEG")
    if len(broken) > 1 and any(fault.endswith(_WIDE_ADVICE) for fault in broken.values()):
        advice.append(f"{_WIDE_ADVICE} where pixels are 32-bit integers or floats")
    if len(broken) == 1:
        (found,) = broken.values()
    else:
        found = f"{len(broken)} images cannot be read: {join_limited(list(broken), MAX_NAMED)}"
    if skippable:
        one_or_all = "it" if len(broken) == 1 else "them"
        advice += [f"remove {one_or_all}", "or set data.skip_broken=true"]
    return CorruptFileError("; ".join(filter(None, (found, ", ".join(advice)))))


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
        _reject_pointer(encoded, where)
        reason = re.sub(r" <_io\.BytesIO object at \w+>", "", one_line(error))
        raise CorruptFileError(f"{where}: not a readable image ({reason})") from error


def _reject_pointer(encoded: bytes | Path, where: str) -> None:
    """Raise an InputError for a pointer of Git LFS: no broken image, whatever is to be skipped."""
    if isinstance(encoded, Path):
        pointer = lfs_pointer(encoded) is not None
    else:
        pointer = is_lfs_pointer(encoded)
    if pointer:
        raise InputError(
            f"{where} is a pointer of Git LFS, not the image: run `git lfs pull` where it is"
        )


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
