"""The datasets known by name, and their preparation into a cache folder.

A prepared dataset lies in ``<cache>/data/<name>-<key>/``, the key being a hash of what decides its
rows: the format version and the source's files. Files are written beside and renamed; the first
process to take the folder's lock prepares, the others wait and read.
"""

import hashlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

import numpy as np
from filelock import FileLock

from trishul_ray.data.base import FORMAT_VERSION, DatasetInfo, PreparedDataset, write_split
from trishul_ray.data.cifar import CIFAR10, CIFAR100
from trishul_ray.data.digits import Digits
from trishul_ray.errors import CorruptFileError, InputError

#: ``progress(stage, fraction)``: what is being done, and how far it is, 0..1.
Progress = Callable[[str, float], None]


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

    def key(self, hub: Path | None) -> str:
        """Text that changes whenever the rows may."""
        ...

    def read(
        self, hub: Path | None, progress: Progress
    ) -> tuple[DatasetInfo, Mapping[str, Mapping[str, np.ndarray]]]:
        """The description, and every split's columns [N, ...]."""
        ...


_SOURCES: dict[str, Source] = {source.name: source for source in (Digits(), CIFAR10, CIFAR100)}


def dataset_names() -> tuple[str, ...]:
    """Names that :func:`prepare` knows, sorted."""
    return tuple(sorted(_SOURCES))


def describe_datasets() -> dict[str, str]:
    """One line on each dataset, by name."""
    return {name: _SOURCES[name].description for name in dataset_names()}


def prepare(
    name: str, *, cache: Path, hub: Path | None, progress: Progress | None = None
) -> PreparedDataset:
    """The dataset ``name`` as memory-mapped files, prepared now or found in ``cache``.

    A prepared file that is missing, unreadable or not the bytes that were written is prepared
    again. Safe when several processes of one machine (or of a shared file system with locks)
    call it at once.

    Args:
        name: one of :func:`dataset_names`.
        cache: folder for prepared files.
        hub: a local mirror with the hub's layout, asked before the hub itself.
        progress: told of the stage and the fraction done.

    Raises:
        InputError: unknown name, or the dataset cannot be had; says where it was looked for.
        CorruptFileError: the source itself is malformed; names file, row and fault.
    """
    source = _SOURCES.get(name)
    if source is None:
        near = get_close_matches(name, _SOURCES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"data.name={name!r} is unknown; known: {', '.join(_SOURCES)}{hint}")
    if hub is not None and not hub.is_dir():
        raise InputError(f"mirror {hub} (storage.hub or TRISHUL_HUB) is not a folder")
    key = hashlib.sha256(f"{FORMAT_VERSION}\n{source.key(hub)}".encode()).hexdigest()[:12]
    folder = cache / "data" / f"{name}-{key}"
    make_cache_folder(folder)
    prepared = PreparedDataset(folder, source.splits)
    with FileLock(folder / "lock"):
        if not _is_sound(prepared):
            info, columns = source.read(hub, progress or _silent)
            for split in source.splits:
                write_split(folder / f"{split}.arrow", columns[split], info)
            prepared = PreparedDataset(folder, source.splits)
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
