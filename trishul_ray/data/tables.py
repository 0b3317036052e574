"""Read table files, and convert columns of Arrow tables into columns of a dataset.

Errors name the file and, where possible, the row.

A *raw* column holds labels, groups or clients as spelled in the data, as text or integers.
:func:`number_values` turns raw columns into numbers once all rows of all splits are known.

Legend of shapes: N rows.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.prepared import Column
from trishul_ray.errors import CorruptFileError, InputError, did_you_mean, first_line
from trishul_ray.files import digest
from trishul_ray.lazy import pc, pq
from trishul_ray.rng import numpy_rng

#: File name suffixes that :func:`read_table` can read.
SUFFIXES = (".parquet", ".jsonl", ".csv", ".tsv")

#: What some programs write between the columns of a CSV file in place of commas.
_DELIMITERS = (";", "\t", "|", ",")

#: First and last bytes of a Parquet file.
_PARQUET = b"PAR1"

#: Whole numbers that fit into int64 (no sign, no leading zeros); also as floats are spelled.
_WHOLE_NUMBER = r"^(0|[1-9][0-9]{0,17})(\.0+)?$"


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


def to_array(values: Sequence[Any], where: str, column: str) -> pa.Array:
    """Return values of one type as an array [N]; None, and NaN among others, become null.

    Raises:
        CorruptFileError: the values have different types; the message names two of them.
    """
    kinds = (pa.ArrowException, TypeError, ValueError, OverflowError)
    try:
        return pa.array(values)
    except kinds:
        pass
    try:
        return pa.array(values, from_pandas=True)
    except kinds as error:
        gaps = ("NoneType", "NAType", "NaTType")
        known = [
            n for n, v in enumerate(values)
            if type(v).__name__ not in gaps and not (isinstance(v, float) and v != v)
        ]  # fmt: skip
        other = next((n for n in known if type(values[n]) is not type(values[known[0]])), None)
        why = first_line(error)
        if other is not None:
            why = f"{values[known[0]]!r} in row {known[0]}, {values[other]!r} in row {other}"
        raise CorruptFileError(
            f"{where}: column {column!r} has values of different types ({why})"
        ) from error


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


def get_column(table: pa.Table, column: str, where: str) -> pa.ChunkedArray:
    """Return ``table[column]``, [N].

    Raises:
        CorruptFileError: the column is missing or holds a null.
    """
    if column not in table.column_names:
        names = ", ".join(table.column_names)
        hint = did_you_mean(column, table.column_names)
        raise CorruptFileError(f"{where}: no column {column!r}; it has {names}{hint}")
    values = table.column(column)
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise CorruptFileError(f"{where}, row {row}: {column} is null")
    return values


def read_texts(table: pa.Table, column: str, where: str) -> pa.LargeStringArray:
    """Return the texts of ``table[column]``, [N]; they may be empty.

    Raises:
        CorruptFileError: the column is missing, holds a null, or is not text in UTF-8.
    """
    values = get_column(table, column, where)
    if not is_text(values.type):
        raise CorruptFileError(f"{where}: column {column!r} is {values.type}, not text")
    texts = values.cast(pa.large_string()).combine_chunks()
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise CorruptFileError(f"{where}: column {column!r} is not UTF-8 ({error})") from error
    return texts


def read_labels(
    table: pa.Table, column: str, classes: int, where: str, names: Sequence[str] = ()
) -> np.ndarray:
    """Return the labels of ``table[column]``, int64 [N].

    Texts, such as all columns of a CSV file, may be whole numbers or the ``names`` of the classes.

    Raises:
        CorruptFileError: the column is missing, holds a null, is neither integer nor text, or a
            label is outside 0..classes-1 and no name of a class.
    """
    values = get_column(table, column, where)
    if is_text(values.type):
        texts = values.to_pylist()
        numbers = {str(k): k for k in range(classes)} | {name: k for k, name in enumerate(names)}
        for row, text in enumerate(texts):
            if text not in numbers:
                allowed = f"a class ({', '.join(names)}) or " if names else ""
                raise CorruptFileError(
                    f"{where}, row {row}: {column} is {text!r}, not {allowed}a number in "
                    f"0..{classes - 1}"
                )
        return np.array([numbers[text] for text in texts], dtype=np.int64)
    if not pa.types.is_integer(values.type):
        raise CorruptFileError(f"{where}: column {column!r} is {values.type}, not integer or text")
    labels: np.ndarray = values.to_numpy().astype(np.int64)
    invalid = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(invalid):
        row = int(invalid[0])
        raise CorruptFileError(
            f"{where}, row {row}: {column} is {labels[row]}, outside 0..{classes - 1}"
        )
    return labels


def read_answers(table: pa.Table, column: str, where: str) -> pa.LargeStringArray:
    """Return the answers of ``table[column]``, [N], those of a row as a JSON list of texts.

    A row may hold a list of texts, a single text, or a JSON list of texts.

    Raises:
        CorruptFileError: the column is missing or of another type, or a row has no answer.
    """
    values = get_column(table, column, where)
    kind = values.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_text(kind) or (is_list and is_text(kind.value_type))):
        raise CorruptFileError(f"{where}: column {column!r} is {kind}, not a list of texts")
    rows = []
    for row, value in enumerate(values.to_pylist()):
        answers = value if is_list else _parse_answers(value)
        rows.append(dump_answers(answers, f"{where}, row {row}", column))
    return pa.array(rows, pa.large_string())


def _parse_answers(text: str) -> list[str]:
    try:
        answers = json.loads(text) if text.startswith("[") else None
    except ValueError:
        answers = None
    if isinstance(answers, list) and all(isinstance(answer, str) for answer in answers):
        return answers
    return [text]


def dump_answers(answers: Any, where: str, column: str = "answers") -> str:
    """Return ``answers`` as JSON; raise CorruptFileError if they are no list of texts, or empty."""
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise CorruptFileError(f"{where}: {column} is not a list of texts")
    if not answers:
        raise CorruptFileError(f"{where}: {column} is empty; at least one answer is required")
    return json.dumps(answers, ensure_ascii=False)


def read_raw(table: pa.Table, column: str, where: str) -> pa.Array:
    """Return the raw values of ``table[column]``, large_string or int64 [N].

    Raises:
        CorruptFileError: the column is missing, holds a null, is neither text nor integer, or
            holds a negative integer, which on the hub marks a row without label.
    """
    values = get_column(table, column, where)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if is_text(values.type):
        return values.cast(pa.large_string()).combine_chunks()
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise CorruptFileError(f"{where}: column {column!r} is {kind}, not text or integer")
    numbers = values.cast(pa.int64()).combine_chunks()
    row = pc.index(pc.less(numbers, 0), True).as_py()
    if row >= 0:
        raise CorruptFileError(
            f"{where}, row {row}: {column} is {numbers[row]}; it must not be negative"
        )
    return numbers


def number_values(
    raw: Mapping[str, pa.Array], names: Sequence[str] | None = None, what: str = "label"
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Replace raw values by their indices in the sorted order of all distinct values.

    Texts that are all whole numbers, as in a CSV file, are sorted as numbers.

    Args:
        raw: the raw column [N] of every split, of one type.
        names: values that come first, in this order, if they occur; the others follow, sorted.
        what: name of the column, for messages.

    Returns:
        the indices int64 [N] of every split, and the values in the order of their indices.

    Raises:
        CorruptFileError: the column is text in one split and integer in another.
    """
    if len({column.type for column in raw.values()}) > 1:
        kinds = ", ".join(f"{split}: {column.type}" for split, column in raw.items())
        raise CorruptFileError(f"column {what!r} has different types in the splits ({kinds})")
    values = pa.chunked_array(list(raw.values()))
    if is_text(values.type) and pc.all(pc.match_substring_regex(values, _WHOLE_NUMBER)).as_py():
        raw = {split: _as_integers(column) for split, column in raw.items()}
        values = pa.chunked_array(list(raw.values()))
    distinct = pc.unique(values).sort().to_pylist()
    if names is not None:
        known = [name for name in names if name in distinct]
        distinct = known + [value for value in distinct if value not in names]
    order = pa.array(distinct, values.type)
    indices = {
        split: pc.index_in(column, order).to_numpy().astype(np.int64)
        for split, column in raw.items()
    }
    return indices, tuple(str(value) for value in distinct)


