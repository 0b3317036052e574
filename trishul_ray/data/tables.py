"""Read tables from CSV, TSV, JSON, JSON lines and Parquet files."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.columns import decoded, nfc
from trishul_ray.errors import CorruptFileError, InputError, first_line
from trishul_ray.runtime.lazy import pq
from trishul_ray.storage.integrity import digest, lfs_pointer

#: Suffixes of files that :func:`read_table` supports.
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")

#: First bytes of compressed files, and the names of the formats.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\3\4": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_COMPRESSED |= {b"\x28\xb5\x2f\xfd": "zstd"}

#: Metadata key that marks a table from a CSV file.
_CSV = b"csv"

#: Words for a missing class, group or client in CSV files, which have no nulls.
_MISSING = frozenset(pa.csv.ConvertOptions().null_values)

#: Errors that libraries raise for missing or malformed files.
_UNREADABLE = (pa.ArrowException, OSError, ValueError, RecursionError)


def read_table(file: Path) -> pa.Table:
    """Read a file with one of :data:`SUFFIXES`; column names are in NFC.

    Columns of CSV files are read as texts.

    Raises:
        CorruptFileError: The file cannot be read in the format of its suffix.
    """
    if fault := lfs_pointer(file):
        raise CorruptFileError(f"{file}: {fault}")
    try:
        table = _read(file)
    except _UNREADABLE as error:
        kind = file.suffix[1:].lower()
        raise CorruptFileError(
            f"{file}: not a readable {kind} file ({first_line(error)})"
        ) from error
    names = [nfc(name) for name in table.column_names]
    check_unique(names, str(file))
    return table.rename_columns(names).replace_schema_metadata(table.schema.metadata)


def missing_words(tables: Iterable[pa.Table]) -> frozenset[str]:
    """Return the words that mark a missing name if a table is from a CSV file, otherwise none."""
    return _MISSING if any(_CSV in (t.schema.metadata or {}) for t in tables) else frozenset()


def concatenate(tables: Iterable[pa.Table], where: str) -> pa.Table:
    """Concatenate the decoded rows of all tables; columns that a table lacks are null.

    Raises:
        CorruptFileError: A column has different types.
    """
    try:
        return pa.concat_tables(map(decoded, tables), promote_options="permissive")
    except pa.ArrowException as error:
        raise CorruptFileError(f"{where}: different columns ({first_line(error)})") from error


def check_unique(names: Sequence[str], where: str) -> None:
    """Raise an InputError if several columns have the same name."""
    repeated = sorted({name for name in names if name.strip() and names.count(name) > 1})
    if repeated:
        raise InputError(f"{where}: several columns are named {repeated[0]!r}; rename all but one")


def column_names(file: Path) -> list[str]:
    """Read the column names of a table in NFC; for JSON, from the first row."""
    try:
        return [nfc(name) for name in _stored_names(file)]
    except _UNREADABLE:
        return []  # read_table reports the error


def _foreign_format(file: Path) -> str:
    """Report whether the first bytes of a text file contradict its suffix, or an empty string."""
    if file.suffix.lower() == ".parquet":
        return ""
    with file.open("rb") as opened:
        head = opened.readline(10_000)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"compressed with {name}; decompress it"
    if b"\0" in head:
        return "UTF-16 or not a text file; convert it with iconv -f UTF-16 -t UTF-8"
    if file.suffix.lower() == ".csv" and b";" in head and b"," not in head:
        return "semicolons separate the columns; use commas"
    return ""


def _read(file: Path) -> pa.Table:
    if fault := _foreign_format(file):
        raise ValueError(fault)
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        with pq.ParquetFile(file) as opened:
            return opened.read()
    if suffix in (".csv", ".tsv"):
        # Read all columns as text, since a text may look like a number.
        as_text = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(_stored_names(file), pa.large_string()),
            strings_can_be_null=False,
        )
        table = pa.csv.read_csv(file, *_csv_options(file), as_text)
        return table.replace_schema_metadata({_CSV: b""})
    rows = list(_json_rows(file))
    return to_arrow({name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))})


def _stored_names(file: Path) -> list[str]:
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return list(pq.read_schema(file).names)
    if suffix in (".csv", ".tsv"):
        return list(pa.csv.open_csv(file, *_csv_options(file)).schema.names)
    return list(next(_json_rows(file), {}))


def _csv_options(file: Path) -> tuple[pa.csv.ReadOptions, pa.csv.ParseOptions]:
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    # With several threads, the parser's errors do not contain the row.
    return pa.csv.ReadOptions(use_threads=False), pa.csv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True
    )


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON list or of JSON lines."""
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        listed = file.suffix.lower() == ".json" and lines.read(1) == "["
        lines.seek(0)
        rows = enumerate(json.load(lines)) if listed else enumerate(lines, start=1)
        for number, row in rows:
            if not (listed or row.strip()):
                continue
            try:
                value = row if listed else json.loads(row)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not isinstance(value, dict):
                raise ValueError(f"a row is {type(value).__name__}, not an object with columns")
            yield value


def to_arrow(columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Convert columns to a table with nulls for None and NaN.

    Raises:
        ValueError: A column has values of several types.
    """
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values, from_pandas=True)
        except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
            raise ValueError(f"column {name!r}: {first_line(error)}") from error
    return pa.table(arrays)


def file_signature(files: Iterable[Path]) -> str:
    """Return a text that changes whenever the path or the content of a file changes."""
    return json.dumps([(str(file.resolve()), digest(file)) for file in files])
