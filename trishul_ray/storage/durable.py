"""Write files durably, and remove temporary files.

:func:`complete_file` and :func:`complete_folder` write data that must survive a killed process or a
power failure. They write to a hidden name in the same folder, sync, and then rename.
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

#: A JSON object.
Json: TypeAlias = dict[str, Any]

#: Patterns of the names from :func:`temporary_name` and :func:`scratch_folder`.
_UNFINISHED = (f".*.{'[0-9a-f]' * 8}.tmp", ".trishul-*.????????.tmp")

#: Seconds after its last change for which an unfinished file is kept, as it may be in use.
UNFINISHED_SECONDS = 24 * 3600.0

#: Seconds after the last change for which the scratch folder of a dead process is kept.
LOG_SECONDS = 3600.0

#: Name of a file that marks a scratch folder to be kept for its logs.
_LOGS_KEPT = ".logs-kept"

#: Parents of scratch folders if the path of ``TMPDIR`` is too long for a Unix socket.
_SHORT = ("/tmp", "/var/tmp")

#: Errors of file systems that cannot sync folders, or files that this user cannot read.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES)


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def why_not_writable(folder: Path) -> str:
    """Return why a folder, which may not exist yet, is not writable, or an empty string."""
    nearest = nearest_existing(folder)
    try:
        # Write a file, because permission bits do not reflect read-only mounts and quotas.
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"0")
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}"
    return ""


def check_writable(folder: Path, option: str) -> None:
    """Check that a folder, which may not exist yet, is writable.

    Raises:
        InputError: The folder is not writable. The message names ``option``.
    """
    if fault := why_not_writable(folder):
        raise InputError(f"{option}: {fault}; choose another folder")


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably, syncing each before its content."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def write_file(file: Path, data: bytes) -> None:
    """Write a file durably and atomically, creating its folder."""
    make_folder(file.parent)
    with complete_file(file) as new:
        new.write_bytes(data)


def temporary_name(name: str) -> str:
    """Generate a unique hidden name for a file or folder that is being written."""
    return f".{name}.{secrets.token_hex(4)}.tmp"


@contextmanager
def complete_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder that durably replaces ``file`` on success.

    Readers never see a partial file. After a power failure, either the old or the new file exists,
    because the content is synced before the rename, and the rename before this function returns. A
    killed process leaves the temporary file behind; see :func:`remove_unfinished`.
    """
    new = file.with_name(temporary_name(file.name))
    try:
        yield new
        commit_file(new, file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that durably becomes ``folder`` on success, like a complete file.

    ``folder`` must be new or empty, and its parents are created. The files receive the read
    permissions of the folder, since safetensors writes files that only their owner can read.

    Raises:
        OSError: ``folder`` is not empty, or the disk is full.
    """
    make_folder(folder.parent)
    new = folder.with_name(temporary_name(folder.name))
    new.mkdir()  # unlike mkdtemp, this respects the umask
    try:
        yield new
        readable = new.stat().st_mode & 0o444
        for path in new.rglob("*"):
            with suppress(PermissionError):  # some file systems have no permissions
                path.chmod(path.stat().st_mode | readable)
            _sync(path)
        commit_file(new, folder)
    except SafetensorError as error:  # raised if the disk is full
        raise OSError(errno.EIO, first_line(error), str(folder)) from error
    except OSError as error:
        error.filename = error.filename or str(folder)  # missing if the disk is full
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def commit_file(temporary: Path, target: Path) -> None:
    """Rename a file or folder durably. The content of a folder must already be synced."""
    _sync(temporary)
    os.replace(temporary, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to disk."""
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

    Files changed within :data:`UNFINISHED_SECONDS` are kept, as a process may still write them.
    """
    oldest, removed = time.time() - UNFINISHED_SECONDS, []
    for path in [p for pattern in _UNFINISHED for p in folder.rglob(pattern)]:
        with suppress(OSError):  # another process may have removed it
            if path.lstat().st_mtime < oldest:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                removed.append(path)
    return removed


@contextmanager
def scratch_folder(purpose: str, place: Path | None = None) -> Iterator[str]:
    """Yield a temporary folder that only this user can read, and remove it on exit.

    It is created in ``place``, or in the system's folder for temporary files. If the process is
    killed, or after :func:`keep_logs`, :func:`remove_abandoned` removes it later. The folder is
    locked until this process and its forks end.
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
    """Keep a scratch folder for :data:`LOG_SECONDS` after the last write to its logs."""
    with suppress(OSError):
        (Path(folder) / _LOGS_KEPT).touch()


def temporary_folders() -> list[str]:
    """Return possible parents of scratch folders: ``RAY_TMPDIR``, ``TMPDIR``, and short paths.

    Short paths are needed because Unix sockets limit the length of their path.
    """
    chosen = os.environ.get("RAY_TMPDIR")
    return list(dict.fromkeys(filter(None, [chosen, tempfile.gettempdir(), *_SHORT])))


def remove_abandoned() -> list[Path]:
    """Remove the scratch folders of this user's killed processes, and return their paths."""
    oldest = time.time() - LOG_SECONDS
    removed = []
    for folder in (f for place in temporary_folders() for f in Path(place).glob(".trishul-*.tmp")):
        with suppress(OSError):  # not a folder, or locked by a running process
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
