"""Read table files: CSV, TSV, JSON, JSON lines and Parquet."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.columns import nfc
from trishul_ray.errors import CorruptFileError, InputError, first_line
from trishul_ray.runtime.lazy import pq
from trishul_ray.storage.integrity import digest, lfs_pointer

#: Suffixes of the files that :func:`read_table` can read.
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")

#: Errors of libraries for files that are missing or malformed.
_UNREADABLE = (pa.ArrowException, OSError, ValueError, RecursionError)


def read_table(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a file with one of :data:`SUFFIXES`; the columns' names are in NFC.

    Columns of CSV files are texts. ``columns`` that the file lacks are left out; if it lacks all of
    them, all of its columns are read, so that an error message can list them.

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
    table = table.rename_columns(names).replace_schema_metadata(table.schema.metadata)
    check_unique(names, str(file))
    wanted = [name for name in names if name in (columns or ())]
    return table.select(wanted) if wanted else table


def read_tables(files: Sequence[Path], columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of consecutive files; columns that a file lacks are null.

    Files whose columns have different types are a CorruptFileError.
    """
    tables = [read_table(file, columns) for file in files]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        names = ", ".join(map(str, files))
        raise CorruptFileError(f"{names}: different columns ({first_line(error)})") from error


def check_unique(names: Sequence[str], where: str) -> None:
    """Raise an InputError if columns with a name have the same one."""
    repeated = sorted({name for name in names if name.strip() and names.count(name) > 1})
    if repeated:
        raise InputError(f"{where}: several columns are called {repeated[0]!r}; rename all but one")


def column_names(file: Path) -> list[str]:
    """Return the names of a table's columns in NFC; of JSON, the names in the first row."""
    try:
        return [nfc(name) for name in _stored_names(file)]
    except _UNREADABLE:
        return []  # read_table reports it


def _read(file: Path) -> pa.Table:
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        with pq.ParquetFile(file) as opened:
            return opened.read()
    if suffix in (".csv", ".tsv"):
        # Read all columns as text: a text may look like a number.
        as_text = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(_stored_names(file), pa.large_string()),
            strings_can_be_null=False,
        )
        return pa.csv.read_csv(file, *_csv_options(file), as_text)
    return to_arrow(list(_json_rows(file)))


def _stored_names(file: Path) -> list[str]:
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return list(pq.read_schema(file).names)
    if suffix in (".csv", ".tsv"):
        return list(pa.csv.open_csv(file, *_csv_options(file)).schema.names)
    return list(to_arrow([next(_json_rows(file), {})]).column_names)


def _csv_options(file: Path) -> tuple[pa.csv.ReadOptions, pa.csv.ParseOptions]:
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    # With several threads, the parser's errors do not name the row.
    return pa.csv.ReadOptions(use_threads=False), pa.csv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True
    )


def _json_rows(file: Path) -> Iterator[Any]:
    """Yield the values of a list, or of lines."""
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        if file.suffix.lower() == ".json" and lines.read(1) == "[":
            lines.seek(0)
            yield from json.load(lines)
            return
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from error


def to_arrow(rows: Sequence[Any]) -> pa.Table:
    """Return dictionaries as a table with all of their keys; None and NaN become null.

    A row that is no dictionary, or a column with values of several types, is a ValueError.
    """
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"a row is {type(row).__name__}, not an object with columns")
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: to_array([row.get(name) for row in rows], name) for name in names})


def to_array(values: Sequence[Any], column: str) -> pa.Array:
    """Return the values of a column as an array; values of several types are a ValueError."""
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"column {column!r}: {first_line(error)}") from error


def file_signature(files: Iterable[Path]) -> str:
    """Return a text that changes when the path or the content of a file does."""
    return json.dumps([(str(file.resolve()), digest(file)) for file in files])
