"""Clean the rows of your own tables: files, hub datasets and rows from Python all pass here.

Labels, groups and clients lose the white space around them, and floats become words (``4.5``; whole
ones as integers, which is what pandas makes of integers with gaps). Rows that lack a label or the
like, a text or an image are refused, or left out with ``data.skip_broken``. A label lacks if it is
null, or a text that CSV readers take for null (empty, ``NA``, ``nan``); a text if it is null or
blank.

Legend of shapes: N rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.tables import is_text
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.lazy import pc

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


@dataclass
class _Report:
    """What was found: rows that lack a column, by table and column; counts of stripped values."""

    faults: dict[tuple[str, str], np.ndarray]
    stripped: dict[str, int]


def clean(
    splits: Mapping[str, NamedTables], columns: Mapping[str, str], *, skip_broken: bool
) -> tuple[dict[str, CleanTables], str, tuple[str, ...]]:
    """Return cleaned tables by split, a note on what was changed, and the names of rows left out.

    Args:
        splits: tables by split.
        columns: names of the data's columns, by those of the platform.
        skip_broken: whether rows that lack something are left out instead of refused.

    Raises:
        CorruptFileError: rows lack something; the message has their number, columns and first rows.
    """
    report = _Report({}, {})
    found = {s: _clean_split(tables, columns, report) for s, tables in splits.items()}
    if report.faults and not skip_broken:
        raise CorruptFileError(_describe(report.faults, columns))
    notes = [
        f"white space around {_count(count, 'value')} of column {column!r} removed"
        for column, count in report.stripped.items()
    ]
    skipped = [
        f"{where}, row {row}"
        for split in found.values()
        for (where, _), kept in zip(split.tables, split.kept, strict=True)
        for row in np.flatnonzero(~kept)
    ]
    if skipped:
        lacking = " or ".join(dict.fromkeys(name for _, name in report.faults))
        notes.append(f"{_count(len(skipped), 'row')} without {lacking} skipped")
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


def _clean_split(tables: NamedTables, columns: Mapping[str, str], report: _Report) -> CleanTables:
    cleaned, kept = [], []
    for where, whole in tables:
        table, lacking = whole, np.zeros(whole.num_rows, bool)
        faults: dict[str, np.ndarray] = {}
        for name in _NAMES:
            if (column := columns.get(name, "")) in table.column_names:
                values, missing, stripped = _clean_names(table.column(column), where, column)
                table = _replaced(table, column, values)
                faults[name] = missing
                if stripped:
                    report.stripped[column] = report.stripped.get(column, 0) + stripped
        for names in _CONTENTS:
            present = [n for n in names if columns.get(n) in table.column_names]
            blank = []
            for name in present:
                values, missing = _clean_content(table.column(columns[name]))
                table = _replaced(table, columns[name], values)
                blank.append(missing)
            if blank:
                faults[" and ".join(present)] = np.logical_and.reduce(blank)
        for name, rows in faults.items():
            if rows.any():
                report.faults[where, name] = rows
                lacking |= rows
        cleaned.append((where, table))
        kept.append(~lacking)
    return CleanTables(cleaned, kept)


def _clean_names(
    values: pa.ChunkedArray, where: str, column: str
) -> tuple[pa.ChunkedArray, np.ndarray, int]:
    """Return stripped names, which of them are missing, and how many were stripped."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
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
    return _filled(values, flags), flags, stripped


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


def _filled(values: pa.ChunkedArray, missing: np.ndarray) -> pa.ChunkedArray:
    """Return the values with those that are missing replaced by one that is not."""
    if not missing.any() or missing.all():
        return values
    return pc.if_else(pa.array(missing), values[int(np.argmin(missing))], values)


def _replaced(table: pa.Table, column: str, values: pa.ChunkedArray) -> pa.Table:
    if values is table.column(column):
        return table
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
