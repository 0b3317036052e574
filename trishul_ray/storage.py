"""Files of a run on any pyarrow filesystem: a local folder, s3://, gs://.

An operation that fails for a reason that may pass (a server that does not answer, a full disk) is
tried again with growing pauses, as long as the store's ``retry_seconds`` lasts.
"""

import errno
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import tenacity
from pyarrow import fs

from trishul_ray.errors import InputError, StorageError, StorageRefusedError
from trishul_ray.tracking.store import redact

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

T = TypeVar("T")

#: Bytes of the largest object that S3 and its relatives copy in one request.
COPY_LIMIT = 5 * 2**30

#: What another attempt will not change.
_REFUSALS = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_REFUSAL_NUMBERS = (errno.ENOENT, errno.EROFS, errno.ENAMETOOLONG)
_NO_BUCKET = ("NO_SUCH_BUCKET", "allow_bucket_creation")
_REFUSAL_WORDS = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", *_NO_BUCKET)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Store:
    """A folder on a filesystem. Writes appear whole or not at all.

    Attributes:
        filesystem: the pyarrow filesystem.
        root: the folder's path on it.
        uri: how a person would write the folder, without credentials.
        retry_seconds: seconds for which a failed operation is tried again.
    """

    filesystem: fs.FileSystem
    root: str
    uri: str
    retry_seconds: float = 0.0

    @classmethod
    def open(cls, uri: str, retry_seconds: float = 0.0) -> "Store":
        """The folder at a local path or a filesystem URI.

        Raises:
            InputError: the URI's scheme is unknown or its filesystem cannot be reached.
        """
        if "://" not in uri:
            path = Path(uri).expanduser().resolve()
            return cls(fs.LocalFileSystem(), str(path), str(path), retry_seconds)
        try:
            filesystem, root = fs.FileSystem.from_uri(uri)
        except (ValueError, OSError) as error:
            shown = redact(uri)
            raise InputError(f"storage.runs={shown!r} cannot be opened: {reason(error)}") from error
        return cls(filesystem, root, redact(uri.rstrip("/")), retry_seconds)

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine's own file system."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def child(self, name: str) -> "Store":
        """The folder ``name`` inside this one."""
        return Store(self.filesystem, f"{self.root}/{name}", self.place(name), self.retry_seconds)

    def place(self, name: str) -> str:
        """How a person would write the file or folder ``name`` inside this one."""
        return place(self.uri, name)

    def missing_bucket(self) -> str | None:
        """Return the name of the bucket this folder is in, if there is no such bucket.

        Raises:
            StorageError: the object store does not answer.
        """
        if self.is_local or self.filesystem.type_name not in ("s3", "gcs", "abfs"):
            return None
        bucket = self.root.partition("/")[0]
        try:
            found = self._insist("look into", "", lambda: self.filesystem.get_file_info(bucket))
        except StorageRefusedError:
            return None  # who may write below a prefix may not be allowed to ask for the bucket
        return bucket if found.type == fs.FileType.NotFound else None

    def write(self, name: str, data: bytes) -> None:
        """Write a file: beside it, then renamed (an object store copies, whole or not at all).

        Raises:
            StorageError: the storage refuses, or fails for longer than :attr:`retry_seconds`;
                nothing is left half-written under ``name``.
        """
        self._insist("write", name, lambda: self._write(name, data))

    def _write(self, name: str, data: bytes) -> None:
        self.filesystem.create_dir(self.root, recursive=True)
        target = f"{self.root}/{name}"
        if not self.is_local and len(data) > COPY_LIMIT:
            self._stream(target, data)
            return
        # Never straight to the target: a stream that fails or is interrupted is closed on the way
        # out, and an object store takes that for the end of the object.
        beside = f"{self.root}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            self._stream(beside, data)
            self.filesystem.move(beside, target)
        except BaseException:
            with suppress(OSError):
                if self.filesystem.get_file_info(beside).type != fs.FileType.NotFound:
                    self.filesystem.delete_file(beside)
            raise

    def _stream(self, path: str, data: bytes) -> None:
        with self.filesystem.open_output_stream(path, compression=None) as stream:
            stream.write(data)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it cannot be read.
        """

        def attempt() -> bytes:
            path = f"{self.root}/{name}"
            with self.filesystem.open_input_stream(path, compression=None) as stream:
                return bytes(stream.readall())

        return self._insist("read", name, attempt, absent=True)

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder ``name`` (or this folder itself) is there."""
        path = f"{self.root}/{name}" if name else self.root
        found = self._insist("look for", name, lambda: self.filesystem.get_file_info(path))
        return bool(found.type != fs.FileType.NotFound)

    def names(self) -> list[str]:
        """Names directly inside this folder, sorted; hidden files left out."""
        inside = fs.FileSelector(self.root, allow_not_found=True)
        found = self._insist("list", "", lambda: self.filesystem.get_file_info(inside))
        return sorted(info.base_name for info in found if not info.base_name.startswith("."))

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone already is no fault."""
        with suppress(FileNotFoundError):
            path = f"{self.root}/{name}"
            self._insist("delete", name, lambda: self.filesystem.delete_file(path), absent=True)

    def remove_all(self) -> None:
        """Delete this folder with all that is in it, if it is there."""
        if self.exists():
            self._insist("delete", "", lambda: self.filesystem.delete_dir(self.root))

    def upload_folder(self, folder: Path) -> None:
        """Copy every file below a local folder into this one."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                parent = path.relative_to(folder).parent.as_posix()
                target = self if parent == "." else self.child(parent)
                target.write(path.name, path.read_bytes())

    def _insist(self, verb: str, name: str, action: Callable[[], T], *, absent: bool = False) -> T:
        """Call ``action`` until it succeeds, is refused, or :attr:`retry_seconds` is used up.

        Raises:
            FileNotFoundError: ``absent`` is true and there is no such file.
            StorageRefusedError: another attempt would change nothing.
            StorageError: it failed to the last.
        """
        where = self.place(name) if name else self.uri

        def say_once(call: tenacity.RetryCallState) -> None:
            if call.attempt_number == 1 and call.outcome is not None:
                why = reason(call.outcome.exception())
                _logger.warning(
                    "cannot %s %s: %s; trying for %g s", verb, where, why, self.retry_seconds
                )

        insist = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_exponential(multiplier=0.25, max=10),
            stop=tenacity.stop_before_delay(self.retry_seconds),
            before_sleep=say_once,
            reraise=True,
        )
        try:
            return insist(action)
        except OSError as error:
            if absent and isinstance(error, FileNotFoundError):
                raise
            told = f"cannot {verb} {where}: {reason(error)}"
            if not _may_pass(error):
                raise StorageRefusedError(told) from error
            tried = insist.statistics.get("attempt_number", 1)
            often = "once" if tried == 1 else f"{tried} times"
            raise StorageError(f"{told} (tried {often} within {self.retry_seconds:g} s)") from error


