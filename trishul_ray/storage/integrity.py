"""Detect changed and damaged files with checksums, and manage the folders of the cache.

Each folder of the cache stores the checksums of its files, which are verified before use.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from trishul_ray.errors import CorruptFileError, InputError, first_line
from trishul_ray.storage.durable import Json, complete_folder, make_folder, write_file

#: First bytes of a Git LFS pointer file.
_LFS = b"version https://git-lfs.github.com/spec/"

#: Seconds within which a file may change again without new timestamps, because the clocks of file
#: systems advance in steps.
SETTLING_SECONDS = 2.0

#: File in a cache folder with the checksums of all other files.
SEAL = ".xxh128"

#: Seconds after its last use for which a cache folder is kept. It is recreated when needed.
KEPT_SECONDS = 30 * 24 * 3600.0

#: Top-level folders of a cache, and patterns of the folders that :func:`remove_unused` may remove.
_PARTS = frozenset({"data", "layers", "models", "rows", "weights"})
_REMOVABLE = ("weights/*", "rows/*", "data/*/*")

#: Separates the fields of a JSON object from the hex digits of its checksum.
_CHECKSUM = b',\n  "checksum": "'

#: Notices of repairs that this process has not sent to its driver yet.
_remarks: list[str] = []

_logger = logging.getLogger(__name__)


def digest(file: Path) -> str:
    """Compute the hex SHA-256 of a file, cached per process until the file changes."""
    return _hash(file, hashlib.sha256)


def checksum(file: Path) -> str:
    """Compute the hex 128-bit XXH3 of a file, cached like :func:`digest`."""
    return _hash(file, xxhash.xxh3_128)


def _hash(file: Path, algorithm: Callable[[], Any]) -> str:
    path = file.resolve()
    settled = abs(time.time() - path.stat().st_ctime) > SETTLING_SECONDS
    return (_computed if settled else _computed.__wrapped__)(path, algorithm, stamp(path))


@lru_cache(maxsize=100_000)
def _computed(path: Path, algorithm: Callable[[], Any], stamp: tuple[int, ...]) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def stamp(file: Path) -> tuple[int, ...]:
    """Return device, inode, size, mtime and ctime of a file, which change with its content.

    Since ``ctime`` cannot be set, edits that restore the modification time are also detected. Only
    the second of two edits within one tick of the clock is not.
    """
    now = file.stat()
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def lfs_pointer(file: Path) -> str:
    """Return how to fetch a file that is a Git LFS pointer, or an empty string for other files."""
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        if stream.read(len(_LFS)) != _LFS:
            return ""
    return f"{file.name} is a Git LFS pointer; run `git lfs pull` in its folder"


def record_checksums(folder: Path) -> None:
    """Record the checksums of a cache folder's files for :func:`find_corruption`.

    XXH3 runs at memory bandwidth. It detects damage, but not malicious changes. ``xxhsum --check
    .xxh128`` can also verify the file.
    """
    lines = [f"{checksum(folder / name)}  {name}\n" for name in _files(folder)]
    write_file(folder / SEAL, "".join(lines).encode())


def find_corruption(folder: Path) -> str:
    """Compare a folder with its recorded checksums.

    Reads each file once per process, and again if it changes.

    Returns:
        The difference, or an empty string.
    """
    try:
        lines = (folder / SEAL).read_text().splitlines()
        recorded = {name: value for value, _, name in (line.partition("  ") for line in lines)}
        for name in _files(folder):
            if recorded.pop(name, None) != checksum(folder / name):
                return f"{name} has changed"
    except FileNotFoundError:
        return "checksums are missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    return f"{next(iter(recorded))} is missing" if recorded else ""


def _files(folder: Path) -> list[str]:
    found = folder.rglob("[!.]*")
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def make_once(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of a cache, creating it if it does not exist.

    The first process to lock the folder creates it, while others wait. A damaged folder is
    replaced. Its memory mappings in other processes stay valid.

    Args:
        cache: The cache.
        name: Path of the folder in the cache.
        make: Function that writes the files into a temporary folder.

    Raises:
        InputError: The cache cannot be written.
    """
    folder = cache / name
    try:
        _mark(cache)
        make_folder(folder.parent)
        held = FileLock(f"{folder}.lock", fallback_to_soft=False).acquire()
    except OSError as error:
        fault = f"{error.filename or folder}: {error.strerror}"
        raise InputError(f"storage.cache: cannot write {fault}; set TRISHUL_CACHE") from error
    with held:
        for unfinished in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(unfinished)  # left by a killed process that held this lock
        _remove_damaged(folder)
        if not folder.is_dir():
            for unused in remove_unused(cache):
                remark(f"removed {unused}, which was not used for a month")
            with complete_folder(folder) as new:
                make(new)
                record_checksums(new)
        os.utime(folder)
    return folder


