"""User data: a folder of images, a table file, any dataset of the hub, or rows from Python.

If there are no test rows, ``data.test_share`` of the rows becomes the test split.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from trishul_ray.data.columns import (
    holds_images,
    is_text,
    nfc,
    number_names,
    read_answers,
    read_labels,
    read_texts,
)
from trishul_ray.data.conversations import plain_choices, plain_messages, plain_references
from trishul_ray.data.dataset import (
    LABELLED,
    Column,
    Columns,
    DatasetInfo,
    Kind,
    Origin,
    ProgressCallback,
    Splits,
    length,
    split_off_test,
    take_rows,
)
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.images import (
    PREPARATION_VERSION,
    NamedImage,
    decode_and_resize,
    pixel_statistics,
)
from trishul_ray.data.tables import SUFFIXES, column_names, file_signature, read_table
from trishul_ray.data.user.cleaning import (
    Rows,
    clean,
    common_class_names,
    doubt_labels,
    find_columns,
    is_unlabelled,
    join_splits,
)
from trishul_ray.data.user.python_rows import ROWS
from trishul_ray.errors import CorruptFileError, InputError, first_line, join_limited
from trishul_ray.storage.integrity import digest

#: Columns of texts that rows may have, in reading order.
_TEXT_FIELDS: dict[Kind, tuple[str, ...]] = {
    "text": ("text", "text_pair"),
    "qa": ("question", "context"),
    "instruction": ("instruction", "input", "messages"),
}

#: Suffixes of the files that are read as images in a class folder.
_IMAGES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

#: Folders of test rows next to ``train``; the first that exists is read.
_TEST_FOLDERS = ("test", "val", "valid", "validation")

#: Names to list in a note.
_MAX_NAMED = 10


@dataclass(frozen=True)
class UserData:
    """Base of the kinds of user data, with the settings of the section ``data``."""

    path: str | None
    columns: Mapping[str, str]
    test_share: float
    skip_broken: bool = False
    name: ClassVar[str]
    splits = ("train", "test")
    official = None

    def _key(self, source: str) -> str:
        settings = sorted(self.columns.items()), self.test_share, self.skip_broken
        return f"{source}\n{settings!r}\nimages {PREPARATION_VERSION}"

    def content(self) -> str | None:
        """Return a hash of everything that determines the rows, wherever they are stored.

        None if it is unknown before the rows are read, as on the hub.
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
        origin: Origin,
        tables: Mapping[str, Sequence[pa.Table]],
        progress: ProgressCallback,
        folder: Path | None = None,
    ) -> tuple[DatasetInfo, Splits]:
        """Return the description of the tables of each split, and their columns.

        Paths of images are relative to ``folder``.
        """
        where = origin.place
        try:
            rows = join_splits(tables, where)
            if not any(map(len, tables["train"])):
                raise InputError(f"{where}: there are no rows")
            kind, names = find_columns(self.columns, rows.table.column_names)
            classes = None
            if kind in LABELLED:
                classes = common_class_names(chain(*tables.values()), names["label"])
            if "test" in tables and is_unlabelled(tables["test"], self.columns):
                raise InputError(
                    f"{where}: all labels of the test split are -1, which marks rows without "
                    "labels; remove it, or replace it by rows with labels"
                )
            renamed = rows.table.select(list(names.values())).rename_columns(list(names))
            rows = replace(rows, table=renamed)
            if kind == "instruction":
                rows = _with_conversations(rows)
            rows = clean(rows, names, classes, skip_broken=self.skip_broken)
            columns, fields = _read_columns(kind, rows, classes)
        except pa.ArrowException as error:
            raise CorruptFileError(f"{where}: {first_line(error)}") from error
        if kind == "image":
            images = _list_images(rows, folder)
            columns, rows = self._with_pixels(columns, rows, images, progress)
        splits: dict[str, Columns] = {}
        for split in tables:
            found = take_rows(columns, np.flatnonzero(rows.split == split))
            splits[split] = {k: v for k, v in found.items() if not _is_absent(k, v)}
            progress(f"{self.name} {split}", 1.0)
        origin = replace(origin, notes=(*origin.notes, *rows.notes))
        return self._finish(kind, origin, splits, fields | {"skipped": rows.skipped})

    def _with_pixels(
        self, columns: Columns, rows: Rows, images: Sequence[NamedImage], progress: ProgressCallback
    ) -> tuple[Columns, Rows]:
        """Return the columns with ``pixels``, without the rows of broken images."""
        resized = decode_and_resize(
            images, lambda done: progress(f"{self.name} images", done), skip_broken=self.skip_broken
        )
        columns = take_rows(columns, np.flatnonzero(resized.readable))
        rows = rows.take(resized.readable, resized.skipped, resized.notes)
        return columns | {"pixels": resized.pixels}, rows

    def _finish(
        self, kind: Kind, origin: Origin, splits: dict[str, Columns], fields: dict[str, Any]
    ) -> tuple[DatasetInfo, Splits]:
        """Return the description and the columns of ``train`` and ``test``.

        ``fields`` are the known fields of the description. A split without rows is an InputError,
        as are rows of a single class.
        """
        where, classes = origin.place, fields.get("classes", ())
        if kind in LABELLED:
            labels = np.concatenate([columns["label"] for columns in splits.values()])
            fields["doubt"] = doubt_labels(classes, labels)
        if "test" not in splits:
            splits = split_off_test(splits["train"], self.test_share, where)
        for split, columns in splits.items():
            if not length(columns):
                raise InputError(f"{where}: the {split} split has no rows")
        if kind in LABELLED and len(classes) < 2:
            raise InputError(
                f"{where}: all rows are of class {classes[0]!r}; two classes are needed"
            )
        train, notes = splits["train"], []
        for what, column, names in (
            ("classes", "label", classes),
            ("clients", "client", fields.get("clients", ())),
        ):
            if len(lost := np.setdiff1d(np.arange(len(names)), train.get(column, ()))):
                named = join_limited([repr(names[n]) for n in lost], _MAX_NAMED)
                notes.append(f"{what} without training rows: {named}")
        if len({name.casefold() for name in classes}) < len(classes):
            notes.append("warning: some class names differ only in case")
        if kind == "image":
            pixels: Any = train["pixels"]
            mean, std = pixel_statistics(pixels)
            # Pixels are divided by std, which is zero if a channel is constant.
            std = tuple(value or 1.0 for value in std)
            fields |= {"image_shape": pixels.shape[1:], "mean": mean, "std": std}
        elif kind != "qa":
            fields["fields"] = tuple(name for name in _TEXT_FIELDS[kind] if name in train)
        origin = replace(origin, notes=(*origin.notes, *notes))
        return DatasetInfo(self.name, kind, origin=origin, **fields), splits


