"""Your own data: a folder of images, a table file, or any dataset of the Hugging Face hub.

If there are no test rows, ``data.test_share`` of the rows is set aside as the test split.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trishul_ray.data.cleaning import NamedTables, check_unique, differing_in_case
from trishul_ray.data.column_mapping import ColumnMapping, build_dataset, make_info
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.images import (
    HEIC_SUFFIXES,
    PREPARATION_VERSION,
    NamedImage,
    decode_and_resize,
)
from trishul_ray.data.prepared import DatasetInfo, ProgressCallback
from trishul_ray.data.public import Columns, Splits
from trishul_ray.data.tables import (
    SUFFIXES,
    column_names,
    file_signature,
    is_text,
    read_files,
    read_table,
    split_off_test,
)
from trishul_ray.errors import InputError
from trishul_ray.files import digest

#: Name of the dataset of rows passed from Python, and of their folder in the cache.
ROWS = "rows"

#: What these rows are called in messages.
PASSED = "the rows passed from Python"

#: Suffixes of the files that are read as images in a class folder.
IMAGE_SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

#: Folders of test rows beside ``train``; the first that exists is read.
_TEST_FOLDERS = ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class CustomDataset:
    """Base of the kinds of your own data, with the settings of the section ``data``."""

    path: str | None
    columns: Mapping[str, str]
    test_share: float
    skip_broken: bool = False
    splits = ("train", "test")
    official = None

    def _key(self, source: str) -> str:
        # The number rises when the same rows get another description.
        key = f"{source}\n{sorted(self.columns.items())}\n{self.test_share!r}\n3"
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
        """Return a hash of splits, classes and images, in order; see :class:`CustomDataset`."""
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
        classes = tuple(sorted({label for labelled in files.values() for _, label in labelled}))
        images: dict[str, list[NamedImage]] = {
            split: [(file, str(file)) for file, _ in labelled] for split, labelled in files.items()
        }
        resized = decode_and_resize(
            images,
            lambda s, done: progress(f"images {s}", done),
            skip_broken=self.skip_broken,
        )
        splits: dict[str, Columns] = {}
        for split, labelled in files.items():
            labels = np.array([classes.index(label) for _, label in labelled], dtype=np.int64)
            kept = labels[resized.kept[split]]
            splits[split] = {"pixels": resized.pixels[split], "label": kept}
        if "test" not in splits:
            splits = split_off_test(splits["train"], self.test_share, str(self.path))
        found = [pair for labelled in files.values() for pair in labelled]
        below = sum(file.parent.name != label for file, label in found)
        nested = f", {below} of {len(found)} images in folders below their class's" if below else ""
        source = f"images:{self.path}{nested}{resized.note}{differing_in_case(classes)}"
        fields = {"classes": classes, "skipped": resized.skipped}
        return make_info("images", "image", source, splits, fields), splits

    def _find_files(self) -> dict[str, list[tuple[Path, str]]]:
        """Return pairs of file and class, by split."""
        root = self._existing_path("a folder that holds one folder of images for each class")
        if self.columns:
            raise InputError("data.columns: a folder of images has no columns; use dataset table")
        folders = {folder.name: folder for folder in _subfolders(root)}
        splits = {"train", *_TEST_FOLDERS} & set(folders)
        if "train" in folders and set(folders) == splits:
            found = {"train": _class_files(folders["train"])}
            test = next((name for name in _TEST_FOLDERS if name in folders), None)
            return found if test is None else found | {"test": _class_files(folders[test])}
        for name in sorted(splits):
            # All below it would be of one class.
            if not any(_is_photo(file.name) for file in folders[name].iterdir()):
                others = ", ".join(sorted(set(folders) - splits)) or "no train"
                raise InputError(
                    f"{folders[name]} holds folders instead of images, as one of test or training "
                    f"rows does, but beside it there is {others}; data.path must hold class "
                    "folders, or train and test alone"
                )
        return {"train": _class_files(root)}


def _class_files(root: Path) -> list[tuple[Path, str]]:
    """Return pairs of file and class of the class folders in ``root``, sorted.

    Images in folders below a class folder are of its class; links to folders are followed.
    """
    pairs = []
    for folder in _subfolders(root):
        files = sorted(_photos(folder), key=lambda file: (len(file.parts), file))
        if not files:
            raise InputError(f"class folder {folder} holds no image ({', '.join(IMAGE_SUFFIXES)})")
        pairs += [(file, folder.name) for file in files]
    if not pairs:
        raise InputError(
            f"data.path={str(root)!r} holds no class folders with images; it must hold "
            "<class>/*.jpg, or train/<class>/*.jpg and test/<class>/*.jpg"
        )
    return pairs


def _photos(folder: Path) -> Iterator[Path]:
    """Yield the images in and below a folder, also links that lead nowhere, which are named."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        # A link may lead to a folder above it.
        seen.add(os.path.realpath(place))
        inner = [name for name in folders if name[0] != "."]
        folders[:] = [n for n in inner if os.path.realpath(os.path.join(place, n)) not in seen]
        yield from (Path(place, name) for name in names if _is_photo(name))


