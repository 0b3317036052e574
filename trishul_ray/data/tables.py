"""Read table files: CSV, TSV, JSON, JSON lines and Parquet.

Errors name the file and, where possible, the row.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.columns import FileOfLines, nfc, to_array, with_nfc_names
from trishul_ray.errors import CorruptFileError, first_line
from trishul_ray.runtime.lazy import pq
from trishul_ray.storage.durable import Json
from trishul_ray.storage.integrity import digest, lfs_pointer

#: Formats that :func:`read_table` can read, by suffix of the file's name.
_FORMATS = {
    **{".parquet": "parquet", ".jsonl": "JSON lines", ".json": "JSON"},
    **{".csv": "CSV", ".tsv": "CSV"},
}

#: File name suffixes that :func:`read_table` can read.
SUFFIXES = tuple(_FORMATS)

#: Delimiters that some programs write in a CSV file in place of commas.
_DELIMITERS = (";", "\t", "|", ",")

#: First and last bytes of a Parquet file.
_PARQUET = b"PAR1"

#: First bytes of packed files, what they are, and the command that unpacks one.
_PACKINGS = {
    b"\x1f\x8b": ("a gzip file", "gunzip -c"),
    b"PK\x03\x04": ("a zip file (as those of Excel are)", "unzip -p"),
}


def read_table(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a file with one of :data:`SUFFIXES`, its columns' names in NFC.

    ``columns`` that the file does not have are left out. If it has none of them, all are read, so
    that an error message can list them.

    Raises:
        CorruptFileError: the file cannot be read in the format of its suffix.
    """

    def select(names: Sequence[str]) -> list[str]:
        return [name for name in names if nfc(name) in (columns or ())] or list(names)

    with _errors_named(file) as kind:
        if kind == "parquet":
            with pq.ParquetFile(file) as opened:
                return with_nfc_names(opened.read(columns and select(opened.schema_arrow.names)))
        if kind == "CSV":
            table = _read_csv(file)
            return with_nfc_names(table.select(select(table.column_names)) if columns else table)
        rows = list(_json_objects(file))
    names = select(list(dict.fromkeys(name for row in rows for name in row)))
    arrays = [to_array([row.get(name) for row in rows], str(file), name) for name in names]
    return with_nfc_names(pa.table(arrays, names=names))


def name_rows(file: Path, table: pa.Table) -> str:
    """Return the name of a file for messages, which call its rows lines if each row is one.

    Blank lines and line breaks in values make more lines than rows; then its rows count from 0.
    """
    header = {"CSV": 1, "JSON lines": 0, "JSON": 0}.get(_FORMATS[file.suffix.lower()])
    if header is None:
        return str(file)
    with file.open("rb") as stream:
        lines = blank = 0
        for line in stream:
            blank = blank + 1 if not line.strip() else 0
            lines += 1
    is_line = lines - blank == table.num_rows + header
    return FileOfLines(str(file), 1 + header) if is_line else str(file)


def column_names(file: Path) -> list[str]:
    """Return the names of a table's columns, in NFC; of JSON, those of the first row."""
    return [nfc(name) for name in _stored_names(file)]


def _stored_names(file: Path) -> list[str]:
    with _errors_named(file) as kind:
        if kind == "parquet":
            return list(pq.read_schema(file).names)
        if kind == "CSV":
            return list(pa.csv.open_csv(file, *_csv_options(file)).schema.names)
        return list(next(_json_objects(file), {}))


def _read_csv(file: Path) -> pa.Table:
    names = _stored_names(file)
    # Read all columns as text: a text may look like a number.
    convert = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.large_string()), strings_can_be_null=False
    )
    table = pa.csv.read_csv(file, *_csv_options(file), convert)
    if len(names) == 1 and (found := next((d for d in _DELIMITERS if d in names[0]), None)):
        comma = "tabs" if file.suffix.lower() == ".tsv" else "commas"
        raise CorruptFileError(
            f"{file}: the columns are separated by {found!r}, not by {comma}; write the file anew: "
            f"pandas.read_csv({str(file)!r}, sep={found!r}).to_csv('new.csv', index=False)"
        )
    return table


