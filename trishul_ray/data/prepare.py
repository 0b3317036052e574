"""Look up a dataset by name and prepare it in a cache folder, as raw rows or encoded for a task.

Prepared files are in ``<cache>/data/<name>-<key>/``; the key is a hash of everything that decides
the rows: the format version and the source's files. The first process to lock the folder prepares
the files and notes their checksums, by which they are checked before use; the others wait.
"""

import hashlib
import json
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from filelock import FileLock, Timeout

from trishul_ray.data.cleaning import SCORED
from trishul_ray.data.dataset import (
    FORMAT_VERSION,
    Column,
    DatasetInfo,
    PreparedDataset,
    ProgressCallback,
    Split,
    join,
    take_rows,
    write_split,
)
from trishul_ray.data.datasets.digits import Digits
from trishul_ray.data.datasets.synthetic import SYNTHETIC, SyntheticDataset
from trishul_ray.data.hub import ON_HUB
from trishul_ray.data.own import CUSTOM, CustomHubDataset, LocalImages, LocalTable
from trishul_ray.data.partition import draw_held_out
from trishul_ray.data.public import DATASETS, PublicDataset
from trishul_ray.errors import InputError, did_you_mean, join_limited
from trishul_ray.storage.durable import Json, make_cache_folder
from trishul_ray.storage.integrity import SEAL, fault_in, remark, seal

if TYPE_CHECKING:
    from trishul_ray.config.fields import DataConfig

#: The description of a dataset, and the columns [N, ...] of every split.
_Contents = tuple[DatasetInfo, Mapping[str, Mapping[str, Column]]]


#: Source of the rows of a dataset. Its ``key`` is a text that changes whenever the rows may
#: change; it begins with :data:`~trishul_ray.data.hub.ON_HUB` if ``read`` would download them.
Source = PublicDataset | SyntheticDataset | Digits | LocalImages | LocalTable | CustomHubDataset


#: The sources that come with the package.
_BUILT_IN: dict[str, Source] = {source.name: source for source in (Digits(), *SYNTHETIC)}
DATASETS.reserve([*_BUILT_IN, *CUSTOM])


def _sources() -> dict[str, Source]:
    """Return the public datasets of the package and of plug-ins, and the built-in ones, by name."""
    return {**_BUILT_IN, **DATASETS.all()}


