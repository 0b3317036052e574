"""Public datasets, which are read from a local mirror or from the hub.

The number of rows from the hub must match the official one. A mirror may have fewer rows, which
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
    """Base class of the formats that decode the tables of a public dataset into columns.

    A subclass is a frozen dataclass and sets ``kind`` to the kind of its rows; see
    :class:`~trishul_ray.data.dataset.DatasetInfo`. Its fields are part of the key of prepared
    files, so a change of a field prepares the rows again.

    Example:
        A format for questions without a context column::

            @dataclass(frozen=True)
            class ClosedBookRows(RowFormat):
                kind = "qa"

                def decode(self, table, where, progress):
                    question = read_texts(table, "question", where)
                    answers = read_answers(table, "answers", where)
                    empty = pa.array([""] * len(table), pa.large_string())
                    return {"question": question, "context": empty, "answers": answers}

                def finish(self, splits, tables):
                    return {}, splits
    """

    kind: ClassVar[Kind]

    @abstractmethod
    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Decode a table into the canonical columns.

        Args:
            table: All rows of a split of the source.
            where: Name of the split, which starts error messages.
            progress: Called with the completed fraction, in [0, 1]; optional.

        Returns:
            The columns [N, ...] of :class:`~trishul_ray.data.dataset.DatasetInfo`, as arrays or
            ``large_string`` texts. ``group`` may contain names, which :meth:`finish` replaces with
            indices.

        Raises:
            CorruptFileError: A column or row is malformed.
        """

    @abstractmethod
    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Complete the decoded splits, and describe the dataset.

        Args:
            splits: Decoded columns keyed by ``train`` and ``test``.
            tables: The source tables, whose metadata may contain class names.

        Returns:
            Fields of :class:`~trishul_ray.data.dataset.DatasetInfo`, such as ``classes``, and the
            columns to store, keyed by split.

        Raises:
            CorruptFileError: The metadata of the tables contradicts the dataset.
        """


@dataclass(frozen=True)
class ImageRows(RowFormat):
    """Labeled images with the same mode and size.

    The columns are ``pixels``, uint8 [N, C, H, W], and ``label``, int64 [N].

    Attributes:
        label: Label column, integers.
        classes: Number of classes.
        image: Image column, structs {bytes, path}.
        mode: Pillow mode of every image, ``"RGB"`` or ``"L"``.
        size: (height, width) of every image.

    Example:
        >>> ImageRows("label", classes=10, image="image", size=(32, 32)).kind
        'image'
    """

    label: str
    classes: int
    image: str = "img"
    mode: str = "RGB"
    size: tuple[int, int] = (32, 32)
    kind = "image"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Decode ``pixels`` and ``label``; see :meth:`RowFormat.decode`."""
        label = read_labels(table, self.label, self.classes, where)
        pixels = decode_images(table, self.image, self.mode, self.size, where, progress)
        return {"pixels": pixels, "label": label}

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Describe class names, image shape and pixel statistics of the training rows.

        See :meth:`RowFormat.finish`. Without names in the metadata, classes are named by their
        numbers.
        """
        mean, std = pixel_statistics(splits["train"]["pixels"])
        names = common_class_names(tables, self.label) or ()
        if len(names) != self.classes:
            names = tuple(map(str, range(self.classes)))
        shape = (MODE_CHANNELS[self.mode], *self.size)
        return {"classes": names, "image_shape": shape, "mean": mean, "std": std}, splits


@dataclass(frozen=True)
class TextRows(RowFormat):
    """Labeled texts: one or more text columns under their names, and ``label``, int64 [N].

    Attributes:
        fields: Text columns in reading order.
        classes: Class names, which labels index.
        label: Label column, integers or class names.

    Example:
        >>> TextRows(fields=("sentence",), classes=("negative", "positive")).label
        'label'
    """

    fields: tuple[str, ...]
    classes: tuple[str, ...]
    label: str = "label"
    kind = "text"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Decode the texts and ``label``; see :meth:`RowFormat.decode`."""
        columns: Columns = {field: read_texts(table, field, where) for field in self.fields}
        columns["label"] = read_labels(table, self.label, len(self.classes), where, self.classes)
        return columns

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Describe class names and fields; see :meth:`RowFormat.finish`.

        Raises:
            CorruptFileError: The tables number the classes in another order.
        """
        names = common_class_names(tables, self.label) or self.classes
        if names != self.classes and set(names) == set(self.classes):
            raise CorruptFileError(
                f"column {self.label!r}: the files order their classes as {join_limited(names, 10)}"
                f", but the dataset as {join_limited(self.classes, 10)}"
            )
        return {"classes": self.classes, "fields": self.fields}, splits


@dataclass(frozen=True)
class QuestionRows(RowFormat):
    """Questions of several sub-datasets.

    The columns are ``question``, ``context`` and ``answers`` (a JSON list) as texts [N], and
    ``group``, int64 [N].

    Attributes:
        subsets: Names of the sub-datasets in the order of their numbers. Other names that occur are
            sorted and numbered after them.
        subset: Column with the name of the sub-dataset.

    Example:
        >>> QuestionRows(subsets=("SQuAD", "NewsQA")).subset
        'subset'
    """

    subsets: tuple[str, ...]
    subset: str = "subset"
    kind = "qa"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Decode the four columns as texts [N]; see :meth:`RowFormat.decode`."""
        return {
            "question": read_texts(table, "question", where),
            "context": read_texts(table, "context", where),
            "answers": read_answers(table, "answers", where),
            "group": read_texts(table, self.subset, where),
        }

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Number the sub-datasets, and describe their names.

        See :meth:`RowFormat.finish`.
        """
        return {"groups": _number_groups(splits, self.subsets)}, splits


@dataclass(frozen=True)
class InstructionRows(RowFormat):
    """Instructions with answers.

    The columns are ``instruction``, ``output`` and, if ``names`` contains it, ``input`` as texts
    [N], and optionally ``group`` and ``client``, int64 [N]. Rows with a blank answer are skipped
    and reported.

    Attributes:
        names: Columns of the source, keyed by canonical name.
        groups: Names of the groups in the order of their numbers.
        shards: Number of clients for a natural partition, which is the same for every experiment:
            training rows sorted by group are cut into twice as many shards, and each client
            receives two.

    Example:
        >>> rows = InstructionRows({"instruction": "question", "output": "answer"})
        >>> rows.groups
        ()
    """

    names: Mapping[str, str]
    groups: tuple[str, ...] = ()
    shards: int | None = None
    kind = "instruction"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Decode the columns as texts [N]; see :meth:`RowFormat.decode`."""
        return {name: read_texts(table, column, where) for name, column in self.names.items()}

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Skip blank answers, and describe fields, groups and clients.

        See :meth:`RowFormat.finish`.
        """
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
    """Replace the group names of all splits with indices, and return the names in this order."""
    raw = [pa.array(columns["group"]) for columns in splits.values()]
    numbers, groups = number_names(pa.concat_arrays(raw), names)
    ends = np.cumsum([len(part) for part in raw])[:-1]
    for columns, part in zip(splits.values(), np.split(numbers, ends), strict=True):
        columns["group"] = part
    return groups


def _draw_each(groups: Column, count: int) -> np.ndarray:
    """Draw ``count`` rows of each group with a fixed stream, at most half of them, as bool [N]."""
    _, group, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    drawn, left = np.zeros(len(group), dtype=bool), np.minimum(sizes // 2, count)
    for row in numpy_rng(0, "test-share").permutation(len(group)):
        drawn[row] = left[group[row]] > 0
        left[group[row]] -= 1
    return drawn


def _shard(groups: np.ndarray, clients: int) -> np.ndarray:
    """Assign each row [N] to a client, int64, which has two of 2 C shards of the sorted groups."""
    owners = np.empty(len(groups), dtype=np.int64)
    shards = np.array_split(np.argsort(groups, kind="stable"), 2 * clients)
    for place, shard in enumerate(numpy_rng(0, "shards").permutation(2 * clients)):
        owners[shards[shard]] = place // 2
    return owners


@dataclass(frozen=True)
class PublicDataset:
    """A public dataset on the Hugging Face hub or in a local mirror.

    Attributes:
        name: Name in the registry, for ``dataset=NAME``.
        description: One line for ``trishul list datasets``.
        repo: Repository on the hub, pinned to a commit.
        rows: Format of the rows.
        sizes: Official number of rows per split of the source. Only these splits are read.
        test: Splits of the source that form the test rows, in order.
        groups: Names of the groups of test rows, one per split of ``test``; may be empty.
        test_share: For a dataset that was published as a single split, with any name: fraction of
            the rows that become test rows, the same rows in every experiment. ``test`` is then not
            used.
        test_each: Like ``test_share``, as the number of test rows per group of instructions.
        splits: Names of the prepared splits.

    Raises:
        ValueError: A repository on the hub is not pinned to a commit, or the splits contradict each
            other.

    Example:
        >>> dataset = PublicDataset(
        ...     name="sms",
        ...     description="SMS spam, 5,574 messages",
        ...     repo=HubRepo("ucirvine/sms_spam", "plain_text", revision="0" * 40),
        ...     rows=TextRows(fields=("sms",), classes=("ham", "spam")),
        ...     sizes={"train": 5574},
        ...     test_share=0.2,
        ... )
        >>> dataset.official
        {'train': 4459, 'test': 1115}
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
            fault = f"{self._drawn_by} requires a single split, but sizes has several"
        elif not self._drawn_by and missing:
            fault = f"sizes has no {', '.join(missing)}; for a single split, set test_share"
        if fault:
            raise ValueError(f"dataset {self.name}: {fault}")

    @property
    def _drawn_by(self) -> str:
        """The field that defines the split of test rows; empty if the test rows are published."""
        fields = ("test_share", "test_each")
        return next((name for name in fields if getattr(self, name) is not None), "")

    @property
    def official(self) -> dict[str, int]:
        """The published numbers of ``train`` and ``test`` rows."""
        if self._drawn_by:
            (total,) = self.sizes.values()
            if self.test_share is not None:
                test = count_test_rows(total, self.test_share)
            else:
                test = (self.test_each or 0) * len(getattr(self.rows, "groups", ()))
            return {"train": total - test, "test": test}
        return {"train": self.sizes["train"], "test": sum(self.sizes[s] for s in self.test)}

    def key(self, hub: Path | None) -> str:
        """Return a text that changes whenever the source of the rows or the definition changes.

        Args:
            hub: Root folder of a mirror, or None.

        Raises:
            InputError: The mirror has only some of the splits.
        """
        definition = (self.rows, self.test, self.groups, self.test_share, self.test_each)
        return f"{self.repo.key(hub, tuple(self.sizes))}\n{definition!r}"

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Read and decode all rows, from the mirror if it has them and otherwise from the hub.

        Args:
            hub: Root folder of a mirror, or None.
            progress: Called as ``progress(stage, fraction)``.

        Returns:
            The description, and the columns [N, ...] keyed by split.

        Raises:
            CorruptFileError: A file or row is malformed, or the hub has another number of rows.
            InputError: The dataset was not found; the message lists the searched locations.
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


#: The public datasets, keyed by name.
DATASETS = Registry[PublicDataset](
    "data.name",
    "dataset",
    "trishul_ray.data.datasets",
    advice={r".*\.(csv|tsv|jsonl?|parquet)": "to read a file, set dataset=table data.path=FILE"},
)


def register_dataset(dataset: PublicDataset) -> PublicDataset:
    """Register a dataset, so that ``dataset=NAME`` selects it.

    Args:
        dataset: The dataset, in a plug-in or in a module of ``trishul_ray.data.datasets``.

    Returns:
        The dataset.

    Raises:
        ValueError: The name is already registered.

    Example:
        >>> register_dataset(  # doctest: +SKIP
        ...     PublicDataset(
        ...         name="sms",
        ...         description="SMS spam, 5,574 messages",
        ...         repo=HubRepo("ucirvine/sms_spam", "plain_text", revision=COMMIT),
        ...         rows=TextRows(fields=("sms",), classes=("ham", "spam")),
        ...         sizes={"train": 5574},
        ...         test_share=0.2,
        ...     )
        ... )
    """
    DATASETS.add(dataset.name, dataset)
    return dataset
