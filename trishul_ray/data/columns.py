"""Columns of Arrow tables as a dataset's columns, with every fault named by file and row.

A *raw* column holds labels, groups or clients as the data spell them, texts or integers; it
becomes numbers once all rows of all splits are known (:func:`number`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trishul_ray.data.base import Column
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
