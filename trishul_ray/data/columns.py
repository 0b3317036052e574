"""Clean columns of Arrow tables, and convert them into columns of a dataset.

Errors name the file and, where possible, the row.

A *raw* column holds labels, groups or clients as spelled in the data, as text or integers.
:func:`number_values` turns raw columns into numbers once all rows of all splits are known. Names
that look alike are one name: all are in the Unicode form NFC (:func:`nfc`).

Legend of shapes: N rows.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trishul_ray.errors import CorruptFileError, did_you_mean, first_line
from trishul_ray.runtime.lazy import pc

#: Whole numbers that fit into int64 (no sign, no leading zeros); also as floats are spelled.
_WHOLE_NUMBER = r"^(0|[1-9][0-9]{0,17})(\.0+)?$"


def nfc(name: str) -> str:
    """Return a name in Unicode's composed form; macOS writes an accented letter as two."""
    return unicodedata.normalize("NFC", name)


def with_nfc_names(table: pa.Table) -> pa.Table:
    """Return a table with the names of its columns in the Unicode form NFC."""
    renamed = table.rename_columns([nfc(name) for name in table.column_names])
    return renamed.replace_schema_metadata(table.schema.metadata)


class FileOfLines(str):
    """The name of a file each of whose rows is a line; ``first`` is that of row 0."""

    first: int

    def __new__(cls, name: str, first: int) -> "FileOfLines":
        """Return the name with the line of its first row."""
        made = super().__new__(cls, name)
        made.first = first
        return made


def at_row(where: str, row: int) -> str:
    """Return what messages call a row of the table that they call ``where``."""
    if isinstance(where, FileOfLines):
        return f"{where}, line {row + where.first}"
    return f"{where}, row {row}"


def to_array(values: Sequence[Any], where: str, column: str) -> pa.Array:
    """Return values of one type as an array [N]; None, and NaN among others, become null.

    Values of different types are a CorruptFileError that names two of them.
    """
    kinds = (pa.ArrowException, TypeError, ValueError, OverflowError)
    try:
        return pa.array(values)
    except OverflowError:  # ids of 64 bits without sign, if they are
        with suppress(*kinds):
            return pa.array(values, pa.uint64(), from_pandas=True)
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


def get_column(table: pa.Table, column: str, where: str) -> pa.ChunkedArray:
    """Return ``table[column]``, [N], or raise a CorruptFileError: it is missing or holds a null."""
    if column not in table.column_names:
        names = ", ".join(table.column_names)
        hint = did_you_mean(column, table.column_names)
        raise CorruptFileError(f"{where}: no column {column!r}; it has {names}{hint}")
    values = table.column(column)
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise CorruptFileError(f"{at_row(where, row)}: {column} is null")
    return values


def read_texts(table: pa.Table, column: str, where: str) -> pa.LargeStringArray:
    """Return the texts of ``table[column]``, [N]; they may be empty.

    A missing column, a null, or anything but UTF-8 is a CorruptFileError.
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
                    f"{at_row(where, row)}: {column} is {text!r}, not {allowed}a number in "
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
            f"{at_row(where, row)}: {column} is {labels[row]}, outside 0..{classes - 1}"
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
    rows = [
        dump_answers(value if is_list else _parse_answers(value), at_row(where, row), column)
        for row, value in enumerate(values.to_pylist())
    ]
    return pa.array(rows, pa.large_string())


def _parse_answers(text: str) -> list[str]:
    with suppress(ValueError):
        if text.startswith("[") and _are_texts(answers := json.loads(text)):
            return list(answers)
    return [text]


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def dump_answers(answers: Any, where: str, column: str = "answers") -> str:
    """Return ``answers`` as JSON; raise CorruptFileError if they are no list of texts, or empty."""
    if not _are_texts(answers):
        raise CorruptFileError(f"{where}: {column} is not a list of texts")
    if not answers:
        raise CorruptFileError(f"{where}: {column} is empty; at least one answer is required")
    return json.dumps(answers, ensure_ascii=False)


def read_raw(table: pa.Table, column: str, where: str) -> pa.Array:
    """Return the raw values of ``table[column]``, large_string or int64 [N].

    A column that is missing, holds a null, or is neither text nor integer is a CorruptFileError.
    """
    values = decoded(get_column(table, column, where))
    kind = values.type
    if is_text(kind):
        return values.cast(pa.large_string()).combine_chunks()
    if pa.types.is_nested(kind):
        raise CorruptFileError(
            f"{where}: column {column!r} is {kind}, not text or integer: it needs one value "
            "a row; for several labels (multi-label) or one for each token, add a task of your own "
            "(docs/adding-a-task.md)"
        )
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise CorruptFileError(f"{where}: column {column!r} is {kind}, not text or integer")
    return values.cast(pa.int64()).combine_chunks()


def decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without the dictionary that it may be encoded by."""
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def number_values(
    raw: Mapping[str, pa.Array], names: Sequence[str] | None = None, what: str = "label"
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Replace raw values by their indices in the sorted order of all distinct values.

    Texts that are all whole numbers, as in a CSV file, are sorted as numbers. The ``names`` that
    occur come first, in this order. Returns the indices int64 [N] of every split, and the values in
    the order of their indices. ``what`` names the column in messages.

    Raises:
        CorruptFileError: the column is text in one split and integer in another.
    """
    if len({column.type for column in raw.values()}) > 1:
        kinds = ", ".join(f"{split}: {column.type}" for split, column in raw.items())
        raise CorruptFileError(f"column {what!r} has different types in the splits ({kinds})")
    values = pa.chunked_array(list(raw.values()))
    if is_text(values.type) and pc.all(pc.match_substring_regex(values, _WHOLE_NUMBER)).as_py():
        raw = {
            split: pc.replace_substring_regex(column, r"\.0+$", "").cast(pa.int64())
            for split, column in raw.items()
        }
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


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def holds_images(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds images as on the hub: structs {bytes, path}."""
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)
