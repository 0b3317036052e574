"""Your own data: a folder of images, a table file, any dataset of the hub, or rows from Python.

If there are no test rows, ``data.test_share`` of the rows is set aside as the test split.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from trishul_ray.data.class_folders import find_images
from trishul_ray.data.cleaning import (
    ColumnMapping,
    NamedTables,
    check_optional,
    check_unique,
    clean,
    differing_in_case,
    has_labels,
    question_labels,
)
from trishul_ray.data.columns import is_text, nfc, number_values, with_nfc_names
from trishul_ray.data.dataset import (
    LABELLED,
    Columns,
    DatasetInfo,
    Kind,
    ProgressCallback,
    Splits,
    join,
    length,
    split_off_test,
    take_rows,
)
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.images import (
    MAX_NAMED,
    PREPARATION_VERSION,
    NamedImage,
    decode_and_resize,
    pixel_statistics,
)
from trishul_ray.data.own_columns import (
    TEXT_FIELDS,
    ClassNames,
    list_images,
    read_columns,
    with_plain_messages,
)
from trishul_ray.data.passed_rows import PASSED, ROWS
from trishul_ray.data.tables import SUFFIXES, column_names, file_signature, name_rows, read_table
from trishul_ray.errors import InputError, join_limited
from trishul_ray.storage.integrity import digest


@dataclass(frozen=True)
class CustomDataset:
    """Base of the kinds of your own data, with the settings of the section ``data``."""

    path: str | None
    columns: Mapping[str, str]
    test_share: float
    skip_broken: bool = False
    name: ClassVar[str]
    splits = ("train", "test")
    official = None

    def _key(self, source: str) -> str:
        # The number rises when the same rows get another description.
        key = f"{source}\n{sorted(self.columns.items())}\n{self.test_share!r}\n5"
        return f"{key}\nimages {PREPARATION_VERSION}, skip_broken={self.skip_broken}"

    def _files_key(self, files: Mapping[str, Iterable[Path]]) -> str:
        return self._key(file_signature(file for split in files.values() for file in split))

    def content(self) -> str | None:
        """Return a hash of everything that the rows are made of, wherever it lies.

        None if that is not known before the rows are read: on the hub, or where the files are
        missing.
        """
        return None

    def _required_path(self, expected: str) -> str:
        if self.path is None:
            raise InputError(f"data.path is not set: it must be {expected}")
        return self.path

    def _existing_path(self, expected: str) -> Path:
        path = Path(self._required_path(expected)).expanduser()
        if not path.exists():
            raise InputError(f"data.path={self.path!r} does not exist; it must be {expected}")
        return path

    def _of_tables(
        self,
        source: str,
        tables: Mapping[str, NamedTables],
        progress: ProgressCallback,
        folder: Path | None = None,
    ) -> tuple[DatasetInfo, Splits]:
        """Return the description of tables by split, and the columns of ``train`` and ``test``.

        ``source`` says where they are from; paths of images are relative to ``folder``.
        """
        first, first_table = tables["train"][0]
        for where, table in (named for parts in tables.values() for named in parts):
            check_unique(table.column_names, where)
        if not sum(table.num_rows for _, table in tables["train"]):
            raise InputError(f"{first}: there are no rows")
        mapping = ColumnMapping.resolve(self.columns, first_table.column_names)
        if "test" in tables and not has_labels(tables["test"], self.columns):
            raise InputError(
                f"{tables['test'][0][0]}: all labels of the test split are -1, which marks rows "
                "without labels; remove it (data.test_share of the training rows is then set "
                "aside), or put rows with labels in its place"
            )
        check_optional(tables, mapping)
        tables, mapping = with_plain_messages(tables, mapping)
        cleaned, note, skipped = clean(tables, mapping.columns, skip_broken=self.skip_broken)
        source += note
        classes = ClassNames.of(cleaned, mapping.columns.get("label", ""))
        source += "" if classes is None else classes.note
        splits: dict[str, Columns] = {}
        for split, parts in cleaned.items():
            read = [read_columns(mapping, t, where, classes) for where, t in parts.tables]
            splits[split] = take_rows(join(read), np.flatnonzero(np.concatenate(parts.retained)))
            progress(f"{self.name} {split}", 1.0)
        if mapping.kind == "image":
            column = mapping.columns["image"]
            images = {s: list_images(parts, column, folder) for s, parts in cleaned.items()}
            note, broken = self._add_pixels(splits, images, progress)
            source += note
            skipped += broken
        fields: dict[str, Any] = {"skipped": skipped}
        for column, field in (("label", "classes"), ("group", "groups"), ("client", "clients")):
            raw = {split: values[column] for split, values in splits.items() if column in values}
            if raw and column == "label" and classes is not None:
                fields[field] = classes.names  # the labels are numbers already
            elif raw:
                numbered, fields[field] = number_values(raw, what=mapping.columns[column])
                for split, values in numbered.items():
                    splits[split][column] = values
        return self._finish(mapping.kind, source, splits, fields, first)

    def _add_pixels(
        self,
        splits: dict[str, Columns],
        images: Mapping[str, list[NamedImage]],
        progress: ProgressCallback,
    ) -> tuple[str, tuple[str, ...]]:
        """Add ``pixels`` to the columns of every split, without the rows of broken images.

        Returns a note on what was done to the images, and the names of the broken ones.
        """

        def report(split: str, fraction: float) -> None:
            progress(f"{self.name} {split}", fraction)

        resized = decode_and_resize(images, report, skip_broken=self.skip_broken)
        for split, pixels in resized.pixels.items():
            splits[split] = take_rows(splits[split], resized.retained[split]) | {"pixels": pixels}
        return resized.note, resized.skipped

    def _finish(
        self, kind: Kind, source: str, splits: Splits, fields: dict[str, Any], where: str
    ) -> tuple[DatasetInfo, Splits]:
        """Return the description and the columns of ``train`` and ``test``.

        ``fields`` are those of the description that are known; ``where`` the rows are from. A split
        without rows is an InputError, as are rows of a single class.
        """
        source += differing_in_case(fields.get("classes", ()))
        if kind in LABELLED:
            labels = np.concatenate([columns["label"] for columns in splits.values()])
            note, fields["doubt"] = question_labels(fields["classes"], labels)
            source += note
        if "test" not in splits:
            splits = split_off_test(splits["train"], self.test_share, where)
        train, clients = splits["train"], fields.get("clients", ())
        if len(lost := np.setdiff1d(np.arange(len(clients)), train.get("client", ()))):
            named = ", ".join(repr(clients[n]) for n in lost[:MAX_NAMED])
            source += f", without training rows: client{'s' * (len(lost) > 1)} {named}"
        if kind in LABELLED:
            source += _untrained(fields["classes"], train["label"], splits["test"]["label"])
        for split, columns in splits.items():
            if not length(columns):
                raise InputError(f"{source}: the {split} split has no rows")
        if kind in LABELLED and len(fields["classes"]) < 2:
            only = fields["classes"][0]
            raise InputError(f"{source}: all rows are of class {only!r}; two classes are needed")
        if kind == "image":
            pixels: Any = train["pixels"]
            mean, std = pixel_statistics(pixels)
            # Pixels are divided by std: do not divide by zero if a channel is constant.
            std = tuple(value or 1.0 for value in std)
            fields |= {"image_shape": pixels.shape[1:], "mean": mean, "std": std}
        if kind in TEXT_FIELDS:
            fields["fields"] = tuple(name for name in TEXT_FIELDS[kind] if name in train)
        return DatasetInfo(self.name, kind, source, **fields), splits


def _untrained(classes: Sequence[str], train: Any, test: Any) -> str:
    """Return a note on the classes without training rows, with how many test rows they have."""
    counts = np.bincount(test, minlength=len(classes))
    lost = np.setdiff1d(np.arange(len(classes)), train)
    if not len(lost):
        return ""
    named = join_limited([repr(classes[k]) for k in lost], 10)
    return (
        f", without training rows: class{'es' * (len(lost) > 1)} {named} "
        f"({counts[lost].sum()} of {len(test)} test rows)"
    )


class LocalImages(CustomDataset):
    """A folder with one folder of images for each class.

    The images are ``data.path/<class>/<image>``, or ``data.path/train/<class>/<image>`` and
    ``data.path/test/<class>/<image>``. Without ``test``, the test rows are in ``val``, ``valid`` or
    ``validation``. The classes are the folders' names, sorted. Images in folders below a class
    folder are of its class, as with torchvision's ``ImageFolder``.
    """

    name = "images"
    description = "your images: data.path, a folder of class folders"

    def key(self, hub: Path | None) -> str:
        """Return what the rows depend on: the files and the test share."""
        files = self._find_files()
        images = [(s, label, str(f), _content(f)) for s in files for f, label in files[s]]
        return self._key(json.dumps([str(self.path), images]))

    def content(self) -> str | None:
        """Return a hash of splits, classes and images, in order."""
        files = self._find_files()
        images = [(s, label, _content(f)) for s in files for f, label in files[s]]
        return _hash_of([images, PREPARATION_VERSION])

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Return the description, and ``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N].

        Raises:
            InputError: the folder does not exist, or a class folder holds no images.
            CorruptFileError: images cannot be read; the message names the files.
        """
        files = self._find_files()
        names = {(split, name) for split in files for _, name in files[split]}
        composed = sum(name != nfc(name) for _, name in names)
        files = {split: [(file, nfc(name)) for file, name in files[split]] for split in files}
        found = [pair for labelled in files.values() for pair in labelled]
        classes = tuple(sorted({label for _, label in found}))
        images: dict[str, list[NamedImage]] = {}
        splits: dict[str, Columns] = {}
        for split, labelled in files.items():
            images[split] = [(file, str(file)) for file, _ in labelled]
            labels = [classes.index(of) for _, of in labelled]
            splits[split] = {"label": np.array(labels, dtype=np.int64)}
        note, skipped = self._add_pixels(splits, images, progress)
        below = sum(nfc(file.parent.name) != label for file, label in found)
        nested = f", {below} of {len(found)} images in folders below their class's" if below else ""
        if composed:
            folders = f"{composed} class folder{'s' * (composed > 1)}"
            note += f", the names of {folders} changed to the Unicode form NFC"
        fields = {"classes": classes, "skipped": skipped}
        source = f"images:{self.path}{nested}{note}"
        return self._finish("image", source, splits, fields, str(self.path))

    def _find_files(self) -> dict[str, list[tuple[Path, str]]]:
        """Return pairs of file and class, by split."""
        root = self._existing_path("a folder that holds one folder of images for each class")
        if self.columns:
            raise InputError("data.columns: a folder of images has no columns; use dataset table")
        return find_images(root)