#: Values of columns that only some splits have, in the other splits.
_NOTHING = {"client": -1, "group": -1, "choice": -1, "choices": "[]", "references": "[]"}


def _is_absent(name: str, values: Column) -> bool:
    return name in _NOTHING and set(pa.array(values).to_pylist()) == {_NOTHING[name]}


def _with_conversations(rows: Rows) -> Rows:
    """Return rows of instructions whose conversations are JSON texts, null without an answer.

    A prompt and a completion that are lists of messages are one conversation (TRL).
    """
    table = rows.table
    parts = [n for n in ("messages", "instruction", "output") if n in table.column_names]
    lists = [name for name in parts if pa.types.is_list(table.schema.field(name).type)]
    if "messages" not in parts and not lists:
        return rows
    if len(parts) > 1 and len(lists) < len(parts):
        raise CorruptFileError(
            f"{rows.where}: prompts and answers must be both texts, or both lists of messages"
        )
    values, *answers = (table.column(part).to_pylist() for part in parts)
    for more in answers:
        pairs = zip(values, more, strict=True)
        values = [[*(asked or ()), *(answer or ())] or None for asked, answer in pairs]
    names = [rows.name(row) for row in range(len(table))]
    messages = plain_messages(values, names, "+".join(parts))
    unread = [*parts, *({"input"} & {*table.column_names})]
    return replace(rows, table=table.drop_columns(unread).append_column("messages", messages))


