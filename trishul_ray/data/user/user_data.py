"""User data: folders of images, table files, datasets of the hub, or rows from Python.

Without test rows, a fraction ``data.test_share`` of the rows becomes the test split.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from trishul_ray.data.columns import is_text, nfc
from trishul_ray.data.dataset import DatasetInfo, Origin, ProgressCallback, Splits
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.images import PREPARATION_VERSION
from trishul_ray.data.tables import SUFFIXES, column_names, read_table
from trishul_ray.data.user.cleaning import is_unlabelled
from trishul_ray.data.user.python_rows import ROWS
from trishul_ray.data.user.tables_to_dataset import to_dataset
from trishul_ray.errors import InputError
from trishul_ray.storage.integrity import digest

#: Splits of user data that are read.
_SPLITS = ("train", "test", "validation")

#: Suffixes of files that are read as images in a class folder.
_IMAGES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

#: Folders of test rows next to ``train``; the first existing one is read.
_TEST_FOLDERS = ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class UserData(ABC):
    """Base class of the kinds of user data, with the settings of the section ``data``."""

    path: str | None
    columns: Mapping[str, str]
    test_share: float
    skip_broken: bool = False
    name: ClassVar[str]
    splits = ("train", "test")
    official = None

    def content(self) -> str | None:
        """Hash everything that determines the rows, wherever they are stored.

        Returns:
            The hash, or None if it is unknown before the rows are read, as on the hub.
        """
        return None

    def _required_path(self, expected: str) -> str:
        if self.path is None:
            raise InputError(f"data.path is not set; it must be {expected}")
        return self.path

    def _existing_path(self, expected: str) -> Path:
        path = Path(self._required_path(expected)).expanduser()
        if not path.exists():
            raise InputError(f"data.path={self.path!r} does not exist; it must be {expected}")
        return path

    @property
    def _origin(self) -> Origin:
        """The user's files, named by the last part of their path, which model cards show."""
        return Origin("file", Path(str(self.path)).expanduser().resolve().name)

    def key(self, hub: Path | None) -> str:
        """Return a text that changes whenever the rows or the settings may change."""
        settings = self.path, sorted(self.columns.items()), self.test_share, self.skip_broken
        return f"{self._source_key(hub)}\n{settings!r}\nimages {PREPARATION_VERSION}"

    def _source_key(self, hub: Path | None) -> str:
        return str(self.content())

    @abstractmethod
    def _read_tables(self, hub: Path | None) -> tuple[Origin, Mapping[str, Sequence[pa.Table]]]:
        """Read the tables of each of :data:`_SPLITS`, and return their origin."""

    def _image_folder(self) -> Path | None:
        """Return the folder that image paths in the tables are relative to, or None."""
        return None

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Read the description, and the columns [N, ...] of ``train`` and ``test``.

        The test rows are the first of the splits ``test`` and ``validation`` that has labels.

        Raises:
            InputError: The data do not exist, or their columns do not make a dataset.
            CorruptFileError: A file or row is malformed; the message names it.
        """
        origin, tables = self._read_tables(hub)
        used = {"train": tables["train"]}
        for split in _SPLITS[1:]:
            if split in tables and "test" not in used:
                if is_unlabelled(tables[split], self.columns):
                    origin = replace(origin, notes=(f"{split} rows have no labels: not used",))
                else:
                    used["test"] = tables[split]
        return to_dataset(
            self.name, origin, used, progress, columns=self.columns, test_share=self.test_share,
            skip_broken=self.skip_broken, folder=self._image_folder(),
        )  # fmt: skip


class ImageFolder(UserData):
    """A folder with one subfolder of images per class.

    The images are ``data.path/<class>/<image>``, or ``data.path/train/<class>/<image>`` and
    ``data.path/test/<class>/<image>``. If ``test`` does not exist, the test rows are in ``val``,
    ``valid`` or ``validation``. The classes are the sorted names of the folders. Images in
    subfolders of a class folder belong to its class.
    """

    name = "images"
    description = "your images: data.path, a folder of class folders"

    def content(self) -> str | None:
        """Hash splits, classes and images, in order."""
        return _hash_of([self._hashes(), PREPARATION_VERSION])

    def _read_tables(self, hub: Path | None) -> tuple[Origin, Mapping[str, Sequence[pa.Table]]]:
        found = self._find_files()
        names = sorted({nfc(name) for files in found.values() for _, name in files})
        numbers = {name: number for number, name in enumerate(names)}
        # Labels are numbers, as on the hub, because any folder name is a class, even "null".
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        tables = {}
        for split, files in found.items():
            labels = [numbers[nfc(name)] for _, name in files]
            columns = {"image": [str(file) for file, _ in files], "label": labels}
            tables[split] = [pa.table(columns, metadata=metadata)]
        return self._origin, tables

    def _image_folder(self) -> Path:
        return Path()

    def _hashes(self) -> list[tuple[str, str, str]]:
        # A broken link has no hash, and reading it reports the error.
        return [
            (split, label, digest(file) if file.exists() else "missing")
            for split, files in self._find_files().items()
            for file, label in files
        ]

    def _find_files(self) -> dict[str, list[tuple[Path, str]]]:
        """Find pairs of image and class, keyed by split."""
        root = self._existing_path("a folder with one folder of images per class")
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
                    f"{folders[name]} contains folders instead of images; data.path must contain "
                    "only class folders, or only train and test"
                )
        return {"train": _class_files(root)}


def _class_files(root: Path) -> list[tuple[Path, str]]:
    """Find pairs of image and class in the class folders of ``root``, sorted."""
    pairs = []
    for folder in _subfolders(root):
        files = [
            file for file in folder.rglob("*")
            if file.suffix.lower() in _IMAGES and not _is_hidden(file.relative_to(folder))
        ]  # fmt: skip
        if not files:
            raise InputError(f"class folder {folder} contains no image ({', '.join(_IMAGES)})")
        files.sort(key=lambda file: (len(file.parts), file))
        pairs += [(file, folder.name) for file in files]
    if not pairs:
        raise InputError(
            f"data.path={str(root)!r} contains no class folders with images; it must contain "
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
    """A CSV, TSV, JSON or Parquet file, or a folder with ``train.*`` and, optionally, test rows.

    The test rows are in ``test.*`` or, if it is missing or has no labels, in ``validation.*``. The
    dataset is prepared again when a file changes, or an image whose path a file contains.
    """

    name = "table"
    description = "your CSV, TSV, JSONL or Parquet: data.path, data.columns"

    def content(self) -> str | None:
        """Hash splits, formats, files and images."""
        files = self._find_files()
        tables = [(s, file.suffix.lower(), digest(file)) for s in files for file in files[s]]
        column, folder = self.columns.get("image", "image"), files["train"][0].parent
        of_images = [file for file in chain(*files.values()) if column in column_names(file)]
        images = [image for file in of_images for image in _listed_images(file, column, folder)]
        parts = [tables, [digest(image) for image in images]]
        return _hash_of([*parts, PREPARATION_VERSION] if of_images else parts)

    def _read_tables(self, hub: Path | None) -> tuple[Origin, Mapping[str, Sequence[pa.Table]]]:
        files = self._find_files()
        tables = {split: [read_table(file) for file in found] for split, found in files.items()}
        return self._origin, tables

    def _image_folder(self) -> Path:
        return self._find_files()["train"][0].parent

    def _find_files(self) -> dict[str, list[Path]]:
        """Find the files of ``train`` and of the other existing splits."""
        suffixes = ", ".join(SUFFIXES)
        path = self._existing_path(f"a file ({suffixes}), or a folder with train.* and test.*")
        if path.is_file():
            if path.suffix.lower() not in SUFFIXES:
                raise InputError(f"data.path={self.path!r}: the file must be one of {suffixes}")
            return {"train": [path]}
        found = {}
        for split in _SPLITS:
            pattern = re.compile(rf"{split}(-.*)?\.[a-z]+", re.IGNORECASE)
            named = [file for file in path.iterdir() if pattern.fullmatch(file.name)]
            files = sorted(file for file in named if file.suffix.lower() in SUFFIXES)
            if len({file.suffix.lower() for file in files}) > 1:
                names = ", ".join(file.name for file in files)
                raise InputError(
                    f"data.path={self.path!r} contains {names}; all must have the same suffix"
                )
            if files:
                found[split] = files
        if "train" not in found:
            raise InputError(f"data.path={self.path!r} has no train.* file ({suffixes})")
        return found


def _listed_images(file: Path, column: str, folder: Path) -> list[Path]:
    """List the existing image files whose paths are in a column of a table."""
    values = read_table(file).column(column)
    paths = values.to_pylist() if is_text(values.type) else []
    return [folder / path for path in paths if path and (folder / path).is_file()]


class PythonRows(TableFiles):
    """Rows from Python, in a folder of the cache that is named after the hash of their values."""

    name = ROWS
    description = "rows passed from Python: trishul_ray.run(rows)"

    def content(self) -> str | None:
        """Return the hash in the name of the folder."""
        return f"sha256:{self._existing_path('passed from Python').name}"

    def _read_tables(self, hub: Path | None) -> tuple[Origin, Mapping[str, Sequence[pa.Table]]]:
        return Origin("python", "rows"), super()._read_tables(hub)[1]


class HubData(UserData):
    """A dataset of the hub or a mirror: ``owner/name``, ``owner/name/config``, or with ``@commit``.

    The test rows are its ``test`` split. If that is missing or has no labels, as in benchmarks that
    do not publish them, the ``validation`` split is used, and without one, a part of ``train``.
    Without ``@commit``, the newest version is read once and then kept in the cache.
    """

    name = "hub"
    description = "any hub dataset: data.path=owner/name[/config][@commit]"

    def _source_key(self, hub: Path | None) -> str:
        return self._repo(hub).key(hub, ("train",), _SPLITS[1:])

    def _read_tables(self, hub: Path | None) -> tuple[Origin, Mapping[str, Sequence[pa.Table]]]:
        return self._repo(hub).read(hub, ("train",), _SPLITS[1:])

    def _repo(self, hub: Path | None) -> HubRepo:
        """Return the repository that ``data.path`` names.

        Raises:
            InputError: The path is malformed, or it names no configuration of a mirror with
                several.
        """
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
        found = HubRepo(repo, config, revision or None, patterns)
        files = found.mirror_files(hub, ("train",)) or {"train": []}
        if len(folders := sorted({file.parent.name for file in files["train"]})) > 1:
            names = ", ".join(f"{repo}/{folder}" for folder in folders)
            raise InputError(
                f"data.path={self.path!r} has several configurations; use one of {names}"
            )
        return found


def _hash_of(parts: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


#: The classes of user data, keyed by dataset name.
USER_DATA: dict[str, type[ImageFolder | TableFiles | HubData]] = {
    source.name: source for source in (ImageFolder, TableFiles, HubData, PythonRows)
}
