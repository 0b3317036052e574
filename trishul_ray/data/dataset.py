"""Prepared datasets: one memory-mapped Arrow file per split, with a description of the rows.

Legend of shapes: N rows, C channels, H x W pixels, b rows of a batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.storage.durable import Json, complete_file

#: Part of every prepared file's key; increment it when the file format changes.
FORMAT_VERSION = 5

#: Key of the description in the metadata of the Arrow schema.
_META = b"trishul"

#: Kind of the rows; see :class:`DatasetInfo`.
Kind = Literal["image", "text", "qa", "instruction"]

#: Kinds of rows that have a label.
LABELED: tuple[Kind, ...] = ("image", "text")

#: Scored splits: the test rows, and the rows held out of the training rows.
ScoredSplit = Literal["test", "validation"]

#: Name of a scored set of rows: a :data:`ScoredSplit`, or a set that a stage adds.
RowSet: TypeAlias = str

#: A column to write: numbers [N, ...], or N texts.
Column: TypeAlias = "np.ndarray | pa.StringArray"

#: Columns keyed by canonical name; see :class:`DatasetInfo`.
Columns: TypeAlias = dict[str, Column]

#: Columns keyed by split.
Splits: TypeAlias = Mapping[str, Columns]

#: Called as ``progress(stage, fraction)`` during long work; the completed fraction is in [0, 1].
ProgressCallback = Callable[[str, float], None]


@dataclass(frozen=True)
class Origin:
    """Source of a dataset's rows, and the changes to them.

    Attributes:
        kind: Hub, mirror of the hub, user files, rows passed from Python, or generated rows.
        name: Repository, path, or generator.
        revision: Commit of the repository, or None if unknown.
        notes: Changed and skipped rows, for reports.
    """

    kind: Literal["hub", "mirror", "file", "python", "generated"]
    name: str
    revision: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((self.place, *self.notes))

    @property
    def place(self) -> str:
        """Kind, name and revision."""
        return f"{self.kind}:{self.name}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a dataset, stored as JSON in every prepared file.

    The columns depend on the kind:

    - ``image``: ``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N].
    - ``text``: the columns of ``fields`` as strings, and ``label``.
    - ``qa``: ``question``, ``context`` and ``answers`` (a JSON list of texts) as strings.
    - ``instruction``: the columns of ``fields`` as strings, with ``output`` unless they are
      ``messages`` (a JSON list of objects ``role`` and ``content`` that ends with the answer). If
      rows have several right answers, ``references`` is a JSON list of the further ones.

    Every kind may also have ``group`` int64 [N] (an index into ``groups``) and ``client`` int64 [N]
    (the client of the row, for a natural partition).

    Attributes:
        name: Name of the dataset in the registry.
        kind: Kind of the rows.
        classes: Class names; empty for ``qa`` and ``instruction``.
        groups: Names of sub-datasets (MRQA) or of parts of the test rows (MNLI); may be empty.
        fields: Text columns in reading order; only for ``text`` and for ``instruction``, whose
            fields are ``instruction`` and an optional ``input``, or ``messages``.
        image_shape: (C, H, W); only for ``image``, like ``mean`` and ``std``.
        mean: Mean per channel of pixels / 255 over the first split.
        std: Standard deviation per channel over the first split.
        clients: Names of the natural clients, indexed by the column ``client``; may be empty.
        skipped: Names of the skipped rows.
        doubt: Reason that the labels cannot be classes, or an empty string.
        origin: Source of the rows.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    image_shape: tuple[int, int, int] = (0, 0, 0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    clients: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    doubt: str = ""
    origin: Origin = Origin("generated", "rows")

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DatasetInfo:
        """Build the description from the JSON of its ``asdict``."""
        return cls(**_tuples(fields) | {"origin": Origin(**_tuples(fields["origin"]))})


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def score_name(metric: str, rows: RowSet) -> str:
    """Return the name of a metric on a set of rows, such as ``validation_accuracy``.

    Scores of the test rows have no prefix.
    """
    return metric if rows == "test" else f"{rows}_{metric}"


def fingerprint(columns: Mapping[str, Column]) -> str:
    """Compute the hex SHA-256 of names, dtypes, shapes and bytes of ``columns``, in name order."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        column = columns[name]
        if isinstance(column, pa.Array):
            digest.update(repr((name, "text", len(column))).encode())
            for part in _text_buffers(column):
                digest.update(part)
        else:
            array: np.ndarray = np.ascontiguousarray(column)
            digest.update(repr((name, array.dtype.str, array.shape)).encode())
            digest.update(array.data)
    return digest.hexdigest()