def place(uri: str, name: str) -> str:
    """How a person would write the file or folder ``name`` inside ``uri``, without credentials."""
    path, mark, options = redact(uri).partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


def reason(error: BaseException | None) -> str:
    """What went wrong on a filesystem, in a few words and without a library's own advice."""
    text = str(error)
    if any(word in text for word in _NO_BUCKET):
        return "the bucket does not exist"
    number = getattr(error, "errno", None)
    if number is not None:
        return os.strerror(number)
    lines = redact(text).splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _may_pass(error: BaseException) -> bool:
    return (
        isinstance(error, OSError)
        and not isinstance(error, _REFUSALS)
        and error.errno not in _REFUSAL_NUMBERS
        and not any(word in str(error) for word in _REFUSAL_WORDS)
    )


@dataclass(frozen=True)
class Places:
    """Where prepared data and backbones lie on this machine."""

    cache: Path
    hub: Path | None

    @classmethod
    def at(cls, cache: str | Path | None = None, hub: str | Path | None = None) -> "Places":
        """Those given, else of the environment, else the user's cache and no mirror."""
        cache = cache or os.environ.get("TRISHUL_CACHE") or "~/.cache/trishul"
        hub = hub or os.environ.get("TRISHUL_HUB")
        return cls(Path(cache).expanduser(), Path(hub).expanduser() if hub else None)

    @classmethod
    def of(cls, experiment: "Experiment") -> "Places":
        """From the experiment's storage section; see :meth:`at`."""
        return cls.at(experiment.storage.cache, experiment.storage.hub)
