"""Write files durably, and remove what killed processes have left and what nobody uses.

All that must survive a killed process or a power cut is written by :func:`complete_file` or
:func:`complete_folder`: beside its place, synced, renamed.
"""

import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from trishul_ray.errors import InputError

#: An object of JSON.
Json: TypeAlias = dict[str, Any]

#: Seconds after its last use that a part of the cache is kept; it is made again when needed.
KEPT_SECONDS = 30 * 24 * 3600.0

#: Seconds that the logs of a local Ray are kept after their last line, if it has not ended well.
LOG_SECONDS = 3600.0

#: A file in a scratch folder whose logs are kept.
_LOGS_KEPT = ".logs-kept"

#: Places of scratch folders if the path of ``TMPDIR`` is too long for a socket.
_SHORT = ("/tmp", "/var/tmp")

#: Folders from which this process has removed what killed ones have left there.
_tidied: set[Path] = set()

#: This machine, in the names of unfinished files: the locks of others may not be seen here.
_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:6]

#: Names of unfinished files and folders.
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{6}-[0-9a-f]{8}\.tmp")

#: Answers of file systems that cannot sync a folder, or a file that this user cannot read.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES)


def make_cache_folder(folder: Path) -> None:
    """Create ``folder`` and its parents, or raise an InputError."""
    try:
        make_folder(folder)
    except OSError as error:
        raise InputError(
            f"storage.cache: cannot create {folder}: {error.strerror}; set TRISHUL_CACHE"
        ) from error


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


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably: each is on the disk before anything is in it."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def write_file(file: Path, data: bytes) -> None:
    """Write a file durably and as a whole; see :func:`complete_file`. Its folder is created."""
    make_folder(file.parent)
    with complete_file(file) as new:
        new.write_bytes(data)


@contextmanager
def complete_file(file: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``file`` that replaces it on success, durably.

    No reader sees a part, and a power cut leaves the old file or the new one: the content is on the
    disk before the name, and the name before this returns. The next process that writes into the
    same folder removes the temporary file of one that was killed.
    """
    with _unfinished(file, lambda path: path.touch(exist_ok=False)) as temporary:
        yield temporary
        put_in_place(temporary, file)


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` on success, durably, as in complete_file.

    ``folder`` must be new or empty; its parents are created. Its files get the folder's read
    permissions, since safetensors writes files that only their owner can read.

    Raises:
        OSError: Something else is in the place of ``folder``, or the disk is full.
    """
    make_folder(folder.parent)
    # mkdir, unlike mkdtemp, gives the permissions that the umask leaves.
    with _unfinished(folder, Path.mkdir) as temporary:
        yield temporary
        readable = temporary.stat().st_mode & 0o444
        for path in (*temporary.rglob("*"), temporary):
            if (mode := path.stat().st_mode) & readable != readable:
                with suppress(OSError):  # some file systems know no permissions
                    path.chmod(mode | readable)
            if path != temporary:
                _sync(path)
        put_in_place(temporary, folder)


def put_in_place(temporary: Path, target: Path) -> None:
    """Give a file its name, durably: content first; of a folder, the content must be synced."""
    _sync(temporary)
    os.replace(temporary, target)
    _sync(target.parent)


@contextmanager
def _unfinished(target: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Yield what becomes ``target``, made beside it under a hidden name; remove it at the end.

    A lock tells :func:`remove_unfinished` that its writer lives, and is lost with the process.
    """
    if target.parent not in _tidied:
        _tidied.add(target.parent)
        remove_unfinished(target.parent)
    while True:
        path = target.with_name(f".{target.name}.{_HOST}-{secrets.token_hex(4)}.tmp")
        make(path)
        try:
            owner = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # not locked yet, and so removed by another process
            continue
        try:
            with suppress(OSError):  # some file systems know no locks
                fcntl.flock(owner, fcntl.LOCK_SH)  # until this process and its forks have ended
            if not path.exists():
                continue
            try:
                yield path
            finally:
                if path.exists() and not Path(path, _LOGS_KEPT).exists():
                    with suppress(OSError):
                        _remove(path)
            return
        finally:
            os.close(owner)


def remove_unfinished(folder: Path, *, below: bool = False) -> list[Path]:
    """Remove temporary files of killed processes directly in a folder, and return their paths.

    Files of another machine, and files that cannot be locked, go after :data:`KEPT_SECONDS`; not so
    in a folder that all users share, such as /tmp. With ``below``, search all folders in it, too.
    """
    removed = []
    places = [Path(place) for place, _, _ in os.walk(folder)] if below else [folder]
    for place in places:
        with suppress(OSError):
            shared = os.stat(place).st_mode & stat.S_ISVTX
            for name in os.listdir(place):
                path = place / name
                if not _UNFINISHED.fullmatch(name) or (shared and not _is_ours(path)):
                    continue
                if _is_abandoned(path):
                    with suppress(OSError):  # another process may be faster
                        _remove(path)
                        removed.append(path)
                else:
                    removed += remove_unused([path])
    return removed


def _is_ours(path: Path) -> bool:
    """Return whether this user, on this machine, has made an unfinished file or folder."""
    with suppress(OSError):
        return f".{_HOST}-" in path.name and path.lstat().st_uid == os.getuid()
    return False


def _is_abandoned(path: Path) -> bool:
    """Return whether an unfinished file or folder is of a process of this machine that has ended.

    False if that cannot be known.
    """
    if f".{_HOST}-" not in path.name:
        return False
    with suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            logs = [log.stat().st_mtime for log in path.glob("r/*/logs/*")]  # of a local Ray
            return time.time() - max(logs, default=0.0) > LOG_SECONDS
        finally:
            os.close(lock)
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


@contextmanager
def scratch_folder(purpose: str, place: Path | None = None) -> Iterator[str]:
    """Yield a temporary folder of this process, for its user alone, which is removed at the end.

    It is in the system's folder for temporary files, or another ``place``. If the process is
    killed, or :func:`keep_logs` was called, a later one removes it.
    """
    target = Path(place or tempfile.gettempdir(), f"trishul-{purpose}")
    with _unfinished(target, lambda path: path.mkdir(0o700)) as folder:
        yield str(folder)


def keep_logs(folder: str | Path) -> None:
    """Keep a scratch folder for :data:`LOG_SECONDS` after its last line of a log."""
    with suppress(OSError):
        (Path(folder) / _LOGS_KEPT).touch()


def temporary_folders() -> list[str]:
    """Return where scratch folders may be: ``RAY_TMPDIR``, ``TMPDIR``, and folders of short names.

    The last are for sockets, whose paths have a limit.
    """
    chosen = os.environ.get("RAY_TMPDIR")
    return list(dict.fromkeys(filter(None, [chosen, tempfile.gettempdir(), *_SHORT])))


def remove_abandoned() -> list[Path]:
    """Remove the scratch folders of processes that were killed, and return them."""
    places = filter(os.path.isdir, temporary_folders())
    return [path for place in places for path in remove_unfinished(Path(place))]


def remove_unused(paths: Iterable[Path]) -> list[Path]:
    """Remove the files and folders that were not used for :data:`KEPT_SECONDS`, and return them.

    The modification time counts as the last use.
    """
    oldest = time.time() - KEPT_SECONDS
    removed = []
    for path in paths:
        with suppress(OSError):  # another process may be faster
            if path.stat().st_mtime < oldest:
                _remove(path)
                removed.append(path)
    return removed
