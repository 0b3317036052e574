"""One's own data: a folder of images, a table in a file, or any dataset of the hub.

Where there are no test rows, ``data.test_share`` of the rows is set aside for them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trishul_ray.data.column_mapping import Mapped, Tables, build, describe, set_aside
from trishul_ray.data.hub import HubRepo, read_files
from trishul_ray.data.images import Item, decode_all
from trishul_ray.data.prepared import DatasetInfo, Progress
from trishul_ray.data.public import Columns
from trishul_ray.data.tables import SUFFIXES, state_of
from trishul_ray.errors import InputError

#: Endings of what is taken for an image in a class folder.
IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class OwnData:
    """What the three sources share.

    Attributes:
        path: ``data.path``.
        columns: ``data.columns``.
        test_share: ``data.test_share``.
    """

    path: str | None
    columns: Mapping[str, str]
    test_share: float
    splits = ("train", "test")
    official = None

    def _key(self, state: str) -> str:
        return f"{state}\n{sorted(self.columns.items())}\n{self.test_share!r}"

    def _set(self, what: str) -> str:
        if self.path is None:
            raise InputError(f"data.path is not set: it must be {what}")
        return self.path

    def _local(self, what: str) -> Path:
        path = Path(self._set(what)).expanduser()
        if not path.exists():
            raise InputError(f"data.path={self.path!r} does not exist; it must be {what}")
        return path


class OwnImages(OwnData):
    """``data.path/<class>/<image>``, or ``data.path/train/<class>/...`` and ``.../test/...``."""

    name = "images"
    description = "your images: data.path, a folder of class folders"

    def key(self, hub: Path | None) -> str:
        """What decides the rows: the files, and what is set aside."""
        items = self._items()
        return self._key(state_of(file for found in items.values() for file, _ in found))

    def read(
        self, hub: Path | None, progress: Progress
    ) -> tuple[DatasetInfo, Mapping[str, Columns]]:
        """``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N]; classes are the folders' names.

        Raises:
            InputError: no such folder, or no images in a class folder.
            CorruptFileError: an image cannot be read; names the file.
        """
        found = self._items()
        classes = tuple(sorted({label for items in found.values() for _, label in items}))
        images: dict[str, list[Item]] = {
            split: [(file, str(file)) for file, _ in items] for split, items in found.items()
        }

        def tell(split: str, fraction: float) -> None:
            progress(f"images {split}", fraction)

        pixels, note = decode_all(images, tell)
        splits: dict[str, Columns] = {
            split: {
                "pixels": pixels[split],
                "label": np.array([classes.index(label) for _, label in items], dtype=np.int64),
            }
            for split, items in found.items()
        }
        if "test" not in splits:
            splits = set_aside(splits["train"], self.test_share)
        source = f"images:{self.path}{note}"
        return describe("images", "image", source, splits, {"classes": classes}), splits

    def _items(self) -> dict[str, list[tuple[Path, str]]]:
        """Files with their classes, by split."""
        root = self._local("a folder that holds one folder of images for each class")
        if self.columns:
            raise InputError("data.columns: a folder of images has no columns; use dataset table")
        inside = _folders(root)
        named = {folder.name: folder for folder in inside}
        if "train" in named and set(named) <= {"train", "test"}:
            return {split: _class_files(named[split]) for split in self.splits if split in named}
        return {"train": _class_files(root)}


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise InputError(f"data.path={str(root)!r} is not a folder of class folders")
    return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")


def _class_files(root: Path) -> list[tuple[Path, str]]:
    found = []
    for folder in _folders(root):
        files = sorted(f for f in folder.iterdir() if f.suffix.lower() in IMAGES and f.is_file())
        if not files:
            raise InputError(f"class folder {folder} holds no image ({', '.join(IMAGES)})")
        found += [(file, folder.name) for file in files]
    if not found:
        raise InputError(f"{root} holds no class folders with images")
    return found


class OwnTable(OwnData):
    """A CSV, TSV, JSONL or Parquet file, or a folder with ``train.*`` and maybe ``test.*``.

    A change of these files is noticed; one of image files that they name by their paths is not.
    """

    name = "table"
    description = "your CSV, TSV, JSONL or Parquet: data.path, data.columns"

    def key(self, hub: Path | None) -> str:
        """What decides the rows: the files, the columns, and what is set aside."""
        files = self._files()
        return self._key(state_of(file for found in files.values() for file in found))

    def read(
        self, hub: Path | None, progress: Progress
    ) -> tuple[DatasetInfo, Mapping[str, Columns]]:
        """See :func:`trishul_ray.data.column_mapping.build`; image paths are relative to the file.

        Raises:
            InputError: no such file, or its columns do not make a dataset.
            CorruptFileError: a file or row is malformed; names file and row.
        """
        files = self._files()
        tables = {split: read_files(found) for split, found in files.items()}
        return build(
            "table",
            f"table:{self.path}",
            tables,
            self.columns,
            self.test_share,
            folder=files["train"][0].parent,
            progress=progress,
        )

    def _files(self) -> dict[str, list[Path]]:
        ways = ", ".join(SUFFIXES)
        path = self._local(f"a file ({ways}) or a folder with train.* and, if there is one, test.*")
        if path.is_file():
            if path.suffix.lower() not in SUFFIXES:
                raise InputError(f"data.path={self.path!r}: files are {ways}")
            return {"train": [path]}
        found = {}
        for split in self.splits:
            either = re.compile(rf"{split}(-.*)?\.[a-z]+", re.IGNORECASE)
            files = sorted(
                file
                for file in path.iterdir()
                if either.fullmatch(file.name) and file.suffix.lower() in SUFFIXES
            )
            if len({file.suffix.lower() for file in files}) > 1:
                names = ", ".join(file.name for file in files)
                raise InputError(f"data.path={self.path!r}: {names}: of one kind only, please")
            if files:
                found[split] = files
        if "train" not in found:
            raise InputError(f"data.path={self.path!r} has no train.* file ({ways})")
        return found


class OwnHub(OwnData):
    """Any dataset of the hub or a mirror: ``owner/name``, ``owner/name/config``, ``...@commit``.

    The test rows are its ``test`` split; where that is missing or, as in benchmarks that keep
    their answers, without labels, its ``validation`` split; where there is neither, a share of
    ``train``. Without ``@commit`` the newest version is read once and then kept in the cache.
    """

    name = "hub"
    description = "any hub dataset: data.path=owner/name[/config][@commit]"

    def key(self, hub: Path | None) -> str:
        """What decides the rows: the mirror's files or the hub's name, and the columns."""
        repo = self._repo()
        files = self._mirrored(repo, hub)
        if files is None:
            return self._key(repo.key)
        return self._key(state_of(file for found in files.values() for file in found))

    def read(
        self, hub: Path | None, progress: Progress
    ) -> tuple[DatasetInfo, Mapping[str, Columns]]:
        """See :func:`trishul_ray.data.column_mapping.build`.

        Raises:
            InputError: neither mirror nor hub has it, or its columns do not make a dataset.
            CorruptFileError: a file or row is malformed; names file and row.
        """
        repo = self._repo()
        files = self._mirrored(repo, hub)
        if files is None:
            tables: dict[str, Tables] = self._download(repo, hub)
        else:
            tables = {split: read_files(found) for split, found in files.items()}
        chosen = {"train": tables["train"]}
        for split in ("test", "validation"):
            if split in tables and self._labelled(tables[split]):
                chosen["test"] = tables[split]
                break
        source = f"mirror:{repo.repo}" if files is not None else repo.key
        return build(
            "hub", source, chosen, self.columns, self.test_share, folder=None, progress=progress
        )

    def _repo(self) -> HubRepo:
        what = "owner/name of a hub dataset, owner/name/config, or either with @commit"
        path, _, revision = self._set(what).partition("@")
        parts = path.split("/")
        if not 2 <= len(parts) <= 3 or not all(parts):
            raise InputError(f"data.path={self.path!r} must be {what}")
        repo, config = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
        layouts: tuple[str, ...] = (f"{config}/{{split}}-*.parquet",)
        if config is None:
            layouts = ("data/{split}-*.parquet", "{split}-*.parquet", "*/{split}-*.parquet")
            layouts += tuple("{split}" + suffix for suffix in SUFFIXES)
        return HubRepo(repo, config, revision or None, layouts)

    def _mirrored(self, repo: HubRepo, hub: Path | None) -> dict[str, list[Path]] | None:
        for layout in repo.layouts:
            one = replace(repo, layouts=(layout,))
            files = one.mirrored(hub, ("train",))
            if files is None:
                continue
            folders = sorted({file.parent.name for file in files["train"]})
            if len(folders) > 1:
                names = ", ".join(f"{repo.repo}/{folder}" for folder in folders)
                raise InputError(f"data.path={self.path!r} has configurations: name one of {names}")
            for split in ("test", "validation"):
                files |= one.mirrored(hub, (split,)) or {}
            return files
        return None

    def _download(self, repo: HubRepo, hub: Path | None) -> dict[str, Tables]:
        try:
            names = [split for split in repo.splits() if split in ("train", "test", "validation")]
            if "train" not in names:
                raise InputError("it has no train split")
            return {
                split: [(f"hub dataset {repo.repo}, split {split}", repo.download(split))]
                for split in names
            }
        except InputError as error:
            looked = f"mirror {hub} does not hold it" if hub else "no mirror is set"
            raise InputError(
                f"data.path={self.path!r} not found: {looked} (storage.hub or TRISHUL_HUB), and "
                f"the Hugging Face hub did not give it: {error}; set TRISHUL_HUB to a folder with "
                f"{repo.repo}/{repo.layouts[0].format(split='train')}, or run once with internet"
            ) from error

    def _labelled(self, tables: Tables) -> bool:
        """Whether some label of a split is not -1, the hub's mark of a row without one."""
        table = tables[0][1]
        label = Mapped.of(self.columns, table.column_names).columns.get("label")
        if label is None or not pa.types.is_integer(table.schema.field(label).type):
            return True
        values: Any = table.column(label).to_numpy()
        return bool(len(values)) and not bool((values == -1).all())


#: By name.
OWN: dict[str, type[OwnImages] | type[OwnTable] | type[OwnHub]] = {
    source.name: source for source in (OwnImages, OwnTable, OwnHub)
}
