"""Public datasets: read from a local mirror, or else from the hub.

Rows from the hub must match the official number. A mirror may hold fewer rows, which
:class:`~trishul_ray.data.coverage.Coverage` reports.

Legend of shapes: N rows, C channels, H x W pixels.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from trishul_ray.data.columns import (
    at_row,
    common_class_names,
    number_names,
    read_answers,
    read_labels,
    read_texts,
)
from trishul_ray.data.dataset import (
    Column,
    Columns,
    DatasetInfo,
    Kind,
    ProgressCallback,
    Splits,
    count_test_rows,
    join,
    length,
    split_off_test,
    take_rows,
)
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.images import MODE_CHANNELS, decode_images, pixel_statistics
from trishul_ray.data.tables import concatenate
from trishul_ray.errors import CorruptFileError, join_limited
from trishul_ray.plugins.registry import Registry
from trishul_ray.runtime.random_streams import numpy_rng


@dataclass(frozen=True)
class RowFormat(ABC):
    """Decoder of the tables of a public dataset into columns.

    Its fields are part of the key of prepared files.
    """

    kind: ClassVar[Kind]

    @abstractmethod
    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Return the canonical columns [N, ...] of a table; ``group`` may be raw texts.

        Error messages begin with ``where``; ``progress`` may be called with the fraction done.

        Raises:
            CorruptFileError: A column or row is malformed.
        """

    @abstractmethod
    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Return fields of ``DatasetInfo``, and the columns of every split to store.

        ``tables`` are the decoded tables, whose metadata may contain the names of the classes.
        """


@dataclass(frozen=True)
class ImageRows(RowFormat):
    """Labelled images of one mode and size: ``pixels`` uint8 [N, C, H, W], ``label`` int64 [N].

    Attributes:
        label: label column, integers.
        classes: number of classes.
        image: image column, structs {bytes, path}.
        mode: Pillow mode of every image.
        size: (height, width) of every image.
    """

    label: str
    classes: int
    image: str = "img"
    mode: str = "RGB"
    size: tuple[int, int] = (32, 32)
    kind = "image"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Return ``pixels`` and ``label``."""
        label = read_labels(table, self.label, self.classes, where)
        pixels = decode_images(table, self.image, self.mode, self.size, where, progress)
        return {"pixels": pixels, "label": label}

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Return class names, image shape and the statistics of the training pixels."""
        mean, std = pixel_statistics(splits["train"]["pixels"])
        names = common_class_names(tables, self.label) or ()
        if len(names) != self.classes:
            names = tuple(map(str, range(self.classes)))
        shape = (MODE_CHANNELS[self.mode], *self.size)
        return {"classes": names, "image_shape": shape, "mean": mean, "std": std}, splits


@dataclass(frozen=True)
class TextRows(RowFormat):
    """One or two texts under their names, with ``label`` int64 [N].

    Attributes:
        fields: text columns in reading order.
        classes: class names; a label is an index into them.
        label: label column, integers or class names.
    """

    fields: tuple[str, ...]
    classes: tuple[str, ...]
    label: str = "label"
    kind = "text"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Return the texts and ``label``."""
        columns: Columns = {field: read_texts(table, field, where) for field in self.fields}
        columns["label"] = read_labels(table, self.label, len(self.classes), where, self.classes)
        return columns

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Return class names and fields, or raise an error if the tables use another order."""
        names = common_class_names(tables, self.label) or self.classes
        if names != self.classes and set(names) == set(self.classes):
            raise CorruptFileError(
                f"column {self.label!r}: the files number their labels by {join_limited(names, 10)}"
                f", but the dataset by {join_limited(self.classes, 10)}"
            )
        return {"classes": self.classes, "fields": self.fields}, splits


@dataclass(frozen=True)
class QuestionRows(RowFormat):
    """Questions of several sub-datasets: ``question``, ``context``, ``answers``, ``group``.

    Attributes:
        subsets: names of the sub-datasets in the order of their numbers; other names that occur
            are sorted and numbered after them.
        subset: column with the name of the sub-dataset.
    """

    subsets: tuple[str, ...]
    subset: str = "subset"
    kind = "qa"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Return the four columns as texts [N]; an answer is a JSON list."""
        return {
            "question": read_texts(table, "question", where),
            "context": read_texts(table, "context", where),
            "answers": read_answers(table, "answers", where),
            "group": read_texts(table, self.subset, where),
        }

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Return the names of the sub-datasets that occur, with ``group`` as int64 [N]."""
        return {"groups": _number_groups(splits, self.subsets)}, splits


@dataclass(frozen=True)
class InstructionRows(RowFormat):
    """Instructions with answers: ``instruction``, ``output`` and, if named, ``input``, ``group``.

    Rows with a blank answer are left out and named.

    Attributes:
        names: columns of the hub's tables, by these names.
        groups: names of the groups, in the order of their numbers.
        shards: number of clients for a natural partition, the same for every experiment: training
            rows sorted by group are cut into twice as many shards, and a client has two of them.
    """

    names: Mapping[str, str]
    groups: tuple[str, ...] = ()
    shards: int | None = None
    kind = "instruction"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Return the columns as texts [N]."""
        return {name: read_texts(table, column, where) for name, column in self.names.items()}

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Return fields and the names of groups and clients, if the dataset has any."""
        skipped, stored = [], {}
        for split, columns in splits.items():
            blank = [not text.strip() for text in pa.array(columns["output"]).to_pylist()]
            skipped += [at_row(split, row) for row in np.flatnonzero(blank).tolist()]
            stored[split] = take_rows(columns, np.flatnonzero(np.logical_not(blank)))
        fields = tuple(name for name in ("instruction", "input") if name in self.names)
        about: dict[str, Any] = {"fields": fields, "skipped": tuple(skipped)}
        if self.groups:
            about["groups"] = _number_groups(stored, self.groups)
        if self.shards is not None:
            for columns in stored.values():
                columns["client"] = _shard(columns["group"], self.shards)
            about["clients"] = tuple(str(client) for client in range(self.shards))
        return about, stored


def _number_groups(splits: Splits, names: Sequence[str]) -> tuple[str, ...]:
    """Replace the group names of all splits by numbers; return the names in their order."""
    raw = [pa.array(columns["group"]) for columns in splits.values()]
    numbers, groups = number_names(pa.concat_arrays(raw), names)
    ends = np.cumsum([len(part) for part in raw])[:-1]
    for columns, part in zip(splits.values(), np.split(numbers, ends), strict=True):
        columns["group"] = part
    return groups


def _draw_each(groups: Column, count: int) -> np.ndarray:
    """Return ``count`` rows of each group, at most half of them, by a fixed draw, as bool [N]."""
    _, group, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    drawn, left = np.zeros(len(group), dtype=bool), np.minimum(sizes // 2, count)
    for row in numpy_rng(0, "test-share").permutation(len(group)):
        drawn[row] = left[group[row]] > 0
        left[group[row]] -= 1
    return drawn


def _shard(groups: np.ndarray, clients: int) -> np.ndarray:
    """Return the client of each row [N], int64: each has two of 2 C shards of the sorted groups."""
    owners = np.empty(len(groups), dtype=np.int64)
    shards = np.array_split(np.argsort(groups, kind="stable"), 2 * clients)
    for place, shard in enumerate(numpy_rng(0, "shards").permutation(2 * clients)):
        owners[shards[shard]] = place // 2
    return owners


@dataclass(frozen=True)
class PublicDataset:
    """A public dataset.

    Attributes:
        name: name in the registry.
        description: one line for the list of datasets.
        repo: repository on the hub.
        rows: format of the rows.
        sizes: official number of rows of each of the hub's splits that is read.
        test: the hub's splits that form the test rows, in order.
        groups: names of the groups of test rows, one for each split of ``test``; may be empty.
        test_share: for a dataset that was published as one split, of any name: the share of its
            rows that is set aside as test rows, the same in every experiment. ``test`` is not read.
        test_each: likewise, the number of rows of each group of instructions.

    Raises:
        ValueError: a repository on the hub is not pinned to a commit, or the splits contradict
            each other.
    """

    name: str
    description: str
    repo: HubRepo
    rows: RowFormat
    sizes: Mapping[str, int]
    test: tuple[str, ...] = ("test",)
    groups: tuple[str, ...] = ()
    test_share: float | None = None
    test_each: int | None = None
    splits: tuple[str, ...] = ("train", "test")

    def __post_init__(self) -> None:
        pinned = re.fullmatch("[0-9a-f]{40}", self.repo.revision or "") is not None
        missing = [split for split in ("train", *self.test) if split not in self.sizes]
        fault = ""
        if self.repo.on_hub and not pinned:
            fault = f"{self.repo.repo} is on the hub: set repo.revision to a commit (40 hex digits)"
        elif self._drawn_by and len(self.sizes) != 1:
            fault = f"{self._drawn_by} is for one split; sizes has several"
        elif not self._drawn_by and missing:
            fault = f"sizes has no {', '.join(missing)}; for one split set test_share"
        if fault:
            raise ValueError(f"dataset {self.name}: {fault}")

    @property
    def _drawn_by(self) -> str:
        """The field that says how test rows are set aside; empty if they are published."""
        fields = ("test_share", "test_each")
        return next((name for name in fields if getattr(self, name) is not None), "")

    @property
    def official(self) -> dict[str, int]:
        """Published numbers of ``train`` and ``test`` rows."""
        if self._drawn_by:
            (total,) = self.sizes.values()
            if self.test_share is not None:
                test = count_test_rows(total, self.test_share)
            else:
                test = (self.test_each or 0) * len(getattr(self.rows, "groups", ()))
            return {"train": total - test, "test": test}
        return {"train": self.sizes["train"], "test": sum(self.sizes[s] for s in self.test)}

    def key(self, hub: Path | None) -> str:
        """Return a text that changes if the source of the rows or the definition changes."""
        definition = (self.rows, self.test, self.groups, self.test_share, self.test_each)
        return f"{self.repo.key(hub, tuple(self.sizes))}\n{definition!r}"

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Return the description, and the columns [N, ...] of every split.

        Raises:
            CorruptFileError: A file or row is malformed, or rows on the hub are missing.
            InputError: The dataset was not found; the message names the places searched.
        """
        origin, tables = self.repo.read(hub, tuple(self.sizes))
        splits: dict[str, Columns] = {}
        for split, parts in tables.items():
            where = f"{self.repo.repo}, split {split}"
            report = partial(progress, f"{self.name} {split}")
            splits[split] = self.rows.decode(concatenate(parts, where), where, report)
            report(1.0)
            found, official = length(splits[split]), self.sizes[split]
            if not found or (origin.kind == "hub" and found != official):
                raise CorruptFileError(f"{where}: {found} rows, not the official {official}")
        fields, columns = self.rows.finish(self._split(splits), [*chain(*tables.values())])
        if self.groups:
            fields["groups"] = self.groups
        return DatasetInfo(self.name, self.rows.kind, origin=origin, **fields), columns

    def _split(self, splits: Splits) -> dict[str, Columns]:
        if self._drawn_by:
            (columns,) = splits.values()
            if self.test_share is not None:
                return split_off_test(columns, self.test_share, self.name)
            test_rows = _draw_each(columns["group"], self.test_each or 0)
            parts = {"train": ~test_rows, "test": test_rows}
            return {k: take_rows(columns, np.flatnonzero(v)) for k, v in parts.items()}
        test = [dict(splits[split]) for split in self.test]
        for group, part in enumerate(test if self.groups else ()):
            part["group"] = np.full(length(part), group, dtype=np.int64)
        return {"train": dict(splits["train"]), "test": join(test)}


#: The public datasets by name.
DATASETS = Registry[PublicDataset](
    "data.name",
    "dataset",
    "trishul_ray.data.datasets",
    advice={r".*\.(csv|tsv|jsonl?|parquet)": "read a file by dataset=table data.path=FILE"},
)


def register_dataset(dataset: PublicDataset) -> PublicDataset:
    """Make a dataset available as ``dataset=<its name>``, and return it."""
    DATASETS.add(dataset.name, dataset)
    return dataset
