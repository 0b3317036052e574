"""Tell whether a file has changed, write a file or folder as a whole, remove what nobody uses."""

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from trishul_ray.errors import InputError

#: An object of JSON.
Json: TypeAlias = dict[str, Any]

#: Seconds after its last use that a part of the cache is kept; it is made again when needed.
KEPT_SECONDS = 30 * 24 * 3600.0

#: A file may change again without a visible change of its times within this many seconds, because
#: the clocks of file systems advance in steps.
SETTLING_SECONDS = 2.0

#: A file in a scratch folder that is locked while its process lives.
_OWNER = ".owner"


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


def make_cache_folder(folder: Path) -> None:
    """Create ``folder`` and its parents, or raise an InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"storage.cache: cannot create {folder}: {error.strerror}") from error


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def why_not_writable(folder: Path) -> str:
    """Return why a folder, which need not exist yet, cannot be written; ``""`` if it can."""
    nearest = nearest_existing(folder)
    try:
        # Write a file: permission bits do not show read-only mounts and quotas.
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"0")
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}"
    return ""


def check_writable(folder: Path, option: str) -> None:
    """Check that files can be written into a folder, which need not exist yet.

    Raises:
        InputError: They cannot; ``option`` names what the user has given.
    """
    if fault := why_not_writable(folder):
        raise InputError(f"{option}: {fault}; choose another folder")


@contextmanager
def complete_file(file: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``file`` that replaces it on success: no reader sees a part."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` on success and is removed on an error.

    ``folder`` must be new or empty; its parents are created. Its files get the folder's read
    permissions, since safetensors writes files that only their owner can read.

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


@contextmanager
def scratch_folder(purpose: str) -> Iterator[str]:
    """Yield a temporary folder of this process, which is removed at the end.

    If the process is killed, :func:`remove_abandoned` removes it.
    """
    prefix = f"trishul-{purpose}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder,
        open(f"{folder}/{_OWNER}", "wb") as owner,
    ):
        fcntl.flock(owner, fcntl.LOCK_SH)  # until this process and its forks have ended
        yield folder


def remove_abandoned() -> list[Path]:
    """Remove the scratch folders of processes that were killed, and return them."""
    removed = []
    for owner in Path(tempfile.gettempdir()).glob(f"trishul-*/{_OWNER}"):
        # Not to be opened, or another process is faster, or its own still lives.
        with suppress(OSError), owner.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > SETTLING_SECONDS:
                shutil.rmtree(owner.parent)
                removed.append(owner.parent)
    return removed


def remove_unused(paths: Iterable[Path]) -> list[Path]:
    """Remove the files and folders that were not used for :data:`KEPT_SECONDS`, and return them.

    The modification time counts as the last use.
    """
    oldest = time.time() - KEPT_SECONDS
    removed = []
    for path in paths:
        with suppress(OSError):  # another process may be faster
            if path.stat().st_mtime < oldest:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                removed.append(path)
    return removed
