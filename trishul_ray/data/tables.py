"""Read table files: CSV, TSV, JSON lines and Parquet.

Errors name the file and, where possible, the row.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.columns import to_array
from trishul_ray.errors import CorruptFileError, first_line
from trishul_ray.files import digest
from trishul_ray.lazy import pq

#: File name suffixes that :func:`read_table` can read.
SUFFIXES = (".parquet", ".jsonl", ".csv", ".tsv")

#: What some programs write between the columns of a CSV file in place of commas.
_DELIMITERS = (";", "\t", "|", ",")

#: First and last bytes of a Parquet file.
_PARQUET = b"PAR1"


def read_table(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a file with one of :data:`SUFFIXES`.

    ``columns`` that the file does not have are left out. If it has none of them, all are read, so
    that an error message can list them.

    Raises:
        CorruptFileError: the file cannot be read in the format of its suffix.
    """
    readers = {".parquet": _read_parquet, ".jsonl": _read_json_lines}
    readers |= dict.fromkeys((".csv", ".tsv"), _read_csv)
    return readers[file.suffix.lower()](file, columns)


def column_names(file: Path) -> list[str]:
    """Return the names of a table's columns; of JSON lines, those of the first row.

    Raises:
        CorruptFileError: the file cannot be read in the format of its suffix.
    """
    suffix = file.suffix.lower()
    kind = {".parquet": "parquet", ".jsonl": "JSON lines"}.get(suffix, "CSV")
    try:
        if kind == "parquet":
            return list(pq.read_schema(file).names)
        if kind == "JSON lines":
            with file.open("rb") as lines:
                return list(next(json_lines(lines, str(file)), (0, {}))[1])
        return list(pa.csv.open_csv(file, *_csv_options(file)).schema.names)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, kind, error) from error


def _read_parquet(file: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        with pq.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            return opened.read(None if columns is None else _select(names, columns))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, "parquet", error) from error


def _is_cut(file: Path) -> bool:
    """Return whether a file begins as a Parquet file does, but does not end as one."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        begins = stream.read(4) == _PARQUET
        stream.seek(-min(4, file.stat().st_size), 2)
        return begins and stream.read(4) != _PARQUET


def _read_csv(file: Path, columns: Sequence[str] | None) -> pa.Table:
    read, parse = _csv_options(file)
    names = column_names(file)
    try:
        # Read all columns as text: a text may look like a number.
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()), strings_can_be_null=False
        )
        table = pa.csv.read_csv(file, read, parse, convert)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, "CSV", error) from error
    if len(names) == 1 and (found := next((d for d in _DELIMITERS if d in names[0]), None)):
        comma = "tabs" if file.suffix.lower() == ".tsv" else "commas"
        raise CorruptFileError(
            f"{file}: the columns are separated by {found!r}, not by {comma}; write the file anew: "
            f"pandas.read_csv({str(file)!r}, sep={found!r}).to_csv('new.csv', index=False)"
        )
    return table if columns is None else table.select(_select(table.column_names, columns))


def _not_utf8(file: Path) -> CorruptFileError | None:
    """Return the error of a text file that is not UTF-8, which names its first such line."""
    if not file.is_file():
        return None
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                utf16 = number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff")
                encoding = "UTF-16" if utf16 else "LATIN1"
                near = line[max(0, error.start - 10) : error.start + 10].decode("latin-1")
                return CorruptFileError(
                    f"{file}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} in "
                    f"{near!r}); if it is {encoding}, convert it: "
                    f"iconv -f {encoding} -t UTF-8 {file.name} > new{file.suffix}"
                )
    return None


def _csv_options(file: Path) -> tuple[pa.csv.ReadOptions, pa.csv.ParseOptions]:
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    # With several threads, the parser's errors do not name the row.
    return pa.csv.ReadOptions(use_threads=False), pa.csv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True
    )


def _read_json_lines(file: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        with file.open("rb") as lines:
            rows = [row for _, row in json_lines(lines, str(file))]
    except OSError as error:
        raise _unreadable(file, "JSON lines", error) from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    if columns is not None:
        names = _select(names, columns)
    arrays = [to_array([row.get(name) for row in rows], str(file), name) for name in names]
    return pa.table(arrays, names=names)


def _select(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the ``names`` that are wanted, or all if none is."""
    return [name for name in names if name in wanted] or list(names)


def _unreadable(file: Path, kind: str, error: Exception) -> CorruptFileError:
    if kind == "parquet" and _is_cut(file):
        size = file.stat().st_size
        return CorruptFileError(
            f"{file}: an incomplete download: it ends after {size:,} bytes, without the table's "
            "description; download it again"
        )
    if kind == "CSV" and (fault := _not_utf8(file)) is not None:
        return fault
    return CorruptFileError(f"{file}: not a readable {kind} file ({first_line(error)})")


def read_files(
    files: Sequence[Path], columns: Sequence[str] | None = None
) -> list[tuple[str, pa.Table]]:
    """Return each file's name and its rows; see :func:`read_table`."""
    return [(str(file), read_table(file, columns)) for file in files]


def json_lines(lines: Iterable[bytes], where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number (from 1) and object of each line that is not blank.

    Raises:
        CorruptFileError: a line is not one JSON object in UTF-8.
    """
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise CorruptFileError(f"{where}, line {line_number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise CorruptFileError(f"{where}, line {line_number}: not a JSON object")
        yield line_number, value


def file_signature(files: Iterable[Path]) -> str:
    """Return the path and the content's hash of each file: a text that changes when a file does."""
    return json.dumps([(str(file.resolve()), digest(file)) for file in files])
