"""A public dataset: from a mirror, else from its original archives, else from the hub.

Where the rows are from the hub or from the archives, their number must be the official one. A
mirror may hold a part; :mod:`trishul_ray.data.coverage` says how much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from trishul_ray.data.hub import HubRepo, class_names
from trishul_ray.data.images import MODE_CHANNELS, decode_images, pixel_statistics
from trishul_ray.data.prepared import Column, DatasetInfo, Kind, Progress
from trishul_ray.data.tables import (
    file_signature,
    join,
    length,
    number_values,
    read_answers,
    read_files,
    read_labels,
    read_raw,
    read_texts,
)
from trishul_ray.errors import CorruptFileError, InputError

#: ``tell(fraction)`` of the work in hand.
Tell = Callable[[float], None]


#: Columns by canonical name.
Columns = dict[str, Column]


class RowFormat(Protocol):
    """See the module."""

    @property
    def kind(self) -> Kind:
        """What the rows are."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The hub's columns that are read."""
        ...

    def decode(self, table: pa.Table, where: str, tell: Tell) -> Columns:
        """Canonical columns [N, ...] of a table; ``group`` may be raw texts."""
        ...

    def names(self, table: pa.Table) -> tuple[str, ...] | None:
        """Class names, where the table carries them."""
        ...

    def finish(
        self, splits: Mapping[str, Columns], names: tuple[str, ...] | None
    ) -> tuple[dict[str, Any], Mapping[str, Columns]]:
        """Fields of ``DatasetInfo``, and every split's columns as they are stored."""
        ...


@dataclass(frozen=True)
class ImageRows:
    """Images of one mode and size, with labels.

    Attributes:
        image: the image column, structs {bytes, path}.
        label: the label column, integers.
        classes: number of classes.
        mode: Pillow mode of every image.
        size: (height, width) of every image.
    """

    label: str
    classes: int
    image: str = "img"
    mode: str = "RGB"
    size: tuple[int, int] = (32, 32)
    kind: Kind = "image"

    @property
    def columns(self) -> tuple[str, ...]:
        """The hub's columns that are read."""
        return (self.image, self.label)

    def decode(self, table: pa.Table, where: str, tell: Tell) -> Columns:
        """``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N]."""
        label = read_labels(table, self.label, self.classes, where)
        pixels = decode_images(table, self.image, self.mode, self.size, where, tell)
        return {"pixels": pixels, "label": label}

    def names(self, table: pa.Table) -> tuple[str, ...] | None:
        """Class names of the hub's metadata, if there is one for each class."""
        found = class_names(table, self.label)
        return found if found is not None and len(found) == self.classes else None

    def finish(
        self, splits: Mapping[str, Columns], names: tuple[str, ...] | None
    ) -> tuple[dict[str, Any], Mapping[str, Columns]]:
        """Class names, the shape, and the statistics of the training pixels."""
        mean, std = pixel_statistics(splits["train"]["pixels"])
        fields = {
            "classes": names or tuple(str(label) for label in range(self.classes)),
            "image_shape": (MODE_CHANNELS[self.mode], *self.size),
            "mean": mean,
            "std": std,
        }
        return fields, splits


@dataclass(frozen=True)
class TextRows:
    """One or two texts with a label.

    Attributes:
        fields: the text columns, in reading order.
        classes: class names; the label is an index into them.
        label: the label column, integers.
    """

    fields: tuple[str, ...]
    classes: tuple[str, ...]
    label: str = "label"
    kind: Kind = "text"

    @property
    def columns(self) -> tuple[str, ...]:
        """The hub's columns that are read."""
        return (*self.fields, self.label)

    def decode(self, table: pa.Table, where: str, tell: Tell) -> Columns:
        """The texts under their names, and ``label`` int64 [N]."""
        columns: Columns = {field: read_texts(table, field, where) for field in self.fields}
        columns["label"] = read_labels(table, self.label, len(self.classes), where)
        tell(1.0)
        return columns

    def names(self, table: pa.Table) -> tuple[str, ...] | None:
        """None: the names are known."""
        return None

    def finish(
        self, splits: Mapping[str, Columns], names: tuple[str, ...] | None
    ) -> tuple[dict[str, Any], Mapping[str, Columns]]:
        """Class names and fields."""
        return {"classes": self.classes, "fields": self.fields}, splits


