"""Detect files and names that a power cut could lose."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Syncs:
    """Detect what a power cut could lose in a folder to which this process writes.

    A name is safe once its folder is synced. A file's content is safe once the file is synced, if
    nothing was written since. A file must get its name only after its content is safe. Locks and
    MLflow's files are excluded.
    """

    def __init__(self, root: str, places: Sequence[str] = ("runs", "cache")) -> None:
        self._places = tuple(f"{root}/{place}" for place in places)
        self._synced: dict[tuple[int, int], tuple[int, int]] = {}  # size and time, keyed by inode
        self._names: dict[str, str] = {}  # last name in an unsynced folder, keyed by folder
        self._before = {_inode(path) for path in self._kept()}
        self.faults: list[str] = []
        self._fsync, self._replace, self._mkdir = os.fsync, os.replace, os.mkdir
        os.fsync, os.replace, os.mkdir = self.fsync, self.replace, self.mkdir

    def _kept(self) -> list[Path]:
        found = [path for place in self._places for path in Path(place).rglob("*")]
        return [p for p in found if p.is_file() and not p.name.endswith("lock") and not _mlflow(p)]

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self._synced[_inode(descriptor)] = _version(descriptor)
        self._names.pop(os.readlink(f"/proc/self/fd/{descriptor}"), None)

    def replace(self, source: Any, target: Any, **options: Any) -> None:
        for path in (Path(source), *Path(source).rglob("*")):
            if self._synced.get(_inode(path)) != _version(path):
                self._fault(f"{path} is renamed and not synced", target)
        self._replace(source, target, **options)
        self._named(target)

    def mkdir(self, path: Any, *more: Any, **options: Any) -> None:
        self._mkdir(path, *more, **options)
        if not options.get("dir_fd"):
            self._named(path)

    def _named(self, path: Any) -> None:
        path = os.path.abspath(path)
        temporary = any(p.startswith(".") and p.endswith(".tmp") for p in path.split("/"))
        if not temporary and path.startswith(self._places):
            self._names[os.path.dirname(path)] = path

    def _fault(self, text: str, place: Any) -> None:
        if str(place).startswith(self._places):
            self.faults.append(text)

    def end(self) -> list[str]:
        """Return the faults of the run that has ended."""
        for path in self._kept():
            if _inode(path) not in self._before and self._synced.get(_inode(path)) != _version(
                path
            ):
                self.faults.append(f"{path} is not synced")
        lost = [name for name in self._names.values() if "mlartifacts" not in name]
        return [*self.faults, *(f"the name of {name} is not synced" for name in lost)]


def _mlflow(path: Path) -> bool:
    return ".db" in path.name or "mlartifacts" in path.parts


def _inode(path: Any) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _version(path: Any) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