def _read_columns(
    kind: Kind, rows: Rows, classes: tuple[str, ...] | None
) -> tuple[Columns, dict[str, Any]]:
    """Return all columns but the images, and the names of classes, groups and clients."""
    table, where, fields = rows.table, rows.where, dict[str, Any]()
    texts = _TEXT_FIELDS.get(kind, ()) + ("output",) * (kind == "instruction")
    columns: Columns = {
        name: read_texts(table, name, where) for name in texts if name in table.column_names
    }
    if kind == "qa":
        columns["answers"] = read_answers(table, "answers", where)
    named = {"client": "clients", "group": "groups"}
    if kind in LABELLED and classes is not None:
        columns["label"] = read_labels(table, "label", len(classes), where, classes)
        fields["classes"] = classes
    elif kind in LABELLED:
        named["label"] = "classes"
    if kind == "instruction":
        names = [rows.name(row) for row in range(len(table))]
        if "references" in table.column_names:
            further = table.column("references").to_pylist()
            columns["references"] = plain_references(further, names, "references")
        if {"choices", "choice"} <= {*table.column_names}:
            lists, right = (table.column(name).to_pylist() for name in ("choices", "choice"))
            columns |= plain_choices(lists, right, names, "choices")
    for name, field in named.items():
        if name in table.column_names:
            values = table.column(name).combine_chunks()
            columns[name], fields[field] = number_names(values)
    return columns, fields