@dataclass(frozen=True)
class QuestionRows:
    """Questions with contexts and answers, of several sub-datasets.

    Attributes:
        subsets: names of the sub-datasets, in the order of their numbers; others that occur are
            numbered after them, sorted.
        subset: the column that names the sub-dataset.
    """

    subsets: tuple[str, ...]
    subset: str = "subset"
    kind: Kind = "qa"

    @property
    def columns(self) -> tuple[str, ...]:
        """The hub's columns that are read."""
        return ("question", "context", "answers", self.subset)

    def decode(self, table: pa.Table, where: str, tell: Tell) -> Columns:
        """``question``, ``context``, ``answers`` (JSON lists) and ``group``, texts all [N]."""
        columns: Columns = {
            "question": read_texts(table, "question", where),
            "context": read_texts(table, "context", where),
            "answers": read_answers(table, "answers", where),
            "group": read_raw(table, self.subset, where),
        }
        tell(1.0)
        return columns

    def names(self, table: pa.Table) -> tuple[str, ...] | None:
        """None: there are no classes."""
        return None

    def finish(
        self, splits: Mapping[str, Columns], names: tuple[str, ...] | None
    ) -> tuple[dict[str, Any], Mapping[str, Columns]]:
        """Names of the sub-datasets that occur, and ``group`` as int64 [N]."""
        numbered, groups = number_values(
            {split: columns["group"] for split, columns in splits.items()}, self.subsets, "group"
        )
        stored = {split: columns | {"group": numbered[split]} for split, columns in splits.items()}
        return {"groups": groups}, stored


class Archive(Protocol):
    """The files in which a dataset was first published, in one folder."""

    @property
    def title(self) -> str:
        """The files, for people."""
        ...

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """The files, or None where the folder has none of them.

        Raises:
            InputError: the folder has a part of them.
        """
        ...

    def read(
        self, files: Sequence[Path], tell: Callable[[str, float], None]
    ) -> tuple[Mapping[str, Columns], tuple[str, ...] | None]:
        """Columns of every split of the hub, as the layout decodes them; class names if held.

        Args:
            files: what :meth:`find` gave.
            tell: told of the split and the fraction done.

        Raises:
            CorruptFileError: a file is malformed; names file, member or row, and fault.
        """
        ...


