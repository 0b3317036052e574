"""Encoded images in Arrow tables to uint8 pixels, with every fault named by file and row."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pyarrow as pa
from PIL import Image, UnidentifiedImageError

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


def read_labels(table: pa.Table, column: str, classes: int, where: str) -> np.ndarray:
    """Labels of ``table[column]``, int64 [N].

    Raises:
        CorruptFileError: the column is missing, not integer, null, or outside 0..classes-1.
    """
    if column not in table.column_names:
        have = ", ".join(table.column_names)
        raise CorruptFileError(f"{where}: no column {column!r}; it has {have}")
    values = table.column(column)
    if not pa.types.is_integer(values.type):
        raise CorruptFileError(f"{where}: column {column!r} is {values.type}, not integer")
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        raise CorruptFileError(f"{where}, row {row}: {column} is null")
    labels: np.ndarray = values.to_numpy().astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        row = int(wrong[0])
        raise CorruptFileError(
            f"{where}, row {row}: {column} is {labels[row]}, outside 0..{classes - 1}"
        )
    return labels


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
    if column not in table.column_names:
        have = ", ".join(table.column_names)
        raise CorruptFileError(f"{where}: no column {column!r}; it has {have}")
    kind = table.schema.field(column).type
    if not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        raise CorruptFileError(f"{where}: column {column!r} is {kind}, not an image with bytes")
    height, width = size
    pixels = np.empty((table.num_rows, MODE_CHANNELS[mode], height, width), dtype=np.uint8)
    row = 0
    for chunk in table.column(column).chunks:
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
    try:
        with Image.open(BytesIO(encoded)) as image:
            # Checked from the header, before a hostile size could be decoded.
            if (image.height, image.width) != size:
                raise CorruptFileError(
                    f"{where}: image is {image.width}x{image.height}, not {size[1]}x{size[0]}"
                )
            if image.mode != mode:
                raise CorruptFileError(f"{where}: image mode is {image.mode}, not {mode}")
            decoded = np.asarray(image)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise CorruptFileError(f"{where}: not a readable image ({error})") from error
    return decoded.reshape(*size, -1).transpose(2, 0, 1)
