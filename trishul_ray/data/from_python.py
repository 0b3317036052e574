"""Rows that are passed from Python: stored once in the cache, in a folder named by their content.

They may be a Hugging Face ``Dataset`` or ``DatasetDict``, a table of pandas or Arrow, a list of
dictionaries, a dictionary of columns, or a dictionary of splits of any of these
(``{"train": rows, "test": rows}``). Images are encoded bytes, paths, arrays uint8 [H, W] or
[H, W, 3], or Pillow images.

In the cache they are Parquet files, which every worker and a later command can read. Their name is
a hash of the values, so the same rows are the same dataset, whatever they were passed as.
"""

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
import pyarrow.parquet as pq
from PIL import Image

from trishul_ray.data.cleaning import check_unique
from trishul_ray.data.custom import PASSED, ROWS
from trishul_ray.data.hub import class_names
from trishul_ray.data.images import turn_upright
from trishul_ray.data.tables import is_text, to_array
from trishul_ray.errors import InputError
from trishul_ray.files import complete_folder, remove_unused

#: The splits of passed rows, and the names that may stand for the test split.
_SPLITS = {"train": "train", "test": "test", "validation": "test"}


def store_rows(rows: Any, cache: Path, columns: Mapping[str, str]) -> Path:
    """Write rows into the cache, unless they are there, and return their folder.

    Args:
        rows: See the top of this file.
        cache: The cache folder.
        columns: ``data.columns``.

    Raises:
        InputError: This is no table of rows.
    """
    image = columns.get("image", "image")
    tables = {split: _with_image_bytes(table, image) for split, table in to_splits(rows).items()}
    folder = cache / ROWS / content_of(tables).removeprefix("sha256:")
    if folder.is_dir():
        os.utime(folder)
    else:
        remove_unused_rows(cache)
        try:
            with complete_folder(folder) as temporary:
                for split, table in tables.items():
                    pq.write_table(table, temporary / f"{split}.parquet")
        except OSError:
            if not folder.is_dir():  # another process may have been faster
                raise
    return folder


def remove_unused_rows(cache: Path) -> list[Path]:
    """Remove rows that nobody has passed for a month from a cache, and return their folders."""
    return remove_unused((cache / ROWS).glob("*"))


def content_of(tables: Mapping[str, pa.Table]) -> str:
    """Return a hash of the splits' columns, class names and values, as ``sha256:<hex>``."""
    digest = hashlib.sha256()
    for split, table in sorted(tables.items()):
        names = [(name, class_names(table, name)) for name in table.column_names]
        digest.update(json.dumps([split, names]).encode())
        for batch in table.to_batches(max_chunksize=1000):
            for row in batch.to_pylist():  # one by one: batches end where the rows' chunks do
                text = json.dumps(row, sort_keys=True, default=_as_json)
                digest.update(f"{text}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def _as_json(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def to_splits(rows: Any) -> dict[str, pa.Table]:
    """Return the tables of ``train`` and, if there is one, ``test``.

    Raises:
        InputError: This is no table of rows, or there is no train split.
    """
    if not (isinstance(rows, Mapping) and rows and set(rows) <= set(_SPLITS)):
        return {"train": to_table(rows)}
    if "train" not in rows:
        raise InputError(f"the rows have the splits {', '.join(rows)}; a train split is needed")
    tables = {}
    for name in ("train", "validation", "test"):  # a test split replaces a validation split
        if name in rows:
            tables[_SPLITS[name]] = to_table(rows[name])
    return tables


def to_table(rows: Any) -> pa.Table:
    """Return rows as one Arrow table; images become encoded bytes.

    Raises:
        InputError: This is no table of rows.
    """
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
    plain = [encode_image(v) if is_image(v) else _plain(v) for v in values]
    return to_array(plain, PASSED, column)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def is_image(value: Any) -> bool:
    """Return whether this is a Pillow image or an array of pixels."""
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim >= 2)


def encode_image(value: Any) -> bytes:
    """Return a Pillow image, or pixels uint8 [H, W] or [H, W, 3], as a PNG file.

    Raises:
        InputError: It is an array of another shape or type.
    """
    if isinstance(value, np.ndarray):
        gray = value.ndim == 2 or value.shape[-1] == 1
        if value.dtype != np.uint8 or not (gray or (value.ndim == 3 and value.shape[-1] == 3)):
            raise InputError(
                f"an image is an array {value.dtype} {value.shape}; it must be uint8 [height, "
                "width] or [height, width, 3]"
            )
        value = Image.fromarray(value.reshape(value.shape[:2]) if gray else value)
    sink = io.BytesIO()
    turn_upright(value).save(sink, "PNG")  # a PNG file would lose the orientation
    return sink.getvalue()


def _of_huggingface(rows: Any) -> pa.Table:
    """Return a ``datasets.Dataset`` as a table; its images as bytes, its class names kept."""
    import datasets
    from datasets.table import embed_table_storage

    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
    table = rows.with_format("arrow")[:]
    # Selected and shuffled rows lose the description of the columns on the way.
    table = table.replace_schema_metadata(rows.features.arrow_schema.metadata)
    return embed_table_storage(table)


def _with_image_bytes(table: pa.Table, column: str) -> pa.Table:
    """Replace paths of images by the files' bytes: a folder in the cache must not refer to them."""
    if column not in table.column_names or not is_text(table.schema.field(column).type):
        return table
    paths = table.column(column).to_pylist()
    try:
        # A row without a path is refused with all others that lack something.
        files = [Path(path).expanduser().read_bytes() if path else None for path in paths]
        images = pa.array(files, pa.large_binary())
    except OSError as error:
        raise InputError(f"image {error.filename!r} cannot be read: {error.strerror}") from error
    return table.set_column(table.column_names.index(column), column, images)
