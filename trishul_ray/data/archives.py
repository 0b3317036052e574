"""Read members of tar and zip files into memory, one at a time, without extracting to disk."""

import gzip
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trishul_ray.errors import CorruptFileError, InputError

#: What the standard library raises on damaged compressed files.
DAMAGED_FILE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile, EOFError)


def incomplete_download(file: Path, where: str) -> CorruptFileError:
    """Return the error for a file that was cut off; ``where`` says where, with its size."""
    return CorruptFileError(f"{file}: an incomplete download: {where}; download it again")


def find_files(folder: Path, names: tuple[str, ...]) -> tuple[Path, ...] | None:
    """Return the paths of ``names`` in ``folder``, or None if the folder has none of them.

    Raises:
        InputError: some of the files are there and others are missing.
    """
    files = tuple(folder / name for name in names)
    missing = [file for file in files if not file.is_file()]
    if len(missing) == len(files):
        return None
    if missing:
        name = missing[0].relative_to(folder)
        raise InputError(f"{folder}: {name} is missing, but other files of the dataset are there")
    return files


def tar_members(
    file: Path, is_wanted: Callable[[str], bool], limit: int
) -> Iterator[tuple[str, bytes, float]]:
    """Yield name, content and the fraction read so far of each wanted member of a ``.tar.gz`` file.

    ``is_wanted`` gets a member's name, without a leading ``./``.

    Raises:
        CorruptFileError: the file is damaged, or a wanted member is not a plain file, occurs twice
            or is larger than ``limit`` bytes.
    """
    seen = set()
    size = max(1, file.stat().st_size)
    try:
        with file.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isdir() or not is_wanted(name):
                    continue
                if not member.isfile():
                    raise CorruptFileError(f"{file}: member {name} is not a plain file")
                if member.size > limit:
                    raise CorruptFileError(
                        f"{file}: member {name} has {member.size} bytes; the limit is {limit}"
                    )
                if name in seen:
                    raise CorruptFileError(f"{file}: member {name} occurs twice")
                seen.add(name)
                stream = tar.extractfile(member)
                assert stream is not None  # it is a plain file
                yield name, stream.read(), min(1.0, raw.tell() / size)
    except DAMAGED_FILE_ERRORS as error:
        if isinstance(error, EOFError) or "unexpected end of data" in str(error):
            raise incomplete_download(file, f"it ends after {size:,} bytes") from error
        raise CorruptFileError(f"{file}: not a readable tar.gz file ({error})") from error


@contextmanager
def zip_member(file: Path, name: str, limit: int) -> Iterator[IO[bytes]]:
    """Open the member ``name`` of a zip file for reading.

    Raises:
        CorruptFileError: the file is damaged, or the member is missing or larger than ``limit``
            bytes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            if name not in archive.namelist():
                raise CorruptFileError(f"{file}: no member {name}")
            if archive.getinfo(name).file_size > limit:
                raise CorruptFileError(f"{file}: member {name} has more than {limit} bytes")
            with archive.open(name) as stream:
                yield stream
    # RuntimeError: encrypted; NotImplementedError: an unsupported compression.
    except (*DAMAGED_FILE_ERRORS, RuntimeError, NotImplementedError) as error:
        if (cut := _where_cut(file)) is not None:
            raise incomplete_download(file, cut) from error
        raise CorruptFileError(f"{file}: not a readable zip file ({error})") from error


def _where_cut(file: Path) -> str | None:
    """Return where the beginning of a zip file was cut, with sizes; None if it was not.

    The list of members is at the end of a zip file, so a part of it lacks the list. But each
    member begins with a header, which has its size unless the file was written as a stream.
    """
    if zipfile.is_zipfile(file):
        return None
    size, end, name = file.stat().st_size, 0, ""
    with file.open("rb") as stream:
        while len(header := stream.read(30)) == 30 and header.startswith(b"PK\x03\x04"):
            flags, length = struct.unpack("<H10xI", header[6:22])
            name_length, extra = struct.unpack("<HH", header[26:])
            name = stream.read(name_length).decode("utf-8", "replace")
            if flags & 8 or length == 0xFFFFFFFF:
                return f"it has {size:,} bytes and ends within or after member {name}"
            end += 30 + name_length + extra + length
            if end > size:
                return f"it has {size:,} bytes, but member {name} ends at byte {end:,}"
            stream.seek(end)
    return f"it has {size:,} bytes and ends after member {name}" if name else None
