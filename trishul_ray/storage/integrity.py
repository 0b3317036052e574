"""Tell whether files have changed: checksums, sealed folders of the cache, remarks on damage.

Folders of the cache, on which numbers rest, are sealed with checksums and checked before use.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import xxhash
from filelock import FileLock

from trishul_ray.errors import CorruptFileError, first_line
from trishul_ray.storage.durable import Json, complete_folder, make_cache_folder, write_file

#: Beginning of the text that stands for a file that Git LFS has not fetched.
_LFS = b"version https://git-lfs.github.com/spec/"

#: A file may change again without a visible change of its times within this many seconds, because
#: the clocks of file systems advance in steps.
SETTLING_SECONDS = 2.0

#: A file in a folder of the cache with the checksums of the others.
SEAL = ".xxh128"

#: Between the other fields of an object of JSON and the hex digits of its checksum.
_CHECKSUM = b',\n  "checksum": "'

#: Repairs of this process that its driver does not know yet, a line each.
_remarks: list[str] = []

_logger = logging.getLogger(__name__)


def digest(file: Path) -> str:
    """Return the hex SHA-256 of a file's content, computed once per process unless it changes."""
    return _remembered(_digest, file)


def stamp(file: Path) -> tuple[int, ...]:
    """Return device, inode, size and times of a file, which change with its content.

    The last of them, ``ctime``, cannot be set: an edit that restores the modification time shows,
    too. Only two edits at the same tick of the clock do not.
    """
    now = file.stat()
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def checksum(file: Path) -> str:
    """Return the hex XXH3 of a file's content, 128 bits, remembered as in :func:`digest`."""
    return _remembered(_checksum, file)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def _remembered(compute: Callable[[Path], str], file: Path) -> str:
    path = file.resolve()
    settled = abs(time.time() - path.stat().st_ctime) > SETTLING_SECONDS
    return _computed(compute, path, stamp(path)) if settled else compute(path)


@lru_cache(maxsize=100_000)
def _computed(compute: Callable[[Path], str], path: Path, stamp: tuple[int, ...]) -> str:
    return compute(path)


def lfs_pointer(file: Path) -> str:
    """Return what to do about a file that is only a pointer of Git LFS; empty for other files."""
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        if stream.read(len(_LFS)) != _LFS:
            return ""
    return f"{file.name} is a pointer of Git LFS, not the file: run `git lfs pull` in its folder"


def seal(folder: Path, pattern: str = "[!.]*") -> None:
    """Note the checksums of a cache folder's files that match, for :func:`fault_in`.

    They find damage, not malice: XXH3 is as fast as memory. ``xxhsum --check .xxh128`` reads the
    file, too.
    """
    found = {path.relative_to(folder).as_posix(): path for path in _files(folder, pattern)}
    lines = [f"{checksum(path)}  {name}\n" for name, path in sorted(found.items())]
    write_file(folder / SEAL, "".join(lines).encode())


@contextmanager
def sealed_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder``, sealed; see ``complete_folder``."""
    with complete_folder(folder) as new:
        yield new
        seal(new)


def fault_in(folder: Path, pattern: str = "[!.]*") -> str:
    """Return what is wrong with a sealed folder: empty if it has the files that were sealed.

    Every file is read, once per process unless it changes.
    """
    try:
        lines = (folder / SEAL).read_text().splitlines()
        noted = {name: value for value, _, name in (line.partition("  ") for line in lines)}
        for path in _files(folder, pattern):
            name = path.relative_to(folder).as_posix()
            if noted.pop(name, None) != checksum(path):
                return f"{name} is not as it was written"
    except FileNotFoundError:
        return "it has no checksums"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return f"{next(iter(noted))} is missing" if noted else ""


def _files(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.rglob(pattern) if path.is_file()]


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Create a sealed folder of the cache unless it exists undamaged; note its use.

    The first process to lock it makes it; the others wait. A damaged folder is replaced; its open
    mappings stay valid.

    Raises:
        InputError: The cache cannot be written.
    """
    make_cache_folder(folder.parent)
    with FileLock(f"{folder}.lock"):
        _remove_damaged(folder)
        if not folder.is_dir():
            with sealed_folder(folder) as new:
                make(new)
        os.utime(folder)


def discard_damaged(folder: Path) -> None:
    """Remove a sealed folder of the cache that is damaged: it is made again."""
    if folder.is_dir() and fault_in(folder):
        with FileLock(f"{folder}.lock"):
            _remove_damaged(folder)


def _remove_damaged(folder: Path) -> None:
    if folder.is_dir() and (fault := fault_in(folder)):
        shutil.rmtree(folder)
        remark(f"{folder} is damaged ({fault}): it is made again")


def to_checked_json(fields: Json) -> bytes:
    """Return an object as JSON with a last field ``checksum``: the SHA-256 of the bytes before.

    It is of bytes, not of values: thousands of results are checked without encoding them again.
    """
    text = json.dumps(fields, indent=2, ensure_ascii=False)
    return _with_checksum(text.removesuffix("\n}").encode())


def from_checked_json(content: bytes, place: str) -> Json:
    """Return the object that :func:`to_checked_json` has written, with its checksum.

    Raises:
        CorruptFileError: It is damaged; the message names its ``place``.
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
    """Tell the user what was mended: in a log line, and from a worker by :func:`take_remarks`."""
    _logger.warning(line)
    _remarks.append(line)


def take_remarks() -> tuple[str, ...]:
    """Return the remarks of this process since the last call; a worker's log is not shown."""
    taken = tuple(_remarks)
    _remarks.clear()
    return taken
