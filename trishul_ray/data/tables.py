"""Columns of Arrow tables as a dataset's columns, with every fault named by file and row.

A *raw* column holds labels, groups or clients as the data spell them, texts or integers; it
becomes numbers once all rows of all splits are known (:func:`number`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from trishul_ray.data.prepared import Column
from trishul_ray.errors import CorruptFileError

#: How a whole number is spelled that int64 holds and that no other spelling equals.
_WHOLE = r"^(0|[1-9][0-9]{0,17})$"


def take(table: pa.Table, column: str, where: str) -> pa.ChunkedArray:
    """``table[column]``, [N].

    Raises:
        CorruptFileError: the column is missing or holds a null; names the row.
    """
    if column not in table.column_names:
        have = ", ".join(table.column_names)
        raise CorruptFileError(f"{where}: no column {column!r}; it has {have}")
    values = table.column(column)
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise CorruptFileError(f"{where}, row {row}: {column} is null")
    return values


def read_texts(table: pa.Table, column: str, where: str) -> pa.LargeStringArray:
    """Texts of ``table[column]``, [N]; empty ones are texts too.

    Raises:
        CorruptFileError: the column is missing, has a null, is not text or not UTF-8.
    """
    values = take(table, column, where)
    if not _is_text(values.type):
        raise CorruptFileError(f"{where}: column {column!r} is {values.type}, not text")
    texts = values.cast(pa.large_string()).combine_chunks()
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise CorruptFileError(f"{where}: column {column!r} is not UTF-8 ({error})") from error
    return texts


def read_labels(table: pa.Table, column: str, classes: int, where: str) -> np.ndarray:
    """Labels of ``table[column]``, int64 [N].

    Raises:
        CorruptFileError: the column is missing, not integer, null, or outside 0..classes-1.
    """
    values = take(table, column, where)
    if not pa.types.is_integer(values.type):
        raise CorruptFileError(f"{where}: column {column!r} is {values.type}, not integer")
    labels: np.ndarray = values.to_numpy().astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        row = int(wrong[0])
        raise CorruptFileError(
            f"{where}, row {row}: {column} is {labels[row]}, outside 0..{classes - 1}"
        )
    return labels


def read_answers(table: pa.Table, column: str, where: str) -> pa.LargeStringArray:
    """Answers of ``table[column]``, each row's as a JSON list of texts, [N].

    A row may hold a list of texts, one text, or a text that is a JSON list of texts.

    Raises:
        CorruptFileError: the column is missing or of another type, or a row has no answer.
    """
    values = take(table, column, where)
    kind = values.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (_is_text(kind) or (is_list and _is_text(kind.value_type))):
        raise CorruptFileError(f"{where}: column {column!r} is {kind}, not a list of texts")
    written = []
    for row, value in enumerate(values.to_pylist()):
        answers = value if is_list else _listed(value)
        written.append(dump_answers(answers, f"{where}, row {row}", column))
    return pa.array(written, pa.large_string())


def dump_answers(answers: Any, where: str, column: str = "answers") -> str:
    """``answers`` as a JSON list; a CorruptFileError unless it is a list of at least one text."""
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise CorruptFileError(f"{where}: {column} is not a list of texts")
    if not answers:
        raise CorruptFileError(f"{where}: {column} is empty; at least one answer is needed")
    return json.dumps(answers, ensure_ascii=False)


def _listed(text: str) -> list[str]:
    try:
        found = json.loads(text) if text.startswith("[") else None
    except ValueError:
        found = None
    is_list = isinstance(found, list) and all(isinstance(item, str) for item in found)
    return found if is_list and found is not None else [text]


def read_raw(table: pa.Table, column: str, where: str) -> pa.Array:
    """Raw values of ``table[column]``, [N]: large_string or int64.

    Raises:
        CorruptFileError: the column is missing, has a null, or is neither text nor integer; or an
            integer is negative, which on the hub marks a row without label.
    """
    values = take(table, column, where)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if _is_text(values.type):
        return values.cast(pa.large_string()).combine_chunks()
    if not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        kind = values.type
        raise CorruptFileError(f"{where}: column {column!r} is {kind}, not text or integer")
    numbers = values.cast(pa.int64()).combine_chunks()
    row = pc.index(pc.less(numbers, 0), True).as_py()
    if row >= 0:
        raise CorruptFileError(
            f"{where}, row {row}: {column} is {numbers[row]}; negative numbers mean no {column}"
        )
    return numbers


def number(
    raw: Mapping[str, pa.Array], names: Sequence[str] | None = None, what: str = "label"
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Raw columns of all splits to int64 [N] by the sorted order of their values, and the names.

    Texts that all spell whole numbers, as in a CSV file, are sorted as numbers.

    Args:
        raw: by split; texts everywhere or integers everywhere.
        names: what to number by instead: texts that come first, in this order, where they occur.
        what: the column's name, for messages.

    Raises:
        CorruptFileError: texts in one split and integers in another.
    """
    if len({column.type for column in raw.values()}) > 1:
        kinds = ", ".join(f"{split}: {column.type}" for split, column in raw.items())
        raise CorruptFileError(f"column {what!r} is not of one kind in all splits ({kinds})")
    values = pa.chunked_array(list(raw.values()))
    if _is_text(values.type) and pc.all(pc.match_substring_regex(values, _WHOLE)).as_py():
        values = values.cast(pa.int64())
        raw = {split: column.cast(pa.int64()) for split, column in raw.items()}
    found = pc.unique(values).sort().to_pylist()
    if names is not None:
        found = [n for n in names if n in found] + [n for n in found if n not in names]
    order = pa.array(found, values.type)
    numbered = {
        split: pc.index_in(column, order).to_numpy().astype(np.int64)
        for split, column in raw.items()
    }
    return numbered, tuple(str(value) for value in found)


def join(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Columns [N_i, ...] of consecutive parts as one, [sum of N_i, ...]."""
    return {
        name: pa.concat_arrays([part[name] for part in parts])
        if isinstance(parts[0][name], pa.Array)
        else np.concatenate([part[name] for part in parts])
        for name in parts[0]
    }


def length(columns: Mapping[str, Column]) -> int:
    """Rows N of columns [N, ...]."""
    return len(next(iter(columns.values())))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


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