def _list_images(rows: Rows, folder: Path | None) -> list[NamedImage]:
    """Return the images, encoded or as paths of their files."""
    values = rows.table.column("image")
    kind, images = values.type, list[NamedImage]()
    if is_text(kind) and folder is not None:
        paths = [folder / value for value in values.to_pylist()]
        return [(path, rows.name(row)) for row, path in enumerate(paths)]
    if not (holds_images(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise CorruptFileError(f"{rows.where}: column 'image' is {kind}, not images")
    for row, value in enumerate(values.to_pylist()):
        encoded = value["bytes"] if holds_images(kind) else value
        if encoded is None:
            raise CorruptFileError(f"{rows.name(row)}: the image has no bytes")
        images.append((encoded, rows.name(row)))
    return images


class ImageFolder(UserData):
    """A folder with one folder of images per class.

    The images are ``data.path/<class>/<image>``, or ``data.path/train/<class>/<image>`` and
    ``data.path/test/<class>/<image>``. Without ``test``, the test rows are in ``val``, ``valid`` or
    ``validation``. The classes are the folders' names, sorted. Images in folders below a class
    folder belong to its class.
    """

    name = "images"
    description = "your images: data.path, a folder of class folders"

    def key(self, hub: Path | None) -> str:
        """Return what determines the rows: the files and the test share."""
        return self._key(json.dumps([str(self.path), self._hashes()]))

    def content(self) -> str | None:
        """Return a hash of splits, classes and images, in order."""
        return _hash_of([self._hashes(), PREPARATION_VERSION])

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Return the description, and ``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N].

        Raises:
            InputError: The folder does not exist, or a class folder holds no images.
            CorruptFileError: Images cannot be read; the message names the files.
        """
        found = self._find_files()
        files = [(s, nfc(label), file) for s, of in found.items() for file, label in of]
        classes = tuple(sorted({label for _, label, _ in files}))
        labels = np.array([classes.index(label) for _, label, _ in files], np.int64)
        split = np.array([split for split, _, _ in files])
        rows = Rows(pa.table({"label": labels}), split, np.arange(len(files)), str(self.path))
        images: list[NamedImage] = [(file, str(file)) for _, _, file in files]
        columns, rows = self._with_pixels({"label": labels}, rows, images, progress)
        splits = {s: take_rows(columns, np.flatnonzero(rows.split == s)) for s in found}
        origin = Origin("file", str(self.path), notes=rows.notes)
        return self._finish("image", origin, splits, {"classes": classes, "skipped": rows.skipped})

    def _hashes(self) -> list[tuple[str, str, str]]:
        # A link without a target has no hash, and is named when it is read.
        return [
            (split, label, digest(file) if file.exists() else "missing")
            for split, files in self._find_files().items()
            for file, label in files
        ]

    def _find_files(self) -> dict[str, list[tuple[Path, str]]]:
        """Return pairs of image and class, by split."""
        root = self._existing_path("a folder that holds one folder of images per class")
        if self.columns:
            raise InputError("data.columns: a folder of images has no columns; use dataset table")
        folders = {folder.name: folder for folder in _subfolders(root)}
        splits = {"train", *_TEST_FOLDERS} & set(folders)
        if "train" in folders and set(folders) == splits:
            test = next((folders[name] for name in _TEST_FOLDERS if name in folders), None)
            found = {"train": _class_files(folders["train"])}
            return found if test is None else found | {"test": _class_files(test)}
        for name in sorted(splits):
            if not any(file.suffix.lower() in _IMAGES for file in folders[name].iterdir()):
                raise InputError(
                    f"{folders[name]} holds folders instead of images; data.path must hold only "
                    "class folders, or only train and test"
                )
        return {"train": _class_files(root)}


def _class_files(root: Path) -> list[tuple[Path, str]]:
    """Return pairs of image and class of the class folders in ``root``, sorted."""
    pairs = []
    for folder in _subfolders(root):
        files = [
            file for file in folder.rglob("*")
            if file.suffix.lower() in _IMAGES and not _is_hidden(file.relative_to(folder))
        ]  # fmt: skip
        if not files:
            raise InputError(f"class folder {folder} holds no image ({', '.join(_IMAGES)})")
        files.sort(key=lambda file: (len(file.parts), file))
        pairs += [(file, folder.name) for file in files]
    if not pairs:
        raise InputError(
            f"data.path={str(root)!r} holds no class folders with images; it must hold "
            "<class>/*.jpg, or train/<class>/*.jpg and test/<class>/*.jpg"
        )
    return pairs


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _subfolders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise InputError(f"data.path={str(root)!r} is not a folder of class folders")
    return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")


class TableFiles(UserData):
    """A CSV, TSV, JSON or Parquet file, or a folder with ``train.*`` and, optionally, ``test.*``.

    The dataset is prepared again when a file changes, or an image whose path a file holds.
    """

    name = "table"
    description = "your CSV, TSV, JSONL or Parquet: data.path, data.columns"

    def key(self, hub: Path | None) -> str:
        """Return what determines the rows: the files, the columns and the test share."""
        files = self._find_files()
        return self._key(file_signature([*_all(files), *self._listed_images(files)]))

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
            InputError: The file does not exist, or its columns make no dataset.
            CorruptFileError: A file or row is malformed; the message names it.
        """
        files = self._find_files()
        tables = {split: [read_table(f) for f in of] for split, of in files.items()}
        return self._of_tables(self._origin(), tables, progress, files["train"][0].parent)

    def _origin(self) -> Origin:
        return Origin("file", str(self.path))

    def _find_files(self) -> dict[str, list[Path]]:
        """Return the files of ``train`` and, if there are any, of ``test``."""
        suffixes = ", ".join(SUFFIXES)
        path = self._existing_path(f"a file ({suffixes}), or a folder with train.* and test.*")
        if path.is_file():
            if path.suffix.lower() not in SUFFIXES:
                raise InputError(f"data.path={self.path!r}: the file must be one of {suffixes}")
            return {"train": [path]}
        found = {}
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
                found[split] = files
        if "train" not in found:
            raise InputError(f"data.path={self.path!r} has no train.* file ({suffixes})")
        return found

    def _listed_images(self, files: Mapping[str, list[Path]]) -> list[Path]:
        """Return the image files whose paths the tables hold, as far as they exist."""
        name, folder, images = self.columns.get("image", "image"), files["train"][0].parent, []
        for file in self._tables_of_images(files):
            values = read_table(file, [name]).column(name)
            if is_text(values.type):
                images += [folder / path for path in values.to_pylist() if path]
        return [image for image in images if image.is_file()]

    def _tables_of_images(self, files: Mapping[str, list[Path]]) -> list[Path]:
        name = self.columns.get("image", "image")
        return [file for file in _all(files) if name in column_names(file)]


class PythonRows(TableFiles):
    """Rows passed from Python: a folder of the cache, named by the hash of their values."""

    name = ROWS
    description = "rows passed from Python: trishul_ray.run(rows)"

    def content(self) -> str | None:
        """Return the hash that the folder is named by."""
        return f"sha256:{self._existing_path('passed from Python').name}"

    def _origin(self) -> Origin:
        return Origin("python", "rows")


class HubData(UserData):
    """Any dataset of the hub or a mirror: ``owner/name``, ``owner/name/config``, ``...@commit``.

    The test rows are its ``test`` split. If that is missing or has no labels, as in benchmarks
    that do not publish them, the ``validation`` split is used; without one, a part of ``train``.
    Without ``@commit`` the newest version is read once and then kept in the cache.
    """

    name = "hub"
    description = "any hub dataset: data.path=owner/name[/config][@commit]"

    def key(self, hub: Path | None) -> str:
        """Return what determines the rows: the mirror's files or the hub's name, and columns."""
        repo = self._repo()
        files = self._find_in_mirror(repo, hub)
        return self._key(repo.key if files is None else file_signature(_all(files)))

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Return the description, and the columns [N, ...] by split.

        Raises:
            InputError: Neither the mirror nor the hub has the dataset, or its columns make no
                dataset.
            CorruptFileError: A file or row is malformed; the message names it.
        """
        repo = self._repo()
        files = self._find_in_mirror(repo, hub)
        if files is None:
            tables = {s: [t] for s, t in repo.download(hub).items() if s in _HUB_SPLITS}
            if "train" not in tables:
                raise InputError(f"data.path={self.path!r} has no train split")
        else:
            tables = {split: [read_table(f) for f in of] for split, of in files.items()}
        used = {"train": tables["train"]}
        for split in _HUB_SPLITS[1:]:
            known = split in tables and not is_unlabelled(tables[split], self.columns)
            if "test" not in used and known:
                used["test"] = tables[split]
        return self._of_tables(repo.origin(mirrored=files is not None), used, progress)

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
        files = repo.mirror_files(hub, ("train",), _HUB_SPLITS[1:])
        folders = sorted({file.parent.name for file in (files or {}).get("train", ())})
        if len(folders) > 1:
            names = ", ".join(f"{repo.repo}/{folder}" for folder in folders)
            raise InputError(
                f"data.path={self.path!r} has several configurations: use one of {names}"
            )
        return files


#: Splits of the hub that are read, the test rows in order of preference.
_HUB_SPLITS = ("train", "test", "validation")


def _all(files: Mapping[str, list[Path]]) -> list[Path]:
    return [file for of in files.values() for file in of]


def _hash_of(parts: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


#: The classes of user data, by dataset name.
USER_DATA: dict[str, type[ImageFolder | TableFiles | HubData]] = {
    source.name: source for source in (ImageFolder, TableFiles, HubData, PythonRows)
}