def dataset_names() -> tuple[str, ...]:
    """Return the names that :func:`prepare` accepts: public datasets, own data, synthetic ones."""
    synthetic = [source.name for source in SYNTHETIC]
    return (*sorted(_sources().keys() - synthetic), *CUSTOM, *synthetic)


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

    ``data`` is that section of an experiment, or the name of a public dataset; ``hub`` a local
    mirror with the hub's layout, searched before the hub. Without ``download``, rows that are on
    the hub alone are missing.

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

    An unknown name is an InputError, as are fields of ``data`` that do not fit it.
    """
    name = data if isinstance(data, str) else data.name
    if name in CUSTOM:
        if isinstance(data, str):
            return CUSTOM[name](None, {}, 0.2)
        return CUSTOM[name](data.path, data.columns, data.test_share, data.skip_broken)
    sources = _sources()
    if name not in sources:
        raise InputError(DATASETS.unknown(name))
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
            if re.sub(rf"({_DERIVED})+$", "", name) in CUSTOM:
                remove_leftovers(cache)
            info, columns = contents()
            (folder / SEAL).unlink(missing_ok=True)
            for split in splits:
                write_split(folder / f"{split}.arrow", columns[split], info)
            seal(folder, _ARROW)
    return prepared


def _is_intact(prepared: PreparedDataset) -> bool:
    folder = prepared.folder
    if not (folder / SEAL).is_file():
        return False
    fault = fault_in(folder, _ARROW)
    if not fault and prepared.is_whole:
        return True
    remark(f"{folder} is damaged ({fault or 'a split is missing'}): it is prepared again")
    return False


def choose_rows(dataset: PreparedDataset, config: "DataConfig", *, cache: Path) -> PreparedDataset:
    """Return a dataset with the rows to train on, to score and to validate by that a section sets.

    All training rows of ``test_groups`` become test rows, after the others.

    Raises:
        InputError: A group is unknown, no training rows are left, or the rows are no instructions.
    """
    info, train, groups = dataset.info, dataset.train, config.test_groups
    field = f"data.test_groups={','.join(groups)}"
    if unknown := sorted({*groups} - {*info.groups}):
        known = join_limited(info.groups, 8) if info.groups else "none"
        hint = did_you_mean(unknown[0], info.groups)
        raise InputError(
            f"{field}: {unknown[0]!r} is no group of dataset {info.name}; it has {known}{hint}"
        )
    if groups and (lacking := {"group", *dataset.test.columns} - {*train.columns}):
        raise InputError(
            f"{field}: the training rows of dataset {info.name} have no {min(lacking)}"
        )
    if config.drop_repeated and info.kind != "instruction":
        raise InputError(f"data.drop_repeated is for instructions, not dataset {info.name}")

    def divide() -> _Contents:
        columns = {name: dataset.split(name).read() for name in dataset.split_names}
        kept, source = np.ones(len(train), dtype=bool), info.source
        if groups:
            kept = ~np.isin(train.column("group"), [info.groups.index(group) for group in groups])
            unseen = take_rows(columns["train"], np.flatnonzero(~kept))
            test = [columns["test"], {name: unseen[name] for name in columns["test"]}]
            columns["test"] = join(test)
        if config.drop_repeated:
            repeated = find_repeated(columns["train"], columns["test"]) & kept
            source += f", {repeated.sum():,} training rows left out that are test rows, too"
            kept &= ~repeated
        if not kept.any():
            raise InputError(f"{field}: no training rows of dataset {info.name} are left")
        columns["train"] = take_rows(columns["train"], np.flatnonzero(kept))
        return replace(info, source=source), columns

    if groups or config.drop_repeated:
        key = f"{dataset.fingerprint}\n{json.dumps([sorted(groups), config.drop_repeated])}"
        dataset = _read_or_write(cache, f"{info.name}-chosen", key, dataset.split_names, divide)
    return hold_out(dataset, config.validation_share, cache=cache)


def find_repeated(train: Mapping[str, Column], test: Mapping[str, Column]) -> np.ndarray:
    """Return which training rows are test rows, too, bool [N]: the same texts, or token ids."""

    def keys(rows: Mapping[str, Column]) -> list[Any]:
        if "input_ids" in rows:
            pairs = zip(rows["input_ids"], rows["length"].tolist(), strict=True)
            return [ids[:length].tobytes() for ids, length in pairs]
        columns = [rows[name] for name in sorted(rows) if name not in SCORED]
        texts = [column.to_pylist() for column in columns if not isinstance(column, np.ndarray)]
        return list(zip(*texts, strict=True))

    tested = set(keys(test))
    return np.array([key in tested for key in keys(train)])


def hold_out(dataset: PreparedDataset, share: float, *, cache: Path) -> PreparedDataset:
    """Return ``dataset`` with a ``share`` of its training rows as the split ``validation``.

    The rows are drawn from the data alone (:func:`~trishul_ray.data.partition.draw_held_out`), in
    equal shares from every client where the rows have a client column, and otherwise from every
    class or sub-dataset. Rows with the same inputs are held out together. Nothing is done for a
    share of 0; too few rows are an InputError.
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
            columns[name] = take_rows(train.read(), np.flatnonzero(rows))
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

    def encoded(name: str) -> dict[str, Column]:
        def report(done: float) -> None:
            if progress is not None:
                progress(f"encoding {info.name} {name}", done)

        split = dataset.split(name)
        kept = [c for c in ("label", "group", "client") if c in split.columns]
        copied: dict[str, Column] = {column: np.array(split.column(column)) for column in kept}
        return {**encoder.encode(split, report), **copied}

    def encode_splits() -> _Contents:
        return info, {name: encoded(name) for name in splits}

    key = f"{dataset.fingerprint}\n{encoder.key}"
    return _read_or_write(cache, f"{info.name}-encoded", key, splits, encode_splits)


#: Ends of the names of folders with rows that are made of prepared ones.
_DERIVED = "-encoded|-validation|-chosen|-rewritten"

#: Prepared folders of one path that are kept without being used, and seconds until one is unused.
KEPT, UNUSED_SECONDS = 3, 7 * 24 * 3600.0

#: Name of a file in every prepared folder, touched at each use.
LOCK = "lock"

#: The files of a prepared folder that are sealed.
_ARROW = "*.arrow"

_OWN_FOLDER = re.compile(rf"({'|'.join(CUSTOM)})({_DERIVED})?-[0-9a-f]{{12}}")