def _csv_options(file: Path) -> tuple[pa.csv.ReadOptions, pa.csv.ParseOptions]:
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    # With several threads, the parser's errors do not name the row.
    return pa.csv.ReadOptions(use_threads=False), pa.csv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True
    )


@contextmanager
def _errors_named(file: Path) -> Iterator[str]:
    """Yield the format of a file; raise what goes wrong as an error that says what it is."""
    kind = _FORMATS[file.suffix.lower()]
    if pointer := lfs_pointer(file):
        raise CorruptFileError(f"{file}: {pointer}")
    try:
        with file.open("rb") as stream:
            start = stream.read(4)
        for magic, (packing, command) in _PACKINGS.items():
            if start.startswith(magic):
                raise CorruptFileError(
                    f"{file}: {packing}, not a {kind} file; unpack it: {command} {file.name} > "
                    f"new{file.suffix}"
                )
        yield kind
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        describe = {"parquet": _cut_short, "CSV": _not_utf8}.get(kind)
        known = describe(file) if describe is not None and file.is_file() else None
        unknown = f"{file}: not a readable {kind} file ({first_line(error)})"
        raise CorruptFileError(known or unknown) from error


def _cut_short(file: Path) -> str | None:
    """Return what is wrong with a file that begins as a Parquet file does, but does not end so."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        begins = stream.read(4) == _PARQUET
        stream.seek(-min(4, size), 2)
        if not begins or stream.read(4) == _PARQUET:
            return None
    return (
        f"{file}: an incomplete download: it ends after {size:,} bytes, without the table's "
        "description; download it again"
    )


def _not_utf8(file: Path) -> str | None:
    """Return what is wrong with a text file that is not UTF-8, with its first such line."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                utf16 = number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff")
                encoding = "UTF-16" if utf16 else "LATIN1"
                near = line[max(0, error.start - 10) : error.start + 10].decode("latin-1")
                return (
                    f"{file}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} in "
                    f"{near!r}); if it is {encoding}, convert it: "
                    f"iconv -f {encoding} -t UTF-8 {file.name} > new{file.suffix}"
                )
    return None


def _json_objects(file: Path) -> Iterator[Json]:
    """Yield the objects of a list, or of lines; anything else is a CorruptFileError."""
    with file.open("rb") as stream:
        start = stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    if file.suffix.lower() != ".json" or not start.startswith(b"["):
        yield from _json_lines(file)
        return
    try:
        values = json.loads(file.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        where = f"{file}, line {error.lineno}"
        raise CorruptFileError(
            f"{where}: not JSON ({error.msg} at column {error.colno})"
        ) from error
    except ValueError as error:
        raise CorruptFileError(f"{file}: not UTF-8 ({error})") from error
    for row, value in enumerate(values):
        if not isinstance(value, dict):
            raise CorruptFileError(f"{file}, row {row}: not a JSON object")
        yield value


def _json_lines(file: Path) -> Iterator[Json]:
    """Yield the object of each line that is not blank; other lines are a CorruptFileError."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                # The first line may begin with a byte order mark, as Windows writes it.
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                fault = f"{error.msg} at column {error.colno}"
                raise CorruptFileError(f"{file}, line {number}: not JSON ({fault})") from error
            except ValueError as error:
                raise CorruptFileError(f"{file}, line {number}: not UTF-8 ({error})") from error
            if not isinstance(value, dict):
                raise CorruptFileError(f"{file}, line {number}: not a JSON object")
            yield value


def file_signature(files: Iterable[Path]) -> str:
    """Return the path and the content's hash of each file: a text that changes when a file does."""
    return json.dumps([(str(file.resolve()), digest(file)) for file in files])
