"""Look up a dataset by name and prepare it in a cache folder, as raw rows or encoded for a task.

Prepared files are in ``<cache>/data/<name>-<key>/``; the key is a hash of everything that decides
the rows: the format version and the source's files. Files are written to a temporary name and then
renamed. The first process to lock the folder prepares the files; the others wait and read them.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from filelock import FileLock

from trishul_ray import plugins
from trishul_ray.data.cache import LOCK, remove_leftovers
from trishul_ray.data.custom import CUSTOM
from trishul_ray.data.datasets import FAULTS, PUBLIC
from trishul_ray.data.datasets.digits import Digits
from trishul_ray.data.datasets.synthetic import SYNTHETIC
from trishul_ray.data.hub import ON_HUB
from trishul_ray.data.partition import draw_held_out
from trishul_ray.data.prepared import (
    FORMAT_VERSION,
    Column,
    DatasetInfo,
    PreparedDataset,
    ProgressCallback,
    Split,
    write_split,
)
from trishul_ray.data.public import PublicDataset
from trishul_ray.data.tables import take_rows
from trishul_ray.errors import CorruptFileError, InputError, did_you_mean
from trishul_ray.files import make_cache_folder, stamp

if TYPE_CHECKING:
    from trishul_ray.config import DataConfig

#: The description of a dataset, and the columns [N, ...] of every split.
_Contents = tuple[DatasetInfo, Mapping[str, Mapping[str, Column]]]


class Source(Protocol):
    """Where the rows of a dataset come from."""

    @property
    def name(self) -> str:
        """Name in the registry."""

    @property
    def description(self) -> str:
        """One line for the list of datasets."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that :meth:`read` returns."""

    @property
    def official(self) -> Mapping[str, int] | None:
        """Published numbers of ``train`` and ``test`` rows; None for the user's own data."""

    def key(self, hub: Path | None) -> str:
        """Return a text that changes whenever the rows may change.

        It begins with :data:`~trishul_ray.data.hub.ON_HUB` if :meth:`read` would download them.
        """

    def read(self, hub: Path | None, progress: ProgressCallback) -> _Contents:
        """Return the description, and the columns of every split; see ``DatasetInfo``."""


_FOUND: tuple[Source, ...] = (Digits(), *PUBLIC, *SYNTHETIC)
_OWN: dict[str, Source] = {source.name: source for source in _FOUND}


def _sources() -> dict[str, Source]:
    """Return the sources of the package and of plug-ins, by name.

    Raises:
        InputError: A plug-in's dataset has a name that is taken.
    """
    sources = dict(_OWN)
    for plugin, found in plugins.contents(PublicDataset):
        if sources.get(found.name) is found:  # imported from where it is defined
            continue
        if found.name in sources or found.name in CUSTOM:
            raise InputError(
                f"plug-in {plugin.name}: its dataset is named {found.name!r}, which is taken"
            )
        sources[found.name] = found
        plugins.note_dataset(found.name, plugin)
    return sources


def dataset_names() -> tuple[str, ...]:
    """Return the names that :func:`prepare` accepts: public datasets, own data, synthetic ones."""
    synthetic = [source.name for source in SYNTHETIC]
    return (*sorted(_sources().keys() - synthetic), *CUSTOM, *synthetic)


def dataset_faults() -> tuple[str, ...]:
    """Return the files of datasets and the plug-ins that could not be loaded, one line each."""
    return (*FAULTS, *plugins.faults())


def describe_datasets() -> dict[str, str]:
    """Return one line on each dataset, by name."""
    sources = _sources()
    return {name: (sources.get(name) or CUSTOM[name]).description for name in dataset_names()}


def official_rows(name: str) -> Mapping[str, int] | None:
    """Return the published numbers of ``train`` and ``test`` rows; None for the user's own data."""
    source = _sources().get(name)
    return None if source is None else source.official


def prepare(
    data: "DataConfig | str",
    *,
    cache: Path,
    hub: Path | None,
    progress: ProgressCallback | None = None,
    download: bool = True,
) -> PreparedDataset:
    """Return a dataset as memory-mapped files, prepared now or before.

    A prepared file that is missing or damaged is prepared again. Several processes of one machine,
    or of a shared file system with locks, may call this at the same time.

    Args:
        data: the data section of an experiment, or the name of a public dataset.
        cache: folder for prepared files.
        hub: local mirror with the hub's layout, searched before the hub; None for no mirror.
        progress: called with the stage and the fraction done.
        download: whether to download rows that are on the hub alone.

    Raises:
        InputError: the name is unknown, or the dataset was not found; names the places searched.
        CorruptFileError: the source is malformed; names file, row and fault.
    """
    source = find_source(data)
    if hub is not None and not hub.is_dir():
        raise InputError(f"mirror {hub} (storage.hub or TRISHUL_HUB) is not a folder")
    report = progress or (lambda stage, fraction: None)
    key = source.key(hub)

    def contents() -> _Contents:
        if not download and key.startswith(ON_HUB):
            raise InputError(f"dataset {source.name} is not on this machine")
        return source.read(hub, report)

    return _read_or_write(cache, source.name, key, source.splits, contents)


