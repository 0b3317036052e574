"""Read columns of Arrow tables: texts, labels, answers, and names of classes, groups and clients.

Names are in Unicode's composed form (NFC). Error messages contain the table and, if possible, the
row.

Legend of shapes: N rows.
"""

import json
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from trishul_ray.errors import CorruptFileError, did_you_mean, join_limited
from trishul_ray.runtime.lazy import pc

#: Whole numbers that fit into int64 (no sign, no leading zeros), optionally spelled as floats.
_WHOLE_NUMBER = r"^(0|[1-9][0-9]{0,17})(\.0+)?$"


def nfc(name: str) -> str:
    """Normalize a name to Unicode's composed form; macOS decomposes accented letters."""
    return unicodedata.normalize("NFC", name)


def lookalike(name: str) -> str:
    """Fold names that differ only in case, width or invisible characters to the same text."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(char for char in folded if unicodedata.category(char) != "Cf")


def is_text(kind: pa.DataType) -> bool:
    """Return whether columns of this type contain texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def holds_images(kind: pa.DataType) -> bool:
    """Return whether columns of this type contain images as on the hub, structs {bytes, path}."""
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def decoded(table: pa.Table) -> pa.Table:
    """Replace dictionary columns with plain values, and string views with plain strings."""
    for number, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        kind = pa.large_string() if kind == pa.string_view() else kind
        if kind != field.type:
            table = table.set_column(number, field.name, table.column(number).cast(kind))
    return table


def at_row(where: str, row: int) -> str:
    """Format the name of a row for messages."""
    return f"{where}, row {row}"


def get_column(table: pa.Table, column: str, where: str) -> pa.ChunkedArray:
    """Return ``table[column]`` [N], or raise a CorruptFileError if it is missing or has nulls."""
    if column not in table.column_names:
        names = ", ".join(table.column_names)
        hint = did_you_mean(column, table.column_names)
        raise CorruptFileError(f"{where}: no column {column!r}; existing columns: {names}{hint}")
    values = table.column(column)
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise CorruptFileError(f"{at_row(where, row)}: {column} is null")
    return values


def read_texts(table: pa.Table, column: str, where: str) -> pa.LargeStringArray:
    """Read the texts ``table[column]`` [N], or raise a CorruptFileError for invalid values."""
    values = get_column(table, column, where)
    if not is_text(values.type):
        raise CorruptFileError(f"{where}: column {column!r} is {values.type}, not text; convert it")
    texts = values.cast(pa.large_string()).combine_chunks()
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise CorruptFileError(f"{where}: column {column!r} is not UTF-8 ({error})") from error
    return texts


def read_labels(
    table: pa.Table, column: str, classes: int, where: str, names: Sequence[str] = ()
) -> np.ndarray:
    """Read the labels ``table[column]``, int64 [N].

    Texts may be whole numbers or the ``names`` of the classes.

    Raises:
        CorruptFileError: The column is missing, contains a null, or is neither integer nor text, or
            a label is neither in 0..classes-1 nor a class name.
    """
    values = get_column(table, column, where)
    if is_text(values.type):
        numbers = {str(k): k for k in range(classes)} | {name: k for k, name in enumerate(names)}
        found = [numbers.get(text, -1) for text in values.to_pylist()]
    elif pa.types.is_integer(values.type):
        found = values.to_pylist()
    else:
        raise CorruptFileError(f"{where}: column {column!r} is {values.type}, not integer or text")
    labels = np.array(found, dtype=np.int64)
    invalid = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(invalid):
        row = int(invalid[0])
        allowed = f"a class ({', '.join(names)}) or " if names else ""
        raise CorruptFileError(
            f"{at_row(where, row)}: {column} is {values[row].as_py()!r}, not {allowed}a number in "
            f"0..{classes - 1}"
        )
    return labels


def read_answers(table: pa.Table, column: str, where: str) -> pa.LargeStringArray:
    """Read the answers ``table[column]`` [N], each as a JSON list of texts.

    A row may contain a list of texts, a single text, or a JSON list of texts.

    Raises:
        CorruptFileError: The column is missing, or a row has no answer.
    """
    rows = []
    for row, value in enumerate(get_column(table, column, where).to_pylist()):
        answers = list_of_texts(value)
        if answers is None and isinstance(value, str):
            answers = [value]
        if not answers:
            raise CorruptFileError(
                f"{at_row(where, row)}: {column} is {str(value)[:40]!r}, not a list of texts"
            )
        rows.append(json.dumps(answers, ensure_ascii=False))
    return pa.array(rows, pa.large_string())


def list_of_texts(value: Any) -> list[str] | None:
    """Parse a list of texts, or its JSON text; other values return None."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return list(value) if texts else None


def number_names(values: pa.Array, names: Sequence[str] = ()) -> tuple[np.ndarray, tuple[str, ...]]:
    """Replace names with their indices in the sorted order of distinct names.

    Texts that are all whole numbers, as in a CSV file, are sorted as numbers. Entries of ``names``
    that occur precede the others, in their order.

    Args:
        values: Texts or integers [N], which may contain nulls.
        names: Names that precede the others.

    Returns:
        The indices, int64 [N], -1 for nulls, and the names.
    """
    if is_text(values.type) and pc.all(pc.match_substring_regex(values, _WHOLE_NUMBER)).as_py():
        values = pc.replace_substring_regex(values, r"\.0+$", "").cast(pa.int64())
    distinct = pc.unique(values.drop_null()).sort().to_pylist()
    distinct = [name for name in names if name in distinct] + [
        value for value in distinct if value not in names
    ]
    indices = pc.index_in(values, pa.array(distinct, values.type), skip_nulls=True)
    numbers: np.ndarray = pc.fill_null(indices, -1).to_numpy(zero_copy_only=False)
    return numbers.astype(np.int64), tuple(str(value) for value in distinct)


def class_names(table: pa.Table, column: str) -> tuple[str, ...] | None:
    """Read the class names from a table's Hugging Face metadata, or return None."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        composed = {nfc(key): value for key, value in features.items()}
        return tuple(nfc(str(name)) for name in composed[column]["names"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def common_class_names(tables: Iterable[pa.Table], column: str) -> tuple[str, ...] | None:
    """Read the class names from the metadata of tables, or return None if no table has any.

    Raises:
        CorruptFileError: Tables number their classes differently.
    """
    found = dict.fromkeys(filter(None, (class_names(table, column) for table in tables)))
    if len(found) > 1:
        lists = " and ".join(f"({join_limited(names, 10)})" for names in list(found)[:2])
        raise CorruptFileError(
            f"column {column!r}: files have different class names, {lists}; store labels as text"
        )
    return next(iter(found), None)