def _as_integers(texts: pa.Array) -> pa.Array:
    """Return texts that are whole numbers, such as ``2`` or ``2.0``, as int64."""
    return pc.replace_substring_regex(texts, r"\.0+$", "").cast(pa.int64())


def join(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Concatenate the columns [N_i, ...] of consecutive parts to [sum of N_i, ...]."""
    joined: dict[str, Column] = {}
    for name, first in parts[0].items():
        columns: list[Any] = [part[name] for part in parts]
        if not isinstance(first, pa.Array):
            joined[name] = np.concatenate(columns)
            continue
        if len(kinds := dict.fromkeys(str(column.type) for column in columns)) > 1:
            raise CorruptFileError(f"column {name!r} has different types ({', '.join(kinds)})")
        joined[name] = pa.concat_arrays(columns)
    return joined


def length(columns: Mapping[str, Column]) -> int:
    """Return the number of rows N of columns [N, ...]."""
    return len(next(iter(columns.values())))


def count_test_rows(total: int, share: float) -> int:
    """Return how many of ``total`` rows, at least 2, are set aside as a ``share`` for the test."""
    return min(total - 1, max(1, round(share * total)))


def split_off_test(
    columns: Mapping[str, Column], share: float, where: str
) -> dict[str, dict[str, Column]]:
    """Split rows into ``train`` and a ``share`` for ``test``, each with at least one row.

    A permutation drawn from ``numpy_rng(0, "test-share")`` decides, the same for every experiment.
    Rows keep their order. With fewer than two rows, an InputError is raised that names ``where``
    they are from.
    """
    total = length(columns)
    if total < 2:
        rows = "1 row" if total == 1 else f"{total} rows"
        raise InputError(f"data.test_share={share}: the {rows} of {where} cannot be split")
    count = count_test_rows(total, share)
    order = numpy_rng(0, "test-share").permutation(total)
    rows_by_split = {"train": np.sort(order[count:]), "test": np.sort(order[:count])}
    return {
        split: {name: take_rows(column, rows) for name, column in columns.items()}
        for split, rows in rows_by_split.items()
    }


def take_rows(column: Column, rows: np.ndarray) -> Column:
    """Return the rows [n] of a column, in their order."""
    return column.take(pa.array(rows)) if isinstance(column, pa.Array) else column[rows]


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
