"""Tables in files: Parquet, JSON lines, CSV and TSV, with every fault named by file and row."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trishul_ray.errors import CorruptFileError

#: What :func:`read_table` reads, by the end of the file's name.
SUFFIXES = (".parquet", ".jsonl", ".csv", ".tsv")


def read_table(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a file.

    Args:
        file: ends in one of :data:`SUFFIXES`.
        columns: those that are wanted; one that the file lacks is left out of the table.

    Raises:
        CorruptFileError: the file is not what its name says; names file and, where known, row.
    """
    readers = {".parquet": _parquet, ".jsonl": _json, ".csv": _csv, ".tsv": _csv}
    return readers[file.suffix.lower()](file, columns)


def json_lines(lines: Iterable[bytes], where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of each line that is not blank.

    Raises:
        CorruptFileError: a line is not one JSON object in UTF-8.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise CorruptFileError(f"{where}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise CorruptFileError(f"{where}, line {number}: not a JSON object")
        yield number, value


def state_of(files: Iterable[Path]) -> str:
    """Text that changes when one of ``files`` does: path, size and time of each."""
    found = [file.resolve() for file in files]
    return json.dumps([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in found])


def _parquet(file: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        with pq.ParquetFile(file) as opened:
            have = opened.schema_arrow.names
            wanted = None if columns is None else [name for name in columns if name in have]
            # Nothing that is wanted: the whole table, so that the reader can say what it has.
            return opened.read(wanted or None)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, "parquet", error) from error


def _csv(file: Path, columns: Sequence[str] | None) -> pa.Table:
    # One thread, or the parser does not know which row it is in.
    parse = pa.csv.ParseOptions(
        delimiter="\t" if file.suffix.lower() == ".tsv" else ",", newlines_in_values=True
    )
    read = pa.csv.ReadOptions(use_threads=False)
    # All as text: what looks like a number in a column of texts is a text.
    try:
        names = pa.csv.open_csv(file, read, parse).schema.names
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()), strings_can_be_null=False
        )
        table = pa.csv.read_csv(file, read, parse, convert)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, "CSV", error) from error
    return table if columns is None else _select(table, columns)


def _json(file: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        with file.open("rb") as lines:
            rows = [row for _, row in json_lines(lines, str(file))]
    except OSError as error:
        raise _unreadable(file, "JSON lines", error) from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    wanted = [name for name in names if columns is None or name in columns] or names
    arrays = []
    for name in wanted:
        try:
            arrays.append(pa.array([row.get(name) for row in rows]))
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            message = f"{file}: column {name!r} is of mixed kinds ({reason})"
            raise CorruptFileError(message) from error
    return pa.table(arrays, names=wanted)


def _select(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    wanted = [name for name in columns if name in table.column_names]
    return table.select(wanted) if wanted else table


def _unreadable(file: Path, kind: str, error: Exception) -> CorruptFileError:
    reason = str(error).splitlines()[0]
    return CorruptFileError(f"{file}: not a readable {kind} file ({reason})")
