"""Clean columns of Arrow tables, and convert them into columns of a dataset.

Errors name the file and, where possible, the row.

A *raw* column holds labels, groups or clients as spelled in the data, as text or integers.
:func:`number_values` turns raw columns into numbers once all rows of all splits are known.

Legend of shapes: N rows.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.dataset import Kind
from trishul_ray.errors import CorruptFileError, InputError, did_you_mean, first_line
from trishul_ray.lazy import pc

#: Whole numbers that fit into int64 (no sign, no leading zeros); also as floats are spelled.
_WHOLE_NUMBER = r"^(0|[1-9][0-9]{0,17})(\.0+)?$"


def to_array(values: Sequence[Any], where: str, column: str) -> pa.Array:
    """Return values of one type as an array [N]; None, and NaN among others, become null.

    Values of different types are a CorruptFileError that names two of them.
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


def get_column(table: pa.Table, column: str, where: str) -> pa.ChunkedArray:
    """Return ``table[column]``, [N], or raise a CorruptFileError: it is missing or holds a null."""
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
    rows = [
        dump_answers(value if is_list else _parse_answers(value), f"{where}, row {row}", column)
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

    Raises:
        CorruptFileError: the column is missing, holds a null, is neither text nor integer, or
            holds a negative integer, which on the hub marks a row without label.
    """
    values = _decoded(get_column(table, column, where))
    kind = values.type
    if is_text(kind):
        return values.cast(pa.large_string()).combine_chunks()
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise CorruptFileError(f"{where}: column {column!r} is {kind}, not text or integer")
    numbers = values.cast(pa.int64()).combine_chunks()
    row = pc.index(pc.less(numbers, 0), True).as_py()
    if row >= 0:
        raise CorruptFileError(
            f"{where}, row {row}: {column} is {numbers[row]}; it must not be negative"
        )
    return numbers


def _decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
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


#: The platform's column names: the keys of ``data.columns``.
COLUMN_NAMES = (
    *("text", "text_pair", "label", "image"),
    *("question", "context", "answers"),
    *("client", "group"),
)

#: Columns that rows of each kind must have. If several kinds fit, the first is taken.
_REQUIRED_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "image": ("image", "label"),
    "qa": ("question", "context", "answers"),
    "text": ("text", "label"),
}


@dataclass(frozen=True)
class ColumnMapping:
    """What the rows are, and the platform's column names with those of the data."""

    kind: Kind
    columns: Mapping[str, str]

    @classmethod
    def resolve(cls, configured: Mapping[str, str], existing: Sequence[str]) -> "ColumnMapping":
        """Combine ``data.columns`` with the columns that the data have.

        An unknown key or column is an InputError, as are missing columns to train on.
        """
        names = ", ".join(existing)
        for name, column in configured.items():
            if name not in COLUMN_NAMES:
                known = ", ".join(COLUMN_NAMES)
                hint = did_you_mean(name, COLUMN_NAMES)
                raise InputError(f"data.columns.{name}: unknown; known are {known}{hint}")
            if column not in existing:
                raise InputError(
                    f"data.columns.{name}={column!r} is not in the data; its columns are {names}"
                    + did_you_mean(column, existing)
                )
        columns = {name: configured.get(name, name) for name in COLUMN_NAMES}
        columns = {name: column for name, column in columns.items() if column in existing}
        for kind, required in _REQUIRED_COLUMNS.items():
            if all(name in columns for name in required):
                return cls(kind, columns)
        options = "; or ".join(" and ".join(required) for required in _REQUIRED_COLUMNS.values())
        raise InputError(
            f"data.columns: the data's columns are {names}; set those of {options} "
            "(e.g. data.columns={text: body, label: topic})"
        )


#: Pairs of a table's name, for messages, and its rows.
NamedTables = Sequence[tuple[str, pa.Table]]

#: Columns that hold names: a class, a sub-dataset, a client.
_NAMES = ("label", "group", "client")

#: Columns without which a row says nothing; of the two texts of a pair, one may be blank.
_CONTENTS = (("text", "text_pair"), ("question",), ("context",), ("image",))

#: Rows to name in one message for each fault.
_MAX_ROWS = 5

#: Rows left out to name in ``result.json``.
_MAX_SKIPPED = 100


@dataclass(frozen=True)
class CleanTables:
    """Cleaned tables of one split.

    Attributes:
        tables: their names and rows; what a row lacks is filled with any value of its type.
        kept: whether a row lacks nothing, bool [N] of each table.
    """

    tables: NamedTables
    kept: Sequence[np.ndarray]


def clean(
    splits: Mapping[str, NamedTables], columns: Mapping[str, str], *, skip_broken: bool
) -> tuple[dict[str, CleanTables], str, tuple[str, ...]]:
    """Return cleaned tables by split, a note on what was changed, and the names of rows left out.

    ``columns`` has the names of the data's columns, by those of the platform. With ``skip_broken``,
    rows that lack something are left out instead of refused.

    Raises:
        CorruptFileError: rows lack something; the message has their number, columns and first rows.
    """
    faults: dict[tuple[str, str], np.ndarray] = {}  # rows that lack a column, by table and column
    stripped: Counter[str] = Counter()  # values by column
    found, skipped = {}, []
    for split, tables in splits.items():
        cleaned, kept = [], []
        for where, whole in tables:
            table, lacking = _clean_table(whole, where, columns, stripped)
            faults |= {(where, name): rows for name, rows in lacking.items()}
            missing = np.logical_or.reduce([np.zeros(whole.num_rows, bool), *lacking.values()])
            skipped += [f"{where}, row {row}" for row in np.flatnonzero(missing)]
            cleaned.append((where, table))
            kept.append(~missing)
        found[split] = CleanTables(cleaned, kept)
    if faults and not skip_broken:
        raise CorruptFileError(_describe(faults, columns))
    notes = [
        f"white space around {_count(count, 'value')} of column {column!r} removed"
        for column, count in stripped.items()
    ]
    if skipped:
        lacked = " or ".join(dict.fromkeys(name for _, name in faults))
        notes.append(f"{_count(len(skipped), 'row')} without {lacked} skipped")
    if len(skipped) > _MAX_SKIPPED:
        skipped[_MAX_SKIPPED:] = [f"and {len(skipped) - _MAX_SKIPPED} more rows"]
    return found, "".join(f", {note}" for note in notes), tuple(skipped)


def differing_in_case(names: Sequence[str]) -> str:
    """Return a note on names that differ in case alone; empty if there are none."""
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(name.casefold(), []).append(name)
    pairs = [" and ".join(map(repr, same)) for same in spellings.values() if len(same) > 1]
    return f", warning: the classes {', '.join(pairs)} differ in case alone" if pairs else ""


def check_unique(names: Sequence[str], where: str) -> None:
    """Raise an InputError if columns have the same name; columns without a name may."""
    repeated = sorted({name for name in names if name.strip() and names.count(name) > 1})
    if repeated:
        first = repeated[0]
        places = ", ".join(str(n) for n, name in enumerate(names, start=1) if name == first)
        raise InputError(
            f"{where}: {names.count(first)} columns are called {first!r} (columns {places} of "
            f"{len(names)}); rename or remove all but one"
        )


def _clean_table(
    table: pa.Table, where: str, columns: Mapping[str, str], stripped: Counter[str]
) -> tuple[pa.Table, dict[str, np.ndarray]]:
    """Return a cleaned table, and which of its rows lack what, bool [N] by column."""
    lacking: dict[str, np.ndarray] = {}
    for name in _NAMES:
        if (column := columns.get(name, "")) in table.column_names:
            values, missing, count = _clean_names(table.column(column), where, column)
            table = _replaced(table, column, values)
            lacking[name] = missing
            if count:
                stripped[column] += count
    for names in _CONTENTS:
        present = [name for name in names if columns.get(name) in table.column_names]
        blank = []
        for name in present:
            values, missing = _clean_content(table.column(columns[name]))
            table = _replaced(table, columns[name], values)
            blank.append(missing)
        if blank:
            lacking[" and ".join(present)] = np.logical_and.reduce(blank)
    return table, {name: rows for name, rows in lacking.items() if rows.any()}


def _clean_names(
    values: pa.ChunkedArray, where: str, column: str
) -> tuple[pa.ChunkedArray, np.ndarray, int]:
    """Return stripped names, which of them are missing, and how many were stripped."""
    values = _decoded(values)
    if pa.types.is_floating(values.type):
        values = _float_names(values)
    stripped = 0
    missing = pc.is_null(values)
    if is_text(values.type):
        values = values.cast(pa.large_string())
        try:
            trimmed = pc.utf8_trim_whitespace(values)
        except pa.ArrowInvalid as error:
            raise CorruptFileError(f"{where}: column {column!r} is not UTF-8 ({error})") from error
        spelled = pa.array(pa.csv.ConvertOptions().null_values, pa.large_string())
        missing = pc.or_(missing, pc.is_in(trimmed, spelled))
        changed = pc.and_not(pc.fill_null(pc.not_equal(trimmed, values), False), missing)
        stripped = pc.sum(changed).as_py() or 0
        values = trimmed
    flags: np.ndarray = missing.to_numpy()
    if flags.any() and not flags.all():  # any value that is there fills the gaps
        values = pc.if_else(pa.array(flags), values[int(np.argmin(flags))], values)
    return values, flags, stripped


def _float_names(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return floats as integers if all are whole, and as words otherwise; NaN as null."""
    values = pc.if_else(pc.is_nan(values), None, values)
    known = pc.drop_null(values)
    whole = pc.all(pc.equal(known, pc.floor(known))).as_py() is not False
    if whole and pc.all(pc.less(pc.abs(known), 2.0**53)).as_py() is not False:
        return values.cast(pa.int64())
    words = [v if v is None else repr(v).removesuffix(".0") for v in values.to_pylist()]
    return pa.chunked_array([pa.array(words, pa.large_string())])


def _clean_content(values: pa.ChunkedArray) -> tuple[pa.ChunkedArray, np.ndarray]:
    """Return texts or images, and which of them are missing."""
    if pa.types.is_null(values.type):
        values = values.cast(pa.large_string())
    missing = pc.is_null(values)
    if is_text(values.type):
        blank = pc.or_(pc.equal(values, ""), pc.utf8_is_space(values))
        missing = pc.or_(missing, pc.fill_null(blank, False))
        values = pc.fill_null(values, "")
    flags: np.ndarray = missing.to_numpy()
    return values, flags


def _replaced(table: pa.Table, column: str, values: pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, values)


def _describe(faults: Mapping[tuple[str, str], np.ndarray], columns: Mapping[str, str]) -> str:
    """Return one line with the number of rows that lack a column, and the first of them."""
    parts = []
    for (where, name), flags in faults.items():
        rows = np.flatnonzero(flags)
        first = ", ".join(map(str, rows[:_MAX_ROWS])) + (", ..." if len(rows) > _MAX_ROWS else "")
        named = " and ".join(repr(columns[n]) for n in name.split(" and "))
        parts.append(
            f"{where}: {name} (column {named}) is missing in {len(rows)} of {len(flags)} rows "
            f"(row{'s' * (len(rows) > 1)} {first})"
        )
    return (
        f"{'; '.join(parts)}; rows count from 0; correct or remove them, or set "
        "data.skip_broken=true to leave them out"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
