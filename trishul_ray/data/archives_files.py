"""Members of tar and zip files, read one by one into memory, never extracted to disk."""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trishul_ray.errors import CorruptFileError, InputError

#: What the standard library raises on damaged compressed files.
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile, EOFError)


def all_or_none(folder: Path, names: tuple[str, ...]) -> tuple[Path, ...] | None:
    """The files ``names`` of ``folder``, or None where it has none of them.

    Raises:
        InputError: it has a part of them.
    """
    files = tuple(folder / name for name in names)
    lacking = [file for file in files if not file.is_file()]
    if len(lacking) == len(files):
        return None
    if lacking:
        raise InputError(f"{folder} lacks {lacking[0].relative_to(folder)} beside its other files")
    return files


def tar_members(
    file: Path, wanted: Callable[[str], bool], limit: int
) -> Iterator[tuple[str, bytes, float]]:
    """Name, bytes and the share of the file read so far, of each wanted member in file order.

    Args:
        file: a ``.tar.gz`` file.
        wanted: whether a member's name, without a leading ``./``, is to be read.
        limit: most bytes of a member.

    Raises:
        CorruptFileError: the file is damaged, or a wanted member is a link, twice there, or
            larger than ``limit``.
    """
    seen = set()
    size = max(1, file.stat().st_size)
    try:
        with file.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isdir() or not wanted(name):
                    continue
                if not member.isfile():
                    raise CorruptFileError(f"{file}: member {name} is not a plain file")
                if member.size > limit:
                    raise CorruptFileError(
                        f"{file}: member {name} has {member.size} bytes, at most {limit} belong"
                    )
                if name in seen:
                    raise CorruptFileError(f"{file}: member {name} is there twice")
                seen.add(name)
                stream = tar.extractfile(member)
                assert stream is not None  # a plain file
                yield name, stream.read(), min(1.0, raw.tell() / size)
    except DAMAGE as error:
        raise CorruptFileError(f"{file}: not a readable tar.gz file ({error})") from error


@contextmanager
def zip_member(file: Path, name: str, limit: int) -> Iterator[IO[bytes]]:
    """The member ``name`` of a zip file, opened for reading.

    Raises:
        CorruptFileError: the file is damaged, has no such member, or it is larger than ``limit``.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            if name not in archive.namelist():
                raise CorruptFileError(f"{file}: no member {name}")
            if archive.getinfo(name).file_size > limit:
                raise CorruptFileError(f"{file}: member {name} has more than {limit} bytes")
            with archive.open(name) as stream:
                yield stream
    except (*DAMAGE, RuntimeError, NotImplementedError) as error:  # encrypted; odd compression
        raise CorruptFileError(f"{file}: not a readable zip file ({error})") from error
