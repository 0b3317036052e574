"""The datasets known by name, and their preparation into a cache folder.

A prepared dataset lies in ``<cache>/data/<name>-<key>/``, the key being a hash of what decides its
rows: the format version and the source's files. Files are written beside and renamed; the first
process to take the folder's lock prepares, the others wait and read.
"""

import hashlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from filelock import FileLock

from trishul_ray.data.custom import CUSTOM
from trishul_ray.data.datasets import PUBLIC
from trishul_ray.data.datasets.digits import Digits
from trishul_ray.data.prepared import (
    FORMAT_VERSION,
    Column,
    DatasetInfo,
    PreparedDataset,
    Progress,
    Split,
    write_split,
)
from trishul_ray.errors import CorruptFileError, InputError

if TYPE_CHECKING:
    from trishul_ray.config import DataConfig


class Source(Protocol):
    """Where a dataset's rows come from."""

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    @property
    def description(self) -> str:
        """One line for people."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that :meth:`read` gives."""
        ...

    @property
    def official(self) -> Mapping[str, int] | None:
        """Published numbers of ``train`` and ``test`` rows; None for one's own data."""
        ...

    def key(self, hub: Path | None) -> str:
        """Text that changes whenever the rows may."""
        ...

    def read(
        self, hub: Path | None, progress: Progress
    ) -> tuple[DatasetInfo, Mapping[str, Mapping[str, Column]]]:
        """The description, and every split's columns [N, ...] (see ``DatasetInfo``)."""
        ...


_SOURCES: dict[str, Source] = {source.name: source for source in (Digits(), *PUBLIC)}


def dataset_names() -> tuple[str, ...]:
    """Names that :func:`prepare` knows: the public ones sorted, then those of one's own data."""
    return (*sorted(_SOURCES), *CUSTOM)


def describe_datasets() -> dict[str, str]:
    """One line on each dataset, by name."""
    return {
        name: _SOURCES[name].description if name in _SOURCES else CUSTOM[name].description
        for name in dataset_names()
    }


def official_rows(name: str) -> Mapping[str, int] | None:
    """Return the published numbers of ``train`` and ``test`` rows; None for one's own data."""
    return _SOURCES[name].official if name in _SOURCES else None


def prepare(
    data: "DataConfig | str", *, cache: Path, hub: Path | None, progress: Progress | None = None
) -> PreparedDataset:
    """A dataset as memory-mapped files, prepared now or found in ``cache``.

    A prepared file that is missing, unreadable or not the bytes that were written is prepared
    again. Safe when several processes of one machine (or of a shared file system with locks)
    call it at once.

    Args:
        data: which dataset, or the name of one that needs no more than its name.
        cache: folder for prepared files.
        hub: a local mirror with the hub's layout, asked before the hub itself.
        progress: told of the stage and the fraction done.

    Raises:
        InputError: unknown name, or the dataset cannot be had; says where it was looked for.
        CorruptFileError: the source itself is malformed; names file, row and fault.
    """
    source = _source(data)
    if hub is not None and not hub.is_dir():
        raise InputError(f"mirror {hub} (storage.hub or TRISHUL_HUB) is not a folder")
    tell = progress or _silent
    return in_cache(
        cache, source.name, source.key(hub), source.splits, lambda: source.read(hub, tell)
    )


def _source(data: "DataConfig | str") -> Source:
    """The source of a dataset.

    Raises:
        InputError: no such dataset, or one's own data without ``dataset=`` that reads them.
    """
    name = data if isinstance(data, str) else data.name
    if name in CUSTOM:
        if isinstance(data, str):
            return CUSTOM[name](None, {}, 0.2)
        return CUSTOM[name](data.path, data.columns, data.test_share)
    if name not in _SOURCES:
        known = dataset_names()
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"data.name={name!r} is unknown; known: {', '.join(known)}{hint}")
    if not isinstance(data, str) and (data.path is not None or data.columns):
        field = "path" if data.path is not None else "columns"
        raise InputError(
            f"data.{field} is for your own data (dataset {', '.join(CUSTOM)}), not dataset {name}"
        )
    return _SOURCES[name]


def in_cache(
    cache: Path,
    name: str,
    key: str,
    splits: tuple[str, ...],
    read: Callable[[], tuple[DatasetInfo, Mapping[str, Mapping[str, Column]]]],
) -> PreparedDataset:
    """The prepared files of ``name`` for what ``key`` says, from ``cache`` or from ``read()``.

    Args:
        cache: folder for prepared files.
        name: the folder's name begins with it.
        key: text that changes whenever the rows may.
        splits: what ``read`` gives.
        read: the description and every split's columns; called only where they are wanting.
    """
    digest = hashlib.sha256(f"{FORMAT_VERSION}\n{key}".encode()).hexdigest()[:12]
    folder = cache / "data" / f"{name.replace('/', '-')}-{digest}"
    make_cache_folder(folder)
    prepared = PreparedDataset(folder, splits)
    with FileLock(folder / "lock"):
        if not _is_sound(prepared):
            info, columns = read()
            for split in splits:
                write_split(folder / f"{split}.arrow", columns[split], info)
            prepared = PreparedDataset(folder, splits)
    return prepared


def make_cache_folder(folder: Path) -> None:
    """Create ``folder`` with its parents; an InputError where that is not allowed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"storage.cache: cannot create {folder}: {error.strerror}") from error


def _is_sound(prepared: PreparedDataset) -> bool:
    if not all(prepared.split(name).path.is_file() for name in prepared.split_names):
        return False
    try:
        prepared.verify()
    except CorruptFileError:
        return False
    return True


def _silent(stage: str, fraction: float) -> None:
    """Progress to nobody."""


class Encoder(Protocol):
    """Turns a split's texts into columns of numbers."""

    @property
    def key(self) -> str:
        """Text that changes whenever an encoded number may: tokenizer, lengths, prompt."""
        ...

    def encode(self, split: Split, progress: Callable[[float], None]) -> Mapping[str, np.ndarray]:
        """Columns [N, ...] of numbers; ``label``, ``group`` and ``client`` are carried over."""
        ...


def encode(
    dataset: PreparedDataset,
    encoder: Encoder,
    *,
    cache: Path,
    progress: Progress | None = None,
) -> PreparedDataset:
    """``dataset`` as ``encoder`` sees it; see the module.

    Args:
        dataset: with columns of texts.
        encoder: of the task that will train on it.
        cache: folder for prepared files.
        progress: told of the stage and the fraction done.
    """
    info, splits = dataset.info, dataset.split_names

    def read() -> tuple[DatasetInfo, dict[str, dict[str, np.ndarray]]]:
        columns = {}
        for name in splits:
            split = dataset.split(name)

            def tell(done: float, name: str = name) -> None:
                if progress is not None:
                    progress(f"encoding {info.name} {name}", done)

            columns[name] = dict(encoder.encode(split, tell)) | {
                column: np.array(split.column(column))
                for column in ("label", "group", "client")
                if column in split.columns
            }
        return info, columns

    key = f"{dataset.fingerprint}\n{encoder.key}"
    return in_cache(cache, f"{info.name}-encoded", key, splits, read)
