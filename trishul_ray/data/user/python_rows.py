"""Convert rows from Python to Arrow tables, and store them in the cache for workers."""

import hashlib
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from trishul_ray.data.columns import class_names, decoded, is_text, nfc
from trishul_ray.data.hub import table_of
from trishul_ray.data.images import check_mode, turn_upright
from trishul_ray.data.tables import check_unique, to_arrow
from trishul_ray.errors import InputError, first_line
from trishul_ray.runtime.lazy import pq
from trishul_ray.storage.integrity import make_once

#: Name of the dataset of rows from Python, and of their folder in the cache.
ROWS = "rows"

#: Pillow modes that PNG files preserve.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})

#: Allowed splits of rows from Python.
_SPLITS = frozenset({"train", "validation", "test"})


def store_rows(rows: Any, cache: Path, columns: Mapping[str, str]) -> Path:
    """Write rows (see :func:`to_splits`) to the cache unless it contains them; return the folder.

    ``columns`` is ``data.columns``. The files are Parquet, so later commands can also read them.
    The folder is named after a hash of the values: the same rows in any form are the same dataset.
    """
    image = columns.get("image", "image")
    tables = {split: _plain(table, image) for split, table in to_splits(rows).items()}

    def write(new: Path) -> None:
        for split, table in tables.items():
            pq.write_table(table, new / f"{split}.parquet")

    return make_once(cache, f"{ROWS}/{_hash_of(tables)}", write)


def _hash_of(tables: Mapping[str, pa.Table]) -> str:
    """Hash the splits' Arrow streams and class names."""
    hashed = hashlib.sha256()
    for split, table in sorted(tables.items()):
        names = [(name, class_names(table, name)) for name in table.column_names]
        hashed.update(json.dumps([split, names]).encode())
        sink = pa.BufferOutputStream()
        plain = table.replace_schema_metadata()
        with pa.ipc.new_stream(sink, plain.schema) as writer:
            writer.write_table(plain)
        hashed.update(sink.getvalue())
    return hashed.hexdigest()


def to_splits(rows: Any) -> dict[str, pa.Table]:
    """Convert rows to a table per split, or raise an InputError.

    Rows are a table (see :func:`to_table`), or a dictionary from splits to tables.
    """
    of_hub = hasattr(rows, "column_names")  # a DatasetDict, whose keys are splits
    if not (isinstance(rows, Mapping) and rows and (of_hub or set(rows) <= _SPLITS)):
        return {"train": to_table(rows)}
    if "train" not in rows or set(rows) - _SPLITS:
        raise InputError(
            f"the rows have the splits {', '.join(rows)}; pass train and, optionally, validation "
            "and test"
        )
    return {split: to_table(table) for split, table in rows.items()}


def to_table(rows: Any) -> pa.Table:
    """Convert rows to an Arrow table, with images as encoded bytes, or raise an InputError.

    Rows are a Hugging Face ``Dataset``, a pandas or Arrow table, a list of dictionaries, or a
    dictionary of columns. Images are encoded bytes, paths, arrays uint8 [H, W] or [H, W, 3], or
    Pillow images.
    """
    try:
        table = _to_table(rows)
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise InputError(f"the rows passed from Python: {error}") from error
    names = [nfc(name) for name in table.column_names]
    return decoded(table.rename_columns(names).replace_schema_metadata(table.schema.metadata))


def _to_table(rows: Any) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].IterableDataset):
        raise ValueError("a streaming dataset is not supported; load it without streaming=True")
    if "datasets" in sys.modules and hasattr(rows, "with_format") and hasattr(rows, "features"):
        return table_of(rows)
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a pandas table
        check_unique([str(name) for name in rows.columns], "the rows")
        rows = {name: list(rows[name]) for name in rows.columns}
    elif isinstance(rows, Sequence) and rows and isinstance(rows[0], Mapping):
        rows = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
    if not isinstance(rows, Mapping):
        raise ValueError(
            f"they are of type {type(rows).__name__}, or empty; pass a Hugging Face Dataset, a "
            "pandas or Arrow table, a list of dictionaries, or a dictionary of columns"
        )
    for name, values in rows.items():
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            kind = type(values).__name__
            raise ValueError(f"column {str(name)!r} is a {kind}, not a list of values")
    return to_arrow({str(k): [_plain_value(v) for v in values] for k, values in rows.items()})


def _plain_value(value: Any) -> Any:
    if is_image(value):
        return encode_image(value)
    scalar = getattr(value, "ndim", None) == 0  # a scalar of NumPy or torch
    return value.item() if scalar else value


def is_image(value: Any) -> bool:
    """Return whether a value is a Pillow image or an array of pixels."""
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim >= 2)


def encode_image(value: Any) -> bytes:
    """Encode a Pillow image, or pixels uint8 [H, W] or [H, W, 3], as PNG.

    Raises:
        InputError: An array has another shape or dtype, or an image has 32-bit values.
    """
    if isinstance(value, np.ndarray):
        gray = value.ndim == 2 or value.shape[-1] == 1
        if value.dtype != np.uint8 or not (gray or (value.ndim == 3 and value.shape[-1] == 3)):
            raise InputError(
                f"an image is an array {value.dtype} {value.shape}; it must be uint8 [height, "
                "width] or [height, width, 3]"
            )
        value = Image.fromarray(value.reshape(value.shape[:2]) if gray else value)
    check_mode(value, "an image")
    try:
        value = turn_upright(value)  # PNG would lose the orientation
        if value.mode.startswith("I;16"):  # otherwise Pillow would use this machine's byte order
            value = Image.fromarray(np.asarray(value).astype(np.uint16))
        elif value.mode not in _PNG_MODES:
            value = value.convert("RGBA" if value.has_transparency_data else "RGB")
        sink = io.BytesIO()
        value.save(sink, "PNG")
    except (OSError, ValueError) as error:
        raise InputError(f"an image cannot be read: {first_line(error)}") from error
    return sink.getvalue()


def _plain(table: pa.Table, image: str) -> pa.Table:
    """Normalize a table to one chunk and one type of text and bytes, and read its image files."""
    for name in table.column_names:
        number, values = table.column_names.index(name), table.column(name)
        if is_text(values.type) and name == image:
            values = pa.array(_read_files(values.to_pylist()), pa.large_binary())
        elif is_text(values.type):
            values = values.cast(pa.large_string())
        elif pa.types.is_binary(values.type):
            values = values.cast(pa.large_binary())
        table = table.set_column(number, name, values)
    # Equal values must have equal buffers: copy them, so that no buffer has an offset.
    return table.take(np.arange(len(table))).combine_chunks()


def _read_files(paths: Sequence[str | None]) -> list[bytes | None]:
    try:
        return [Path(path).expanduser().read_bytes() if path else None for path in paths]
    except OSError as error:
        raise InputError(f"image {error.filename!r} cannot be read: {error.strerror}") from error