def remove_leftovers(
    cache: Path, *, keep: int = KEPT, unused_seconds: float = UNUSED_SECONDS
) -> list[Path]:
    """Remove failed preparations and old ones of own data from a cache, and return their folders.

    Keep the ``keep`` preparations of each path that were used last, and all that were used lately.
    """
    found: dict[tuple[str, str], list[tuple[float, Path]]] = defaultdict(list)
    old: list[Path] = []
    for lock in (cache / "data").glob(f"*/{LOCK}"):
        folder = lock.parent
        with suppress(OSError):
            used = lock.stat().st_mtime
            failed = not any(folder.glob("*.arrow"))
            if failed and time.time() - used > unused_seconds:
                old.append(folder)
            elif not failed and _OWN_FOLDER.fullmatch(folder.name):
                source = ""
                with suppress(InputError):  # damaged
                    source = Split(folder / "train.arrow").info.source.partition(", ")[0]
                found[folder.name.rpartition("-")[0], source].append((used, folder))
    for versions in found.values():
        unused = sorted(versions, reverse=True)[keep:]
        old += [folder for used, folder in unused if time.time() - used > unused_seconds]
    return [folder for folder in old if _remove(folder)]


def _remove(folder: Path) -> bool:
    """Remove a prepared folder unless a process prepares or has mapped it; return whether."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"{folder}/" in maps.read_text(errors="replace"):
                return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
    except (Timeout, OSError):
        return False
    return not folder.exists()


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows of one split.

    Attributes:
        used: rows that are trained on, or scored.
        held: rows that the source holds.
        official: rows of the published dataset; for the user's own data, the same as ``held``.
    """

    used: int
    held: int
    official: int

    def __str__(self) -> str:
        # "60 of 363,846", or "363,846" if all are used.
        complete = self.used == self.official
        return f"{self.used:,}" if complete else f"{self.used:,} of {self.official:,}"


@dataclass(frozen=True)
class Coverage:
    """The rows behind a run's scores.

    ``validation`` is the number of rows that are held out of the training rows and scored.
    ``revision`` is the commit of the hub's repository; None if unknown or not from the hub.
    ``skipped`` names the broken images that were left out; ``cut`` says what was cut of rows.
    """

    dataset: str
    source: str
    revision: str | None
    train: RowCounts
    test: RowCounts
    skipped: tuple[str, ...] = ()
    validation: int = 0
    cut: tuple[str, ...] = ()

    @property
    def part(self) -> bool:
        """Whether training or scoring uses other than all official rows."""
        return any(rows.used != rows.official for rows in (self.train, self.test))

    @property
    def sentence(self) -> str:
        """Dataset, rows, source and revision in one line."""
        unknown = self.revision is None and self.source.startswith(("hub:", "mirror:"))
        held_out = f"{self.validation:,} validation rows and " if self.validation else ""
        return (
            f"{'part' if self.part else 'all'} of {self.dataset}: {self.train} training rows, "
            f"{held_out}{self.test} test rows scored; {self.source}{', revision unknown' * unknown}"
        )

    def to_json(self) -> Json:
        """Return all as plain JSON values; the last three fields only if there are any."""
        fields = asdict(self) | {"part": self.part, "sentence": self.sentence}
        for name in ("skipped", "validation", "cut"):
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Coverage":
        """Return what :meth:`to_json` was made from."""
        plain = {name: value for name, value in fields.items() if name not in ("part", "sentence")}
        for name in ("skipped", "cut"):
            plain[name] = tuple(plain.get(name, ()))
        return cls(**plain | {name: RowCounts(**plain[name]) for name in ("train", "test")})


def measure_coverage(
    dataset: PreparedDataset, train_limit: int | None = None, test_limit: int | None = None
) -> Coverage:
    """Return how much of a prepared dataset, raw or encoded, a run with these limits covers.

    ``test_limit`` applies to validation rows, too.
    """
    info = dataset.info
    official = official_rows(info.name) or {}
    on_hub = info.source.startswith(("hub:", "mirror:"))
    revision = info.source.partition("@")[2].partition(",")[0] if on_hub else ""

    def count(split: str, limit: int | None) -> RowCounts:
        held = len(dataset.split(split))
        used = held if limit is None else min(limit, held)
        return RowCounts(used, held, official.get(split, held))

    train, test = count("train", train_limit), count("test", test_limit)
    held_out = 0
    if "validation" in dataset.split_names:
        held_out = count("validation", test_limit).used
    return Coverage(info.name, info.source, revision or None, train, test, info.skipped, held_out)
