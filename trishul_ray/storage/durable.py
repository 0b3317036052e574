"""Write files durably, and remove temporary files.

:func:`complete_file` and :func:`complete_folder` write everything that must survive a killed
process or a power cut: under a hidden name in the same folder, synced, then renamed.
"""

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError

from trishul_ray.errors import InputError, first_line

#: An object of JSON.
Json: TypeAlias = dict[str, Any]

#: Names of :func:`temporary_name` and of :func:`scratch_folder`.
_UNFINISHED = (f".*.{'[0-9a-f]' * 8}.tmp", ".trishul-*.????????.tmp")

#: Seconds after its last change that an unfinished file is kept: its process may still write it.
UNFINISHED_SECONDS = 24 * 3600.0

#: Seconds after its last change that the scratch folder of a process that has ended is kept.
LOG_SECONDS = 3600.0

#: A file in a scratch folder that is kept for its logs.
_LOGS_KEPT = ".logs-kept"

#: Parents of scratch folders if the path of ``TMPDIR`` is too long for a socket.
_SHORT = ("/tmp", "/var/tmp")

#: Errors of file systems that cannot sync a folder, or a file that this user cannot read.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES)


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def why_not_writable(folder: Path) -> str:
    """Return why a folder, which need not exist yet, cannot be written, or an empty string."""
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
        InputError: They cannot; the message names ``option``.
    """
    if fault := why_not_writable(folder):
        raise InputError(f"{option}: {fault}; choose another folder")


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably: each is on the disk before its content."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def write_file(file: Path, data: bytes) -> None:
    """Create the folder of a file, and write the file durably and completely."""
    make_folder(file.parent)
    with complete_file(file) as new:
        new.write_bytes(data)


def temporary_name(name: str) -> str:
    """Return a new hidden name for a file or folder while it is written."""
    return f".{name}.{secrets.token_hex(4)}.tmp"


@contextmanager
def complete_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder that replaces ``file`` on success, durably.

    No reader sees a part, and a power cut leaves the old file or the new one: the content is on the
    disk before the name, and the name before this returns. A process that is killed leaves the
    temporary file; see :func:`remove_unfinished`.
    """
    new = file.with_name(temporary_name(file.name))
    try:
        yield new
        put_in_place(new, file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` on success, durably, as in complete_file.

    ``folder`` must be new or empty; its parents are created. Its files get the folder's read
    permissions, since safetensors writes files that only their owner can read.

    Raises:
        OSError: ``folder`` has content, or the disk is full.
    """
    make_folder(folder.parent)
    new = folder.with_name(temporary_name(folder.name))
    new.mkdir()  # unlike mkdtemp, with the permissions that the umask leaves
    try:
        yield new
        readable = new.stat().st_mode & 0o444
        for path in new.rglob("*"):
            with suppress(PermissionError):  # some file systems have no permissions
                path.chmod(path.stat().st_mode | readable)
            _sync(path)
        put_in_place(new, folder)
    except SafetensorError as error:  # of a full disk
        raise OSError(errno.EIO, first_line(error), str(folder)) from error
    except OSError as error:
        error.filename = error.filename or str(folder)  # a full disk names no file
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename a file or folder durably: content first. The content of a folder must be synced."""
    _sync(temporary)
    os.replace(temporary, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def remove_unfinished(folder: Path) -> list[Path]:
    """Remove the temporary files of killed processes below a folder, and return their paths.

    A process may still write a file that has changed within :data:`UNFINISHED_SECONDS`.
    """
    oldest, removed = time.time() - UNFINISHED_SECONDS, []
    for path in [p for pattern in _UNFINISHED for p in folder.rglob(pattern)]:
        with suppress(OSError):  # another process may be faster
            if path.lstat().st_mtime < oldest:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                removed.append(path)
    return removed


@contextmanager
def scratch_folder(purpose: str, place: Path | None = None) -> Iterator[str]:
    """Yield a temporary folder that only this user can read, and remove it at the end.

    Its parent is the system's folder for temporary files, or ``place``. If the process is killed,
    or after :func:`keep_logs`, :func:`remove_abandoned` removes it. A lock on the folder ends with
    this process and its forks.
    """
    folder = Path(tempfile.mkdtemp(".tmp", f".trishul-{purpose}.", place))
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield str(folder)
    finally:
        if not (folder / _LOGS_KEPT).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def keep_logs(folder: str | Path) -> None:
    """Keep a scratch folder for :data:`LOG_SECONDS` after the last line in its logs."""
    with suppress(OSError):
        (Path(folder) / _LOGS_KEPT).touch()


def temporary_folders() -> list[str]:
    """Return possible parents of scratch folders: ``RAY_TMPDIR``, ``TMPDIR``, and short paths.

    Sockets need a short path.
    """
    chosen = os.environ.get("RAY_TMPDIR")
    return list(dict.fromkeys(filter(None, [chosen, tempfile.gettempdir(), *_SHORT])))


def remove_abandoned() -> list[Path]:
    """Remove the scratch folders of this user's killed processes, and return their paths."""
    oldest = time.time() - LOG_SECONDS
    removed = []
    for folder in (f for place in temporary_folders() for f in Path(place).glob(".trishul-*.tmp")):
        with suppress(OSError):  # not a folder, or a living process holds its lock
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                changed = [path.stat().st_mtime for path in (folder, *folder.glob("r/*/logs/*"))]
                if max(changed) < oldest and folder.stat().st_uid == os.getuid():
                    shutil.rmtree(folder)
                    removed.append(folder)
            finally:
                os.close(lock)
    return removed
