"""Read and write the files of a run on any pyarrow filesystem (local folder, s3://, gs://).

Operations that fail temporarily (unavailable server, full disk) are retried with exponential
backoff for up to ``retry_seconds`` of the store.
"""

import errno
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import tenacity
from pyarrow import fs

from trishul_ray.errors import CorruptFileError, InputError, StorageError, StorageRefusedError
from trishul_ray.storage.durable import temporary_name, write_file
from trishul_ray.storage.redaction import redact

T = TypeVar("T")

#: Maximum size in bytes of an object that S3 and compatible stores copy in one request.
COPY_LIMIT = 5 * 2**30

#: Errors that are permanent.
_REFUSALS = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_REFUSAL_NUMBERS = (errno.ENOENT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
_NO_BUCKET = ("NO_SUCH_BUCKET", "allow_bucket_creation")
_REFUSAL_WORDS = (
    *("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", *_NO_BUCKET),
    "is a directory",  # Arrow raises this without an errno
)

_logger = logging.getLogger(__name__)


def check_name(name: str) -> str:
    """Return the name of a file in a folder; raise CorruptFileError if it is invalid."""
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise CorruptFileError(f"{name!r} is not the name of a file in a folder")
    return name


@dataclass(frozen=True)
class Store:
    """A folder on a pyarrow filesystem, with atomic writes.

    Attributes:
        filesystem: The filesystem.
        root: Path of the folder on the filesystem.
        uri: Address of the folder for messages, without credentials.
        retry_seconds: Seconds for which failed operations are retried.
    """

    filesystem: fs.FileSystem
    root: str
    uri: str
    retry_seconds: float = 0.0

    @classmethod
    def open(cls, uri: str, retry_seconds: float = 0.0, field: str = "storage.runs") -> "Store":
        """Open the folder at a local path or filesystem URI.

        Args:
            uri: The path or URI.
            retry_seconds: Seconds for which failed operations are retried.
            field: Name of the user's input, for messages.

        Raises:
            InputError: The scheme of the URI is unknown, the URI has a fragment or lacks a bucket,
                or the filesystem cannot be reached.
        """
        if "://" not in uri:
            path = Path(uri).expanduser().resolve()
            return cls(fs.LocalFileSystem(), str(path), redact(str(path)), retry_seconds)
        shown = redact(uri)
        if "#" in uri:  # the fragment would be ignored
            raise InputError(f"{field}={shown!r} must not contain '#'; write %23")
        named = uri
        if uri.startswith("s3://") and "allow_delayed_open=" not in uri:
            # Write small objects with a single request. After a multipart upload of a killed
            # writer, S3 keeps (and bills) the parts, and Arrow cannot remove them.
            named += f"{'&' if '?' in uri else '?'}allow_delayed_open=true"
        try:
            filesystem, root = fs.FileSystem.from_uri(named)
        except (ValueError, OSError) as error:
            odd = re.search(r"[^!-~]|%(?![0-9a-fA-F]{2})", uri)
            why = f"write {odd[0]!r} as {quote(odd[0])}" if odd else reason(error)
            raise InputError(f"{field}={shown!r} cannot be opened: {why}") from error
        if "//" in root and not isinstance(filesystem, fs.LocalFileSystem):
            raise InputError(f"{field}={shown!r} must not contain '//' in its path; remove one '/'")
        if not root.strip("/"):
            raise InputError(
                f"{field}={shown!r} must name a bucket or folder, such as s3://bucket/runs"
            )
        return cls(filesystem, root, redact(uri.rstrip("/")), retry_seconds)

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a local file system."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def name(self) -> str:
        return self.root.rpartition("/")[2]

    def child(self, name: str) -> "Store":
        return Store(self.filesystem, self._path(name), self.place(name), self.retry_seconds)

    def parent(self) -> "Store":
        """Return the parent folder, with its path as the address in messages."""
        root = self.root.rpartition("/")[0]
        return Store(self.filesystem, root, root, self.retry_seconds)

    def _path(self, name: str) -> str:
        """Return the path of a file or folder on the filesystem.

        Raises:
            CorruptFileError: The name or a link points outside of this folder, or is a pipe or a
                device.
        """
        path = f"{self.root}/{check_name(name)}"
        if self.is_local:
            real = os.path.realpath(path)
            if not Path(real).is_relative_to(os.path.realpath(self.root)):
                raise CorruptFileError(f"{path} is a link to {real}, which is outside the folder")
            if os.path.exists(real) and not (os.path.isfile(real) or os.path.isdir(real)):
                raise CorruptFileError(f"{path} is neither a file nor a folder")
        return path

    def place(self, name: str) -> str:
        """Return the address of a file or folder in this one, for messages."""
        path, mark, options = (self.uri, "", "") if self.is_local else self.uri.partition("?")
        return f"{path.rstrip('/')}/{name}{mark}{options}"

    def check_bucket(self, runs: str, field: str = "storage.runs") -> None:
        """Raise InputError if the bucket of this folder does not exist; ``runs`` is its URI."""
        if self.filesystem.type_name not in ("s3", "gcs", "abfs"):
            return
        bucket = self.root.partition("/")[0]
        # Permissions to write below a prefix may not include this request.
        with suppress(StorageRefusedError):
            info = self._retry("access", "", lambda: self.filesystem.get_file_info(bucket))
            if info.type == fs.FileType.NotFound:
                raise InputError(
                    f"{field}={redact(runs)!r}: bucket {bucket!r} does not exist; create it or "
                    "choose another"
                )

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically: durably on a local disk, by copying in an object store.

        Raises:
            StorageError: The storage failed permanently, or for longer than :attr:`retry_seconds`.
                No partial file is left under ``name``.
        """
        self._retry("write", name, lambda: self._write(name, data))

    def _write(self, name: str, data: bytes) -> None:
        target = self._path(name)
        if self.is_local:
            write_file(Path(target), data)
            return
        folder, _, file = target.rpartition("/")
        self.filesystem.create_dir(folder, recursive=True)
        if not data or len(data) > COPY_LIMIT:  # an empty object cannot be partial
            self._stream(target, data)
            return
        # Do not write to the target directly. Closing a failed or interrupted stream would publish
        # a partial object.
        temporary = f"{folder}/{temporary_name(file)}"
        try:
            self._stream(temporary, data)
            self.filesystem.move(temporary, target)
        except BaseException:
            with suppress(OSError):
                self.filesystem.delete_file(temporary)
            raise

    def _stream(self, path: str, data: bytes) -> None:
        with self.filesystem.open_output_stream(path, compression=None) as stream:
            stream.write(data)

    def read(self, name: str) -> bytes:
        """Read the content of a file.

        Raises:
            FileNotFoundError: The file does not exist.
            StorageError: The file cannot be read.
        """
        path = self._path(name)

        def attempt() -> bytes:
            with self.filesystem.open_input_stream(path, compression=None) as stream:
                return bytes(stream.readall())

        return self._retry("read", name, attempt)

    def exists(self, name: str = "") -> bool:
        """Return whether a file or folder exists, or this folder if ``name`` is empty."""
        path = self._path(name) if name else self.root
        info = self._retry("look up", name, lambda: self.filesystem.get_file_info(path))
        return bool(info.type != fs.FileType.NotFound)

    def names(self) -> list[str]:
        """List the names directly in this folder, sorted, without hidden files."""
        return sorted(info.base_name for info in self._list() if not info.base_name.startswith("."))

    def _list(self, *, below: bool = False) -> list[fs.FileInfo]:
        inside = fs.FileSelector(self.root, allow_not_found=True, recursive=below)
        if below and self.is_local:  # a selector would follow links, including cycles
            inside = [str(path) for path in Path(self.root).rglob("*")]
        return self._retry("list", "", lambda: list(self.filesystem.get_file_info(inside)))

    def written(self) -> dict[str, float]:
        """Return the modification times of all files below this folder, keyed by path.

        Times are in seconds since the epoch, by the clock of the storage. Hidden files are omitted.
        """
        return {
            info.path.removeprefix(f"{self.root}/"): info.mtime_ns / 1e9
            for info in self._list(below=True)
            if info.type == fs.FileType.File and not info.base_name.startswith(".")
        }

    def remove(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            self._retry("delete", name, lambda: self.filesystem.delete_file(path))

    def remove_unfinished(self) -> None:
        """Delete the temporary files of killed writers below this folder.

        No other process may write to the folder at the same time.
        """
        for info in self._list(below=True):
            if info.base_name.startswith(".") and info.base_name.endswith(".tmp"):
                with suppress(CorruptFileError):  # a link
                    self.remove(info.path.removeprefix(f"{self.root}/"))

    def remove_all(self) -> None:
        """Delete this folder with its content, if it exists."""
        if self.exists():
            self._retry("delete", "", lambda: self.filesystem.delete_dir(self.root))

    def upload_folder(self, folder: Path) -> None:
        """Copy all files below a local folder to the same relative paths in this folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.write(path.relative_to(folder).as_posix(), path.read_bytes())

    def _retry(self, verb: str, name: str, action: Callable[[], T]) -> T:
        """Call ``action`` until it succeeds, fails permanently, or the retry time has passed.

        FileNotFoundError is raised unchanged.
        """
        address = self.place(name) if name else self.uri

        def warn_once(call: tenacity.RetryCallState) -> None:
            if call.attempt_number == 1 and call.outcome is not None:
                why = reason(call.outcome.exception())
                _logger.warning(
                    "cannot %s %s: %s; retrying for %g s", verb, address, why, self.retry_seconds
                )

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_temporary),
            wait=tenacity.wait_exponential(multiplier=0.25, max=10),
            stop=tenacity.stop_before_delay(self.retry_seconds),
            before_sleep=warn_once,
            reraise=True,
        )
        try:
            return retrying(action)
        except FileNotFoundError:
            raise
        except OSError as error:
            message = f"cannot {verb} {address}: {reason(error)}"
            if not _is_temporary(error):
                raise StorageRefusedError(message) from error
            raise StorageError(f"{message} (retried for {self.retry_seconds:g} s)") from error


def reason(error: BaseException | None) -> str:
    """Describe a filesystem error briefly, without hints from libraries."""
    text = str(error)
    if any(word in text for word in _NO_BUCKET):
        return "the bucket does not exist"
    number = getattr(error, "errno", None)
    if number is not None:
        return os.strerror(number)
    lines = redact(text).splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _is_temporary(error: BaseException) -> bool:
    return (
        isinstance(error, OSError)
        and not isinstance(error, _REFUSALS)
        and error.errno not in _REFUSAL_NUMBERS
        and not any(word in str(error) for word in _REFUSAL_WORDS)
    )