def _is_photo(name: str) -> bool:
    # macOS puts a file ._NAME, which is no image, beside each NAME on a foreign disk. Photos in
    # HEIC are not passed over: as Pillow cannot read them, they are named.
    return name[0] != "." and Path(name).suffix.lower() in (*IMAGE_SUFFIXES, *HEIC_SUFFIXES)


def _content(image: Path) -> str:
    """Return the hash of an image; a link that leads nowhere has none, and is named when read."""
    return digest(image) if image.exists() else "missing"


def _subfolders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise InputError(f"data.path={str(root)!r} is not a folder of class folders")
    found = sorted(path for path in root.iterdir() if path.name[0] != ".")
    for path in found:
        if path.is_symlink() and not path.exists():
            raise InputError(f"{path} is a link that leads nowhere ({path.readlink()}); remove it")
    return [path for path in found if path.is_dir()]


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
        """Return a hash of splits, formats, files and images; see :class:`CustomDataset`."""
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
        tables = {s: self._named(s, read_files(split_files)) for s, split_files in files.items()}
        return build_dataset(
            self.name,
            f"{self.name}:{self.path}",
            tables,
            self.columns,
            self.test_share,
            image_folder=files["train"][0].parent,
            progress=progress,
            skip_broken=self.skip_broken,
        )

    def _named(self, split: str, tables: NamedTables) -> NamedTables:
        """Return the tables of a split with the names that messages call them by."""
        return tables

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
            files = sorted(
                file
                for file in path.iterdir()
                if pattern.fullmatch(file.name) and file.suffix.lower() in SUFFIXES
            )
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
        folder = files["train"][0].parent
        images = []
        for file in self._tables_of_images(files):
            values = read_table(file, [column]).column(column)
            if is_text(values.type):
                images += [folder / name for name in values.to_pylist() if name]
        return [image for image in images if image.is_file()]

    def _tables_of_images(self, files: Mapping[str, list[Path]]) -> list[Path]:
        """Return the tables that have a column of images."""
        column = self.columns.get("image", "image")
        found = {file: column_names(file) for split in files.values() for file in split}
        for file, names in found.items():
            check_unique(names, str(file))
        return [file for file, names in found.items() if column in names]


class PassedRows(LocalTable):
    """Rows passed from Python: a folder of the cache, named by the hash of their values."""

    name = ROWS
    description = "rows passed from Python: trishul_ray.run(rows)"

    def content(self) -> str | None:
        """Return the hash that the folder is named by."""
        return f"sha256:{self._existing_path('passed from Python').name}"

    def _named(self, split: str, tables: NamedTables) -> NamedTables:
        suffix = ", split test" * (split == "test")
        return [(f"{PASSED}{suffix}", table) for _, table in tables]


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
            tables = self._download(repo, hub)
            source = repo.key
        else:
            tables = {split: read_files(split_files) for split, split_files in files.items()}
            source = f"mirror:{repo.repo}"
        used = {"train": tables["train"]}
        for split in ("test", "validation"):
            if split in tables and self._has_labels(tables[split]):
                used["test"] = tables[split]
                break
        return build_dataset(
            "hub",
            source,
            used,
            self.columns,
            self.test_share,
            image_folder=None,
            progress=progress,
            skip_broken=self.skip_broken,
        )

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
        for pattern in repo.file_patterns:
            candidate = replace(repo, file_patterns=(pattern,))
            files = candidate.mirror_files(hub, ("train",))
            if files is None:
                continue
            folders = sorted({file.parent.name for file in files["train"]})
            if len(folders) > 1:
                names = ", ".join(f"{repo.repo}/{folder}" for folder in folders)
                raise InputError(
                    f"data.path={self.path!r} has several configurations: use one of {names}"
                )
            for split in ("test", "validation"):
                files |= candidate.mirror_files(hub, (split,)) or {}
            return files
        return None

    def _download(self, repo: HubRepo, hub: Path | None) -> dict[str, NamedTables]:
        try:
            names = repo.split_names()
            if "train" not in names:
                raise InputError("it has no train split")
            return {
                split: [(f"hub dataset {repo.repo}, split {split}", repo.download(split))]
                for split in names
                if split in ("train", "test", "validation")
            }
        except InputError as error:
            example = f"{repo.repo}/{repo.file_patterns[0].format(split='train')}"
            mirror = f"mirror {hub} does not have it" if hub else "no mirror is set"
            raise InputError(
                f"data.path={self.path!r} not found: {mirror} (storage.hub or TRISHUL_HUB), and "
                f"downloading it from the Hugging Face hub failed: {error}; set TRISHUL_HUB to a "
                f"folder with {example}, or run once with internet access"
            ) from error

    def _has_labels(self, tables: NamedTables) -> bool:
        """Return False if all labels of a split are -1, which marks unlabelled rows on the hub."""
        table = tables[0][1]
        mapping = ColumnMapping.resolve(self.columns, table.column_names)
        label = mapping.columns.get("label")
        if label is None or not pa.types.is_integer(table.schema.field(label).type):
            return True
        values: Any = table.column(label).to_numpy()
        return bool(len(values)) and not bool((values == -1).all())


def _hash_of(parts: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


#: The classes for your own data, by dataset name.
CUSTOM: dict[str, type[LocalImages] | type[LocalTable] | type[CustomHubDataset]] = {
    source.name: source for source in (LocalImages, LocalTable, CustomHubDataset, PassedRows)
}