def _content(image: Path) -> str:
    """Return the hash of an image; a link that leads nowhere has none, and is named when read."""
    return digest(image) if image.exists() else "missing"


class LocalTable(CustomDataset):
    """A CSV, TSV, JSONL or Parquet file, or a folder with ``train.*`` and, optionally, ``test.*``.

    The dataset is prepared again when one of these files changes, or an image whose path they hold.
    """

    name = "table"
    description = "your CSV, TSV, JSONL or Parquet: data.path, data.columns"

    def key(self, hub: Path | None) -> str:
        """Return what the rows depend on: the files, the columns and the test share."""
        files = self._find_files()
        return self._files_key({**files, "images": self._listed_images(files)})

    def content(self) -> str | None:
        """Return a hash of splits, formats, files and images."""
        files = self._find_files()
        tables = [(s, file.suffix.lower(), digest(file)) for s in files for file in files[s]]
        parts = [tables, [digest(image) for image in self._listed_images(files)]]
        return _hash_of([*parts, PREPARATION_VERSION] if self._tables_of_images(files) else parts)

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Return the description, and the columns [N, ...] by split.

        Image paths in a table are relative to the folder of its first file.

        Raises:
            InputError: the file does not exist, or its columns do not make a dataset.
            CorruptFileError: a file or row is malformed; the message names file and row.
        """
        files = self._find_files()
        tables = {s: [self._named(f, s, read_table(f)) for f in files[s]] for s in files}
        folder = files["train"][0].parent
        return self._of_tables(f"{self.name}:{self.path}", tables, progress, folder)

    def _named(self, file: Path, split: str, table: pa.Table) -> tuple[str, pa.Table]:
        """Return what messages call a file of a split, and its rows."""
        return name_rows(file, table), table

    def _find_files(self) -> dict[str, list[Path]]:
        """Return the files of ``train`` and, if there are any, of ``test``."""
        suffixes = ", ".join(SUFFIXES)
        path = self._existing_path(
            f"a file ({suffixes}) or a folder with train.* and, optionally, test.*"
        )
        if path.is_file():
            if path.suffix.lower() not in SUFFIXES:
                raise InputError(f"data.path={self.path!r}: the file must be one of {suffixes}")
            return {"train": [path]}
        files_by_split = {}
        for split in self.splits:
            pattern = re.compile(rf"{split}(-.*)?\.[a-z]+", re.IGNORECASE)
            named = [file for file in path.iterdir() if pattern.fullmatch(file.name)]
            files = sorted(file for file in named if file.suffix.lower() in SUFFIXES)
            if len({file.suffix.lower() for file in files}) > 1:
                names = ", ".join(file.name for file in files)
                raise InputError(
                    f"data.path={self.path!r} holds {names}; all must have the same suffix"
                )
            if files:
                files_by_split[split] = files
        if "train" not in files_by_split:
            raise InputError(f"data.path={self.path!r} has no train.* file ({suffixes})")
        return files_by_split

    def _listed_images(self, files: Mapping[str, list[Path]]) -> list[Path]:
        """Return the image files whose paths the tables hold, as far as they exist."""
        column = self.columns.get("image", "image")
        images = []
        for file in self._tables_of_images(files):
            values = read_table(file, [column]).column(column)
            if is_text(values.type):
                images += [files["train"][0].parent / name for name in values.to_pylist() if name]
        return [image for image in images if image.is_file()]

    def _tables_of_images(self, files: Mapping[str, list[Path]]) -> list[Path]:
        """Return the tables that have a column of images."""
        found = {file: column_names(file) for split in files.values() for file in split}
        for file, names in found.items():
            check_unique(names, str(file))
        return [f for f, names in found.items() if self.columns.get("image", "image") in names]


class PassedRows(LocalTable):
    """Rows passed from Python: a folder of the cache, named by the hash of their values."""

    name = ROWS
    description = "rows passed from Python: trishul_ray.run(rows)"

    def content(self) -> str | None:
        """Return the hash that the folder is named by."""
        return f"sha256:{self._existing_path('passed from Python').name}"

    def _named(self, file: Path, split: str, table: pa.Table) -> tuple[str, pa.Table]:
        return PASSED + ", split test" * (split == "test"), table


class CustomHubDataset(CustomDataset):
    """Any dataset of the hub or a mirror: ``owner/name``, ``owner/name/config``, ``...@commit``.

    The test rows are its ``test`` split. If that is missing or has no labels, as in benchmarks
    that do not publish them, the ``validation`` split is used; without one, a share of ``train``.
    Without ``@commit`` the newest version is read once and then kept in the cache.
    """

    name = "hub"
    description = "any hub dataset: data.path=owner/name[/config][@commit]"

    def key(self, hub: Path | None) -> str:
        """Return what the rows depend on: the mirror's files or the hub's name, and the columns."""
        repo = self._repo()
        files = self._find_in_mirror(repo, hub)
        return self._key(repo.key) if files is None else self._files_key(files)

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Return the description, and the columns [N, ...] by split.

        Raises:
            InputError: neither the mirror nor the hub has the dataset, or its columns do not make
                a dataset.
            CorruptFileError: a file or row is malformed; the message names file and row.
        """
        repo = self._repo()
        files = self._find_in_mirror(repo, hub)
        tables: dict[str, NamedTables]
        if files is None:
            tables, source = self._download(repo, hub), repo.key
        else:
            read = {s: [(f, read_table(f)) for f in of] for s, of in files.items()}
            tables = {s: [(name_rows(f, t), t) for f, t in of] for s, of in read.items()}
            source = repo.mirror_source(hub, _all(files))
        used = {"train": tables["train"]}
        for split in ("test", "validation"):
            if "test" not in used and split in tables and has_labels(tables[split], self.columns):
                used["test"] = tables[split]
        return self._of_tables(source, used, progress)

    def _repo(self) -> HubRepo:
        """Return the repository that ``data.path`` names."""
        expected = "owner/name of a hub dataset, owner/name/config, or either with @commit"
        path, _, revision = self._required_path(expected).partition("@")
        parts = path.split("/")
        if not 2 <= len(parts) <= 3 or not all(parts):
            raise InputError(f"data.path={self.path!r} must be {expected}")
        repo, config = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
        patterns: tuple[str, ...] = (f"{config}/{{split}}-*.parquet",)
        if config is None:
            patterns = ("data/{split}-*.parquet", "{split}-*.parquet", "*/{split}-*.parquet")
            patterns += tuple("{split}" + suffix for suffix in SUFFIXES)
        return HubRepo(repo, config, revision or None, patterns)

    def _find_in_mirror(self, repo: HubRepo, hub: Path | None) -> dict[str, list[Path]] | None:
        """Return the files of the splits in the mirror, or None if it has no train split."""
        files = repo.mirror_files(hub, ("train",), ("test", "validation"))
        folders = sorted({file.parent.name for file in (files or {}).get("train", ())})
        if len(folders) > 1:
            names = ", ".join(f"{repo.repo}/{folder}" for folder in folders)
            raise InputError(
                f"data.path={self.path!r} has several configurations: use one of {names}"
            )
        commit = repo.mirror_source(hub, _all(files or {})).partition("@")[2]
        wanted = repo.revision or ""
        if commit and re.fullmatch("[0-9a-f]{7,40}", wanted) and not commit.startswith(wanted):
            raise InputError(
                f"data.path={self.path!r}: mirror {hub} has its files of commit {commit}; download "
                "those of the other one, or leave it out"
            )
        return files

    def _download(self, repo: HubRepo, hub: Path | None) -> dict[str, NamedTables]:
        try:
            names = repo.split_names()
            if "train" not in names:
                raise InputError("it has no train split")
            wanted = [split for split in names if split in ("train", "test", "validation")]
            return {s: [(repo.call_split(s), with_nfc_names(repo.download(s)))] for s in wanted}
        except InputError as error:
            example = f"{repo.repo}/{repo.file_patterns[0].format(split='train')}"
            way_out = f"set TRISHUL_HUB to a folder with {example}, or run once"
            what = f"data.path={self.path!r}"
            raise repo.not_found(what, hub, error, f"{way_out} with internet access") from error


def _all(files: Mapping[str, list[Path]]) -> list[Path]:
    return [file for of in files.values() for file in of]


def _hash_of(parts: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


#: The classes for your own data, by dataset name.
CUSTOM: dict[str, type[LocalImages] | type[LocalTable] | type[CustomHubDataset]] = {
    source.name: source for source in (LocalImages, LocalTable, CustomHubDataset, PassedRows)
}