@dataclass(frozen=True)
class PublicDataset:
    """A dataset of the paper, known by name.

    Attributes:
        name: name in the registry.
        description: one line for people.
        repo: where it is on the hub.
        rows: Format of its rows.
        sizes: official number of rows of every split of the hub that is read.
        test: the hub's splits that are the test rows, in order; where there are several, the
            rows of each are a group of their own.
        groups: names of those groups.
        archive: the original files; None where there are none.
    """

    name: str
    description: str
    repo: HubRepo
    rows: RowFormat
    sizes: Mapping[str, int]
    test: tuple[str, ...] = ("test",)
    groups: tuple[str, ...] = ()
    archive: Archive | None = None
    splits: tuple[str, ...] = ("train", "test")

    @property
    def official(self) -> dict[str, int]:
        """Published numbers of ``train`` and ``test`` rows."""
        return {"train": self.sizes["train"], "test": sum(self.sizes[s] for s in self.test)}

    def key(self, hub: Path | None) -> str:
        """What decides the rows, beside the format: the local files, or the hub's revision."""
        files = self.repo.mirror_files(hub, tuple(self.sizes))
        if files is not None:
            return file_signature(file for split in self.sizes for file in files[split])
        archived = self._archived(hub)
        return self.repo.key if archived is None else f"archives:{file_signature(archived)}"

    def read(
        self, hub: Path | None, progress: Progress
    ) -> tuple[DatasetInfo, Mapping[str, Columns]]:
        """The description, and every split's columns [N, ...].

        Raises:
            CorruptFileError: a file or row is not as it should be; names file, row and fault.
            InputError: the dataset is nowhere to be had; says where it was looked for.
        """

        def tell(split: str, fraction: float) -> None:
            progress(f"{self.name} {split}", fraction)

        found: Mapping[str, Columns]
        archived = None
        if self.repo.mirror_files(hub, tuple(self.sizes)) is None:
            archived = self._archived(hub)
        if archived is None or self.archive is None:
            found, names, source = self._tables(hub, tell)
        else:
            found, names = self.archive.read(archived, tell)
            source = f"archives:{', '.join(file.name for file in archived)}"
            self._check_sizes(found, str(archived[0].parent))
        joined = {"train": dict(found["train"]), "test": self._test_rows(found)}
        fields, columns = self.rows.finish(joined, names)
        if self.groups:
            fields["groups"] = self.groups
        return DatasetInfo(self.name, self.rows.kind, source, **fields), columns

    def _tables(
        self, hub: Path | None, tell: Callable[[str, float], None]
    ) -> tuple[dict[str, Columns], tuple[str, ...] | None, str]:
        """Every hub split's columns from mirror or hub, class names, and the source's name."""
        files = self.repo.mirror_files(hub, tuple(self.sizes))
        found: dict[str, Columns] = {}
        names = None
        for split in self.sizes:
            if files is None:
                where = f"hub dataset {self.repo.repo}, split {split}"
                tables = [(where, self._download(split, hub))]
            else:
                tables = read_files(files[split], self.rows.columns)
            found[split] = self._decode(tables, partial(tell, split))
            if not length(found[split]):
                raise CorruptFileError(f"{tables[0][0]}: the {split} split has no rows")
            names = self.rows.names(tables[0][1]) or names
        if files is None:
            self._check_sizes(found, f"hub dataset {self.repo.repo}")
            return found, names, self.repo.key
        revision = self.repo.mirrored_revision(hub, [f for split in files.values() for f in split])
        return found, names, f"mirror:{self.repo.repo}" + (f"@{revision}" if revision else "")

    def _decode(self, tables: Sequence[tuple[str, pa.Table]], tell: Tell) -> Columns:
        parts = []
        for number, (where, table) in enumerate(tables):

            def told(done: float, number: int = number) -> None:
                tell((number + done) / len(tables))

            parts.append(self.rows.decode(table, where, told))
        return join(parts)

    def _check_sizes(self, found: Mapping[str, Columns], where: str) -> None:
        for split, rows in self.sizes.items():
            if length(found[split]) != rows:
                raise CorruptFileError(
                    f"{where}: split {split} of {self.name} has {length(found[split])} rows, not "
                    f"the official {rows}: the copy is incomplete or of another version"
                )

    def _test_rows(self, found: Mapping[str, Columns]) -> Columns:
        parts = [dict(found[split]) for split in self.test]
        if self.groups:
            for group, part in enumerate(parts):
                part["group"] = np.full(length(part), group, dtype=np.int64)
        return join(parts)

    def _archived(self, hub: Path | None) -> tuple[Path, ...] | None:
        return None if hub is None or self.archive is None else self.archive.find(hub / "archives")

    def _download(self, split: str, hub: Path | None) -> pa.Table:
        try:
            return self.repo.download(split, self.rows.columns)
        except InputError as error:
            original = self.archive.title if self.archive else ""
            looked = "no mirror is set"
            if hub is not None:
                looked = f"mirror {hub} does not hold it"
                looked += f", {hub / 'archives'} has no {original}" if original else ""
            wanted = f"{self.repo.repo}/{self.repo.file_patterns[0].format(split=split)}"
            wanted += f" or archives/{original}" if original else ""
            raise InputError(
                f"dataset {self.name} ({self.repo.repo}) not found: {looked} (storage.hub or "
                f"TRISHUL_HUB), and the Hugging Face hub did not give it: {error}; set TRISHUL_HUB "
                f"or storage.hub to a folder with {wanted}, or run `trishul datasets {self.name}` "
                "once with internet"
            ) from error
