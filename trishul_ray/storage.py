"""Files of a run on any pyarrow filesystem: a local folder, s3://, gs://."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs

from trishul_ray.errors import InputError


@dataclass(frozen=True)
class Store:
    """A folder on a filesystem. Writes appear whole or not at all.

    Attributes:
        filesystem: the pyarrow filesystem.
        root: the folder's path on it.
        uri: how a person would write the folder.
    """

    filesystem: fs.FileSystem
    root: str
    uri: str

    @classmethod
    def open(cls, uri: str) -> "Store":
        """The folder at a local path or a filesystem URI.

        Raises:
            InputError: the URI's scheme is unknown or its filesystem cannot be reached.
        """
        if "://" not in uri:
            path = Path(uri).expanduser().resolve()
            return cls(fs.LocalFileSystem(), str(path), str(path))
        try:
            filesystem, root = fs.FileSystem.from_uri(uri)
        except (ValueError, OSError) as error:
            raise InputError(f"storage.runs={uri!r} cannot be opened: {error}") from error
        return cls(filesystem, root, uri.rstrip("/"))

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine's own file system."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def child(self, name: str) -> "Store":
        """The folder ``name`` inside this one."""
        return Store(self.filesystem, f"{self.root}/{name}", f"{self.uri}/{name}")

    def write(self, name: str, data: bytes) -> None:
        """Write a file; on a local disk beside it and renamed, an object store is whole anyway.

        Raises:
            OSError: no space, no permission; nothing is left half-written under ``name``.
        """
        self.filesystem.create_dir(self.root, recursive=True)
        target = f"{self.root}/{name}"
        if not self.is_local:
            with self.filesystem.open_output_stream(target) as stream:
                stream.write(data)
            return
        beside = f"{self.root}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with self.filesystem.open_output_stream(beside) as stream:
                stream.write(data)
            self.filesystem.move(beside, target)
        except OSError:
            if self.filesystem.get_file_info(beside).type != fs.FileType.NotFound:
                self.filesystem.delete_file(beside)
            raise

    def read(self, name: str) -> bytes:
        """The bytes of a file; FileNotFoundError if there is none."""
        with self.filesystem.open_input_stream(f"{self.root}/{name}") as stream:
            return bytes(stream.readall())

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder ``name`` (or this folder itself) is there."""
        path = f"{self.root}/{name}" if name else self.root
        return bool(self.filesystem.get_file_info(path).type != fs.FileType.NotFound)

    def names(self) -> list[str]:
        """Names directly inside this folder, sorted; hidden files left out."""
        found = self.filesystem.get_file_info(fs.FileSelector(self.root, allow_not_found=True))
        return sorted(info.base_name for info in found if not info.base_name.startswith("."))

    def remove(self, name: str) -> None:
        """Delete a file."""
        self.filesystem.delete_file(f"{self.root}/{name}")

    def remove_all(self) -> None:
        """Delete this folder with all that is in it, if it is there."""
        if self.exists():
            self.filesystem.delete_dir(self.root)

    def upload_folder(self, folder: Path) -> None:
        """Copy every file below a local folder into this one."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                parent = path.relative_to(folder).parent.as_posix()
                target = self if parent == "." else self.child(parent)
                target.write(path.name, path.read_bytes())
