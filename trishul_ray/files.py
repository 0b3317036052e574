"""Tell whether a file's content has changed, and write a folder as a whole."""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

#: A file may change again without a visible change of its times within this many seconds, because
#: the clocks of file systems advance in steps.
SETTLING_SECONDS = 2.0


def digest(file: Path) -> str:
    """Return the hex SHA-256 of a file's content, computed once per process unless it changes."""
    path = file.resolve()
    settled = abs(time.time() - path.stat().st_ctime) > SETTLING_SECONDS
    return _remembered_digest(path, stamp(path)) if settled else _digest(path)


def stamp(file: Path) -> tuple[int, ...]:
    """Return device, inode, size and times of a file, which change with its content.

    The last of them, ``ctime``, cannot be set: an edit that restores the modification time shows,
    too. Only two edits at the same tick of the clock do not.
    """
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@lru_cache(maxsize=100_000)
def _remembered_digest(path: Path, stamp: tuple[int, ...]) -> str:
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` on success and is removed on an error.

    ``folder`` is new or empty; its parents are created. Whoever may read the folder may read its
    files, too, although safetensors writes them for their owner alone.

    Raises:
        OSError: Something else is in the place of ``folder``, or the disk is full.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()  # unlike mkdtemp, with the permissions that the umask leaves
    try:
        yield temporary
        readable = temporary.stat().st_mode & 0o444
        for file in temporary.rglob("*"):
            file.chmod(file.stat().st_mode | readable)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
