"""Rows passed from Python: as Arrow tables, and as files of the cache that workers read."""

import hashlib
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from trishul_ray.data.cleaning import check_unique, has_labels
from trishul_ray.data.columns import is_text, to_array, with_nfc_names
from trishul_ray.data.hub import class_names
from trishul_ray.data.images import check_mode, turn_upright
from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import datasets, pq
from trishul_ray.storage.durable import remove_unused
from trishul_ray.storage.integrity import discard_damaged, sealed_folder

#: Name of the dataset of rows passed from Python, and of their folder in the cache.
ROWS = "rows"

#: Name of these rows in messages.
PASSED = "the rows passed from Python"

#: The splits of passed rows, and those that they become; a test split replaces a validation split.
_SPLITS = {"train": "train", "validation": "test", "test": "test"}


def store_rows(rows: Any, cache: Path, columns: Mapping[str, str]) -> Path:
    """Write rows (see :func:`to_splits`) into the cache, unless they are there; return the folder.

    ``columns`` are ``data.columns``. The files are Parquet, which every worker and a later command
    can read. The folder is named by a hash of the values: the same rows are the same dataset,
    whatever they were passed as.
    """
    image = columns.get("image", "image")
    tables = {
        split: _with_image_bytes(table, image) for split, table in to_splits(rows, columns).items()
    }
    folder = cache / ROWS / _hash_of_tables(tables)
    discard_damaged(folder)
    if folder.is_dir():
        os.utime(folder)
        return folder
    remove_unused_rows(cache)
    try:
        with sealed_folder(folder) as temporary:
            for split, table in tables.items():
                pq.write_table(table, temporary / f"{split}.parquet")
    except OSError:
        if not folder.is_dir():  # another process may have been faster
            raise
    return folder


def remove_unused_rows(cache: Path) -> list[Path]:
    """Remove rows that nobody has passed for a month from a cache, and return their folders."""
    return remove_unused((cache / ROWS).glob("*"))


def _hash_of_tables(tables: Mapping[str, pa.Table]) -> str:
    """Return a hash of the splits' columns, class names and values."""

    def plain(value: Any) -> str:
        return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)

    digest = hashlib.sha256()
    for split, table in sorted(tables.items()):
        names = [(name, class_names(table, name)) for name in table.column_names]
        digest.update(json.dumps([split, names]).encode())
        for batch in table.to_batches(max_chunksize=1000):
            for row in batch.to_pylist():  # one by one: batches end where the rows' chunks do
                digest.update(f"{json.dumps(row, sort_keys=True, default=plain)}\n".encode())
    return digest.hexdigest()


def to_splits(rows: Any, columns: Mapping[str, str] | None = None) -> dict[str, pa.Table]:
    """Return the tables of ``train`` and, if there is one, ``test``, or raise an InputError.

    Rows are a table (see :func:`to_table`), or a dictionary of splits with a table each. A test
    split whose labels (``columns`` are ``data.columns``) are all -1 gives way to ``validation``.
    """
    if not (isinstance(rows, Mapping) and rows and set(rows) <= set(_SPLITS)):
        return {"train": to_table(rows)}
    if "train" not in rows:
        raise InputError(f"the rows have the splits {', '.join(rows)}; a train split is needed")
    splits: dict[str, pa.Table] = {}
    for name, split in _SPLITS.items():
        if name in rows:
            table = to_table(rows[name])
            if split not in splits or has_labels([(PASSED, table)], columns or {}):
                splits[split] = table
    return splits


def to_table(rows: Any) -> pa.Table:
    """Return rows as one Arrow table, or raise an InputError; images become encoded bytes.

    Rows are a Hugging Face ``Dataset``, a table of pandas or Arrow, a list of dictionaries, or a
    dictionary of columns. Images are encoded bytes, paths, arrays uint8 [H, W] or [H, W, 3], or
    Pillow images.
    """
    return with_nfc_names(_to_table(rows))


def _to_table(rows: Any) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if "datasets" in sys.modules and hasattr(rows, "with_format") and hasattr(rows, "features"):
        return _of_huggingface(rows)
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a table of pandas
        check_unique([str(name) for name in rows.columns], PASSED)
        rows = {str(name): list(rows[name]) for name in rows.columns}
    if isinstance(rows, Sequence | Mapping) and not isinstance(rows, str | bytes) and not rows:
        raise InputError(f"{PASSED}: there are none, the {type(rows).__name__} is empty")
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        names = dict.fromkeys(name for row in rows for name in row)
        rows = {name: [row.get(name) for row in rows] for name in names}
    if not isinstance(rows, Mapping):
        raise InputError(
            f"rows of type {type(rows).__name__}: pass a Hugging Face Dataset, a table of pandas "
            "or Arrow, a list of dictionaries, or a dictionary of columns"
        )
    arrays = {str(name): _array(values, str(name)) for name, values in rows.items()}
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name!r} {len(array)}" for name, array in arrays.items())
        raise InputError(f"{PASSED}: the columns have different numbers of rows ({lengths})")
    return pa.table(arrays)


def _array(values: Any, column: str) -> pa.Array:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        kind = type(values).__name__
        raise InputError(f"{PASSED}: column {column!r} is of type {kind}, not a list of values")
    plain = [encode_image(v) if is_image(v) else v for v in values]
    plain = [v.item() if isinstance(v, np.generic) else v for v in plain]
    return to_array(plain, PASSED, column)


def is_image(value: Any) -> bool:
    """Return whether this is a Pillow image or an array of pixels."""
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim >= 2)


def encode_image(value: Any) -> bytes:
    """Return a Pillow image, or pixels uint8 [H, W] or [H, W, 3], as a PNG file.

    An array of another shape or type is an InputError, as is an image of 32-bit numbers.
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
    if value.mode.startswith("I;16"):  # Pillow writes 16 bits in the byte order of this machine
        value = Image.fromarray(np.asarray(turn_upright(value)).astype(np.uint16))
    sink = io.BytesIO()
    turn_upright(value).save(sink, "PNG")  # a PNG file would lose the orientation
    return sink.getvalue()


def _of_huggingface(rows: Any) -> pa.Table:
    """Return a ``datasets.Dataset`` as a table; its images as bytes, its class names kept."""
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
    # Selected and shuffled rows lose the description of the columns on the way.
    metadata = rows.features.arrow_schema.metadata
    return datasets.table.embed_table_storage(
        rows.with_format("arrow")[:].replace_schema_metadata(metadata)
    )


def _with_image_bytes(table: pa.Table, column: str) -> pa.Table:
    """Replace paths of images by the files' bytes: a folder in the cache must not refer to them."""
    if column not in table.column_names or not is_text(table.schema.field(column).type):
        return table
    try:
        # A row without a path is refused with all others that lack something.
        paths = table.column(column).to_pylist()
        files = [Path(path).expanduser().read_bytes() if path else None for path in paths]
    except OSError as error:
        raise InputError(f"image {error.filename!r} cannot be read: {error.strerror}") from error
    images = pa.array(files, pa.large_binary())
    return table.set_column(table.column_names.index(column), column, images)