def _mark(cache: Path) -> None:
    """Mark a cache with a CACHEDIR.TAG for backup tools, unless it contains other files."""
    tag = cache / "CACHEDIR.TAG"
    names = {path.name for path in cache.glob("*") if path.suffix != ".tmp"}
    if not tag.exists() and names <= _PARTS:
        write_file(tag, b"Signature: 8a477f597d28d172789f06886806bc55\n# of trishul-ray\n")


def remove_unused(cache: Path) -> list[Path]:
    """Remove the folders of a cache that were not used for a month, and return their paths.

    Only folders created by :func:`make_once` are removed, which are recognized by their name and
    checksums. Memory mappings stay valid. The modification time of a folder is its last use.
    """
    oldest, removed = time.time() - KEPT_SECONDS, []
    for file in (file for part in _REMOVABLE for file in cache.glob(f"{part}/{SEAL}")):
        folder = file.parent
        lock = FileLock(f"{folder}.lock", timeout=0, fallback_to_soft=False)
        with suppress(OSError, Timeout), lock:  # another process is using or removing it
            if re.search("[0-9a-f]{12}$", folder.name) and folder.stat().st_mtime < oldest:
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def discard_damaged(folder: Path) -> None:
    """Remove a cache folder if it is damaged, so that it is recreated."""
    if folder.is_dir() and find_corruption(folder):
        with FileLock(f"{folder}.lock", fallback_to_soft=False):
            _remove_damaged(folder)


def _remove_damaged(folder: Path) -> None:
    if folder.is_dir() and (fault := find_corruption(folder)):
        shutil.rmtree(folder)
        remark(f"{folder} is damaged ({fault}); recreating it")


def to_checked_json(fields: Json) -> bytes:
    """Serialize an object to JSON with a final field ``checksum``, the SHA-256 of the bytes before.

    The checksum covers bytes instead of values, so that results are verified without encoding them
    again.
    """
    text = json.dumps(fields, indent=2, ensure_ascii=False)
    return _with_checksum(text.removesuffix("\n}").encode())


def from_checked_json(content: bytes, place: str) -> Json:
    """Parse and verify an object written by :func:`to_checked_json`, and return all its fields.

    Raises:
        CorruptFileError: The content is damaged. The message names its ``place``.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{place} is unreadable ({first_line(error)})") from error
    if not isinstance(fields, dict):
        raise CorruptFileError(f"{place} is unreadable (not an object)")
    if content != _with_checksum(content.rpartition(_CHECKSUM)[0]):
        fault = "is corrupt (checksum differs)" if "checksum" in fields else "has no checksum"
        raise CorruptFileError(f"{place} {fault}")
    return fields


def _with_checksum(body: bytes) -> bytes:
    return body + _CHECKSUM + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def remark(line: str) -> None:
    """Log a repair, and record it for :func:`take_remarks`, with which workers report it."""
    _logger.warning(line)
    _remarks.append(line)


def take_remarks() -> tuple[str, ...]:
    """Return and clear the remarks of this process. Logs of workers are not displayed."""
    taken = tuple(_remarks)
    _remarks.clear()
    return taken