def _text_buffers(column: pa.StringArray) -> tuple[memoryview, memoryview]:
    """Return the offsets, int64 [N + 1], and the UTF-8 bytes of a column without nulls."""
    if column.null_count or column.type != pa.large_string():
        raise ValueError("a column of texts must be large_string without nulls")
    if column.offset:
        column = pa.concat_arrays([column, pa.array([], pa.large_string())])
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64, len(column) + 1) if offsets else np.zeros(1, np.int64)
    return ends.data, memoryview(data or b"")[: int(ends[-1])]


def write_split(path: Path, columns: Mapping[str, Column], info: DatasetInfo) -> None:
    """Write ``columns`` to ``path`` atomically."""
    columns = {
        name: column.cast(pa.large_string()) if isinstance(column, pa.Array) else column
        for name, column in columns.items()
    }
    stored = {name: _stored(column) for name, column in columns.items()}
    meta = {"info": asdict(info), "fingerprint": fingerprint(columns)}
    fields = [pa.field(name, values.type, nullable=False) for name, values in stored.items()]
    schema = pa.schema(fields, metadata={_META: json.dumps(meta).encode()})
    batch = pa.record_batch(list(stored.values()), schema=schema)
    with (
        complete_file(path) as new,
        pa.OSFile(str(new), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        writer.write_batch(batch)


def _stored(column: Column) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    array: np.ndarray = np.ascontiguousarray(column)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(array) if array.ndim > 1 else pa.array(array)


def _numbers(values: pa.Array) -> np.ndarray:
    """View numbers as a read-only array [N]; ``to_numpy`` would import pandas in every worker."""
    kind, is_a = values.type, pa.types
    sort = "f" if is_a.is_floating(kind) else "u" if is_a.is_unsigned_integer(kind) else "i"
    dtype = np.dtype(f"{sort}{kind.bit_width // 8}")
    if not len(values):
        return np.empty(0, dtype)
    view: np.ndarray = np.frombuffer(values.buffers()[1], dtype)
    return view[values.offset : values.offset + len(values)]


class Split:
    """The rows of a split: a file of :func:`write_split` that is mapped on first use.

    A pickle contains only the path, and the receiving process maps the file itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def __reduce__(self) -> tuple[type[Split], tuple[Path]]:
        return (Split, (self.path,))

    @cached_property
    def _batch(self) -> pa.RecordBatch:
        if not self.path.is_file():
            raise InputError(
                f"prepared data {self.path} is not on this machine; set storage.cache to a folder "
                "that every node of the cluster can read"
            )
        return pa.ipc.open_file(pa.memory_map(str(self.path))).get_batch(0)

    @cached_property
    def _meta(self) -> Json:
        return dict(json.loads(self._batch.schema.metadata[_META]))

    @cached_property
    def info(self) -> DatasetInfo:
        return DatasetInfo.from_json(self._meta["info"])

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the rows, recorded when they were written."""
        return str(self._meta["fingerprint"])

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._batch.schema.names)

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @cached_property
    def _columns(self) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        for name, values in zip(self.columns, self._batch.columns, strict=True):
            if pa.types.is_large_string(values.type):
                columns[name] = values
            elif isinstance(values, pa.FixedShapeTensorArray):
                rows = _numbers(values.storage.values).reshape(-1, *values.type.shape)
                columns[name] = rows[values.offset : values.offset + len(values)]
            else:
                columns[name] = _numbers(values)
        return columns

    def column(self, name: str) -> np.ndarray:
        """Return a numeric column as a read-only view [N, ...]."""
        values = self._columns[name]
        assert isinstance(values, np.ndarray)
        return values

    def texts(self, name: str) -> pa.LargeStringArray:
        """Return a text column [N], backed by the mapped file."""
        return self._columns[name]

    def read(self) -> dict[str, Column]:
        """Return all columns for :func:`write_split`, backed by the mapped file."""
        return dict(self._columns)

    @property
    def labels(self) -> np.ndarray:
        """The labels, a read-only view int64 [N]."""
        return self.column("label")

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Copy the rows at ``indices`` (integers [b], each in 0..N-1), in that order.

        Every numeric column becomes a tensor [b, ...] of the same dtype.
        """
        numbers = {k: v for k, v in self._columns.items() if not isinstance(v, pa.Array)}
        return {name: torch.from_numpy(view[indices]) for name, view in numbers.items()}


@dataclass(frozen=True)
class PreparedDataset:
    """A folder with ``<split>.arrow`` for every split, e.g. ``("pretrain", "train", "test")``.

    A pickle contains only paths, and files are mapped on first use.
    """

    folder: Path
    split_names: tuple[str, ...]

    def __getstate__(self) -> dict[str, object]:
        # Omit the mapped splits.
        return {"folder": self.folder, "split_names": self.split_names}

    @cached_property
    def _splits(self) -> dict[str, Split]:
        return {name: Split(self.folder / f"{name}.arrow") for name in self.split_names}

    def split(self, name: str) -> Split:
        return self._splits[name]

    @property
    def train(self) -> Split:
        """The rows of the clients."""
        return self.split("train")

    @property
    def test(self) -> Split:
        return self.split("test")

    @property
    def info(self) -> DatasetInfo:
        return self.train.info

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over the fingerprints of all splits, in order."""
        parts = [f"{name}:{self.split(name).fingerprint}" for name in self.split_names]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def join(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Concatenate the columns [N_i, ...] of consecutive parts to [sum of N_i, ...]."""
    joined: dict[str, Column] = {}
    for name, first in parts[0].items():
        columns: list[Any] = [part[name] for part in parts]
        if not isinstance(first, pa.Array):
            joined[name] = np.concatenate(columns)
            continue
        joined[name] = pa.concat_arrays(columns)
    return joined


def length(columns: Mapping[str, Column]) -> int:
    """Return the number of rows N of columns [N, ...]."""
    return len(next(iter(columns.values())))


def count_test_rows(total: int, share: float) -> int:
    """Return the number of test rows for a fraction ``share`` of ``total`` >= 2 rows."""
    return min(total - 1, max(1, round(share * total)))


def split_off_test(
    columns: Mapping[str, Column], share: float, where: str
) -> dict[str, dict[str, Column]]:
    """Split rows into ``train`` and a fraction ``share`` for ``test``, each with at least one row.

    The stream ``numpy_rng(0, "test-share")`` selects the rows, so they are the same in every
    experiment. Rows keep their order.

    Raises:
        InputError: There are fewer than two rows; the message contains ``where``.
    """
    total = length(columns)
    if total < 2:
        rows = "1 row" if total == 1 else f"{total} rows"
        raise InputError(f"data.test_share={share}: the {rows} of {where} cannot be split")
    count = count_test_rows(total, share)
    order = numpy_rng(0, "test-share").permutation(total)
    rows_by_split = {"train": np.sort(order[count:]), "test": np.sort(order[:count])}
    return {split: take_rows(columns, rows) for split, rows in rows_by_split.items()}


def take_rows(columns: Mapping[str, Column], rows: np.ndarray) -> Columns:
    """Select the rows [n] of all columns, in this order."""
    return {
        name: column.take(pa.array(rows)) if isinstance(column, pa.Array) else column[rows]
        for name, column in columns.items()
    }