def find_source(data: "DataConfig | str") -> Source:
    """Return where the rows of a dataset come from, without reading them.

    Raises:
        InputError: the name is unknown, or the other fields of ``data`` do not fit it.
    """
    name = data if isinstance(data, str) else data.name
    if name in CUSTOM:
        if isinstance(data, str):
            return CUSTOM[name](None, {}, 0.2)
        return CUSTOM[name](data.path, data.columns, data.test_share, data.skip_broken)
    sources = _sources()
    if name not in sources:
        known = dataset_names()
        hint = did_you_mean(name, known) + "".join(f"; {fault}" for fault in dataset_faults())
        raise InputError(f"data.name={name!r} is unknown; known: {', '.join(known)}{hint}")
    if not isinstance(data, str) and (data.path is not None or data.columns or data.skip_broken):
        field = "path" if data.path is not None else "columns" if data.columns else "skip_broken"
        raise InputError(
            f"data.{field} is for your own data (dataset {', '.join(CUSTOM)}), not dataset {name}"
        )
    return sources[name]


def _read_or_write(
    cache: Path, name: str, key: str, splits: tuple[str, ...], contents: Callable[[], _Contents]
) -> PreparedDataset:
    """Return the prepared files; write ``contents()`` first if they are missing or damaged."""
    digest = hashlib.sha256(f"{FORMAT_VERSION}\n{key}".encode()).hexdigest()[:12]
    folder = cache / "data" / f"{name.replace('/', '-')}-{digest}"
    make_cache_folder(folder)
    prepared = PreparedDataset(folder, splits)
    with FileLock(folder / LOCK):
        (folder / LOCK).touch()
        if not _is_intact(prepared):
            if name.removesuffix("-encoded").removesuffix("-validation") in CUSTOM:
                remove_leftovers(cache)
            info, columns = contents()
            for split in splits:
                write_split(folder / f"{split}.arrow", columns[split], info)
            prepared = PreparedDataset(folder, splits)  # without the splits opened above
    return prepared


#: Prepared files that this process has verified, as they were then.
_verified: set[tuple[Path, tuple[int, ...]]] = set()


def _is_intact(prepared: PreparedDataset) -> bool:
    splits = [prepared.split(name) for name in prepared.split_names]
    if not all(split.path.is_file() for split in splits):
        return False
    try:
        for split in splits:
            # Hashing all rows again for every run of a sweep would take seconds.
            state = (split.path, stamp(split.path))
            if state not in _verified:
                split.verify()
                _verified.add(state)
    except CorruptFileError:
        return False
    return True


def hold_out(dataset: PreparedDataset, share: float, *, cache: Path) -> PreparedDataset:
    """Return ``dataset`` with a ``share`` of its training rows as the split ``validation``.

    The rows are drawn from the data alone (:func:`~trishul_ray.data.partition.draw_held_out`), in
    equal shares from every client where the rows have a client column, and otherwise from every
    class or sub-dataset. Rows with the same inputs are held out together. Nothing is done for a
    share of 0.

    Raises:
        InputError: there are too few rows to hold out any.
    """
    if not share:
        return dataset
    info, train = dataset.info, dataset.train

    def divide() -> _Contents:
        names = [name for name in ("client", "label", "group") if name in train.columns]
        strata = train.column(names[0]) if names else np.zeros(len(train), np.int64)
        held = draw_held_out(_number_inputs(train), strata, share, train.fingerprint)
        if not held.any():
            raise InputError(
                f"data.validation_share={share}: {len(train)} training rows are too few to hold "
                "out any; set a larger share"
            )
        columns = {name: dataset.split(name).read() for name in dataset.split_names}
        for name, rows in (("validation", held), ("train", ~held)):
            kept = np.flatnonzero(rows)
            columns[name] = {key: take_rows(c, kept) for key, c in train.read().items()}
        return info, columns

    key = f"{dataset.fingerprint}\n{share!r}"
    splits = (*dataset.split_names, "validation")
    return _read_or_write(cache, f"{info.name}-validation", key, splits, divide)


def _number_inputs(split: Split) -> np.ndarray:
    """Number the different inputs of a split: rows with the same one have the same number [N]."""
    if split.info.kind == "image":
        keys = [hashlib.sha256(row).digest() for row in split.column("pixels")]
        return np.unique(np.array(keys), return_inverse=True)[1]
    fields = split.info.fields or ("question", "context")
    columns = [split.texts(name).dictionary_encode().indices.to_numpy() for name in fields]
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


class Encoder(Protocol):
    """Converts the texts of a split into columns of numbers."""

    @property
    def key(self) -> str:
        """Text that changes whenever an encoded number may change: tokenizer, lengths, prompt."""

    def encode(self, split: Split, progress: Callable[[float], None]) -> Mapping[str, np.ndarray]:
        """Return columns of numbers [N, ...] made from the texts."""


def encode(
    dataset: PreparedDataset,
    encoder: Encoder,
    *,
    cache: Path,
    progress: ProgressCallback | None = None,
) -> PreparedDataset:
    """Return ``dataset`` with its texts encoded, prepared now or before.

    The columns ``label``, ``group`` and ``client`` are copied. See :func:`prepare` for ``cache``
    and ``progress``.
    """
    info, splits = dataset.info, dataset.split_names

    def encode_splits() -> _Contents:
        columns = {}
        for name in splits:
            split = dataset.split(name)

            def report(done: float, name: str = name) -> None:
                if progress is not None:
                    progress(f"encoding {info.name} {name}", done)

            columns[name] = dict(encoder.encode(split, report)) | {
                column: np.array(split.column(column))
                for column in ("label", "group", "client")
                if column in split.columns
            }
        return info, columns

    key = f"{dataset.fingerprint}\n{encoder.key}"
    return _read_or_write(cache, f"{info.name}-encoded", key, splits, encode_splits)
