"""What a dataset says of itself. Shapes: N rows, C channels, H x W pixels."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from trishul_ray.errors import CorruptFileError, InputError

#: What a dataset's rows are: see :class:`DatasetInfo`.
Kind = Literal["image", "text", "qa"]


@dataclass(frozen=True)
class DatasetInfo:
    """What a dataset says of itself; stored as JSON in every prepared file.

    Columns by kind. ``image``: ``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N]. ``text``:
    the columns of ``fields`` as strings, and ``label``. ``qa``: ``question``, ``context`` and
    ``answers`` (a JSON list of texts) as strings. Any of them may also have ``group`` int64 [N]
    (an index into ``groups``) and ``client`` int64 [N] (who holds the row, for a natural
    partition).

    Attributes:
        name: the dataset's name in the registry.
        kind: what its rows are.
        source: where the rows came from, for people.
        classes: class names; their number is the number of classes. Empty for ``qa``.
        groups: names of sub-datasets (MRQA) or of parts of the test rows (MNLI); may be empty.
        fields: text columns in reading order; ``text`` only.
        image_shape: (C, H, W); ``image`` only, as are the two below.
        mean: per channel, of pixels / 255 over the first split.
        std: per channel, likewise.
    """

    name: str
    kind: Kind
    source: str
    classes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    image_shape: tuple[int, int, int] = (0, 0, 0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` reads them back."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DatasetInfo":
        """Inverse of :meth:`to_json`."""
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**fields)


#: Part of every prepared file's key: raise it when the layout below changes.
FORMAT_VERSION = 2


_META = b"trishul"


#: A column to write: numbers [N, ...], or N texts.
Column: TypeAlias = "np.ndarray | pa.StringArray"


def fingerprint(columns: Mapping[str, Column]) -> str:
    """Hex SHA-256 of names, dtypes, shapes and bytes of ``columns``, in name order."""
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
    """Offsets int64 [N + 1] and UTF-8 bytes of a column of texts without nulls."""
    if column.null_count or column.type != pa.large_string():
        raise ValueError("a column of texts must be large_string without nulls")
    if column.offset:
        column = pa.concat_arrays([column, pa.array([], pa.large_string())])
    _, offsets, data = column.buffers()
    places = np.frombuffer(offsets, np.int64, len(column) + 1) if offsets else np.zeros(1, np.int64)
    return places.data, memoryview(data or b"")[: int(places[-1])]


def write_split(path: Path, columns: Mapping[str, Column], info: DatasetInfo) -> None:
    """Write ``columns`` (numbers [N, ...] or texts [N]) beside ``path``, then rename into place."""
    columns = {
        name: column.cast(pa.large_string()) if isinstance(column, pa.Array) else column
        for name, column in columns.items()
    }
    fields, arrays = [], []
    for name, column in columns.items():
        if isinstance(column, pa.Array):
            fields.append(pa.field(name, column.type, nullable=False))
            arrays.append(column)
            continue
        values = pa.array(np.ascontiguousarray(column).reshape(-1))
        if column.ndim > 1:
            width = int(np.prod(column.shape[1:]))
            values = pa.FixedSizeListArray.from_arrays(values, width)
        shape = json.dumps(list(column.shape[1:]))
        fields.append(pa.field(name, values.type, nullable=False, metadata={"shape": shape}))
        arrays.append(values)
    meta = {"format": FORMAT_VERSION, "info": info.to_json(), "fingerprint": fingerprint(columns)}
    schema = pa.schema(fields, metadata={_META: json.dumps(meta).encode()})
    batch = pa.record_batch(arrays, schema=schema)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with pa.OSFile(str(beside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


class Split:
    """The rows of one split, opened lazily; a pickle carries the path alone.

    Args:
        path: a file written by :func:`write_split`.
    """

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is opened yet."""
        self.path = Path(path)

    def __reduce__(self) -> tuple[type["Split"], tuple[Path]]:
        """Pickle the path alone: another process maps the file itself."""
        return (Split, (self.path,))

    @cached_property
    def _batch(self) -> pa.RecordBatch:
        if not self.path.is_file():
            raise InputError(
                f"prepared data {self.path} is not on this machine: storage.cache must be a "
                "folder that every node of the cluster sees"
            )
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
            if reader.num_record_batches != 1:
                raise CorruptFileError(f"prepared data {self.path}: expected one record batch")
            return reader.get_batch(0)
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise CorruptFileError(f"prepared data {self.path} is unreadable: {reason}") from error

    @cached_property
    def _meta(self) -> dict[str, Any]:
        try:
            meta = json.loads((self._batch.schema.metadata or {})[_META])
        except (KeyError, ValueError) as error:
            raise CorruptFileError(
                f"prepared data {self.path} was not written by this platform"
            ) from error
        if meta["format"] != FORMAT_VERSION:
            raise CorruptFileError(
                f"prepared data {self.path} has format {meta['format']}, not {FORMAT_VERSION}"
            )
        return dict(meta)

    @cached_property
    def info(self) -> DatasetInfo:
        """The dataset's description."""
        return DatasetInfo.from_json(self._meta["info"])

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the rows, as recorded when they were written."""
        return str(self._meta["fingerprint"])

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names."""
        return tuple(self._batch.schema.names)

    def __len__(self) -> int:
        """Number of rows N."""
        return int(self._batch.num_rows)

    @cached_property
    def _views(self) -> dict[str, np.ndarray]:
        views = {}
        for field in self._batch.schema:
            if pa.types.is_large_string(field.type):
                continue
            values = self._batch.column(field.name)
            try:
                shape = json.loads((field.metadata or {})[b"shape"])
                if pa.types.is_fixed_size_list(field.type):
                    values = values.flatten()
                view = values.to_numpy(zero_copy_only=True).reshape(len(self), *shape)
            except (KeyError, ValueError) as error:  # ArrowInvalid is a ValueError
                raise CorruptFileError(
                    f"prepared data {self.path}: column {field.name!r} is malformed"
                ) from error
            views[field.name] = view
        return views

    def column(self, name: str) -> np.ndarray:
        """Column ``name`` as a read-only view [N, ...] on the mapped file.

        Raises:
            InputError: no such column.
        """
        if name not in self._views:
            raise self._lacks(name, tuple(self._views))
        return self._views[name]

    def texts(self, name: str) -> pa.LargeStringArray:
        """Column ``name`` of texts [N], on the mapped file.

        Raises:
            InputError: no such column of texts.
        """
        if name not in self._texts:
            raise self._lacks(name, tuple(self._texts))
        return self._texts[name]

    @cached_property
    def _texts(self) -> dict[str, pa.LargeStringArray]:
        return {
            field.name: self._batch.column(field.name)
            for field in self._batch.schema
            if pa.types.is_large_string(field.type)
        }

    def _lacks(self, name: str, have: tuple[str, ...]) -> InputError:
        return InputError(f"no column {name!r} in {self.path}; it has {', '.join(have) or 'none'}")

    @property
    def labels(self) -> np.ndarray:
        """Labels, int64 [N]: a read-only view."""
        return self.column("label")

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Rows ``indices`` (integers [b], each in 0..N-1), copied out in that order.

        Returns:
            every column of numbers as a tensor of its own dtype: for images ``pixels`` uint8
            [b, C, H, W] and ``label`` int64 [b].

        Raises:
            IndexError: an index is negative or not below N.
        """
        rows = np.asarray(indices)
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"row indices must be in 0..{len(self) - 1} for {self.path}")
        return {name: torch.from_numpy(view[rows]) for name, view in self._views.items()}

    def verify(self) -> None:
        """Read every row and compare with the recorded fingerprint.

        Raises:
            CorruptFileError: the rows are not those that were written.
        """
        if fingerprint({**self._views, **self._texts}) != self.fingerprint:
            raise CorruptFileError(f"prepared data {self.path}: its bytes have changed")


@dataclass(frozen=True)
class PreparedDataset:
    """A dataset as its prepared files; pickles as paths, opens lazily in any process.

    Attributes:
        folder: holds ``<split>.arrow`` for every split.
        split_names: e.g. ``("pretrain", "train", "test")``.
    """

    folder: Path
    split_names: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        """Paths and names, without the splits that are open."""
        return {"folder": self.folder, "split_names": self.split_names}

    @cached_property
    def _splits(self) -> dict[str, Split]:
        return {name: Split(self.folder / f"{name}.arrow") for name in self.split_names}

    def split(self, name: str) -> Split:
        """The split called ``name``.

        Raises:
            InputError: the dataset has no such split.
        """
        if name not in self._splits:
            known = ", ".join(self.split_names)
            raise InputError(f"dataset in {self.folder} has no split {name!r}; it has {known}")
        return self._splits[name]

    @property
    def train(self) -> Split:
        """What the clients hold."""
        return self.split("train")

    @property
    def test(self) -> Split:
        """What is measured on."""
        return self.split("test")

    @property
    def info(self) -> DatasetInfo:
        """The dataset's description."""
        return self.train.info

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over the fingerprints of all splits, in order."""
        parts = [f"{name}:{self.split(name).fingerprint}" for name in self.split_names]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def verify(self) -> None:
        """Check every split's rows; see :meth:`Split.verify`."""
        for name in self.split_names:
            self.split(name).verify()


#: ``progress(stage, fraction)``.
Progress = Callable[[str, float], None]
