"""Find the columns of user tables, spell names in one way, and reject or skip incomplete rows.

Legend of shapes: N rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.columns import at_row, class_names, is_text, nfc
from trishul_ray.data.conversations import find_layout
from trishul_ray.data.dataset import Kind
from trishul_ray.errors import CorruptFileError, InputError, did_you_mean, join_limited
from trishul_ray.runtime.lazy import pc

#: The platform's column names: the keys of ``data.columns``.
COLUMN_NAMES = (
    *("text", "text_pair", "label", "image"),
    *("question", "context", "answers"),
    *("instruction", "input", "output", "messages", "references", "choices", "choice"),
    *("client", "group"),
)

#: Columns of instructions that only :mod:`trishul_ray.runs.evaluate` reads.
SCORED = ("references", "choices", "choice")

#: Columns that rows of each kind must have, and columns that they may have. The first kind whose
#: columns exist is selected.
_COLUMNS: tuple[tuple[Kind, tuple[str, ...], tuple[str, ...]], ...] = (
    ("image", ("image", "label"), ()),
    ("qa", ("question", "context", "answers"), ()),
    ("text", ("text", "label"), ("text_pair",)),
    ("instruction", ("messages",), SCORED),
    ("instruction", ("instruction", "output"), ("input", *SCORED)),
)

#: Columns that assign rows of any kind to clients and groups.
_ASSIGN = ("client", "group")

#: Columns of names: a class, a sub-dataset, a client.
_NAMES = ("label", *_ASSIGN)

#: Columns without which a row is incomplete; if there are two, one of them may be blank.
_CONTENTS = (
    *(("text", "text_pair"), ("question",), ("context",), ("answers",), ("image",)),
    *(("instruction", "input"), ("output",), ("messages",)),
)

#: Rows to name in a message for each fault, and skipped rows to name in ``result.json``.
_MAX_ROWS, _MAX_SKIPPED = 5, 100

#: Integers of smaller absolute value are the same as floats.
_EXACT = 2.0**53


@dataclass(frozen=True)
class Rows:
    """The rows of all splits in one table.

    Attributes:
        table: The rows, with the platform's column names.
        split: The split of each row.
        number: The number of each row in its split before rows were skipped.
        where: Where the rows come from, for messages.
        skipped: Names of the rows that were skipped.
        notes: What was changed, for reports.
    """

    table: pa.Table
    split: np.ndarray
    number: np.ndarray
    where: str
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""
        return at_row(f"{self.where}, split {self.split[row]}", int(self.number[row]))

    def take(self, kept: np.ndarray, skipped: Iterable[str], notes: Iterable[str]) -> "Rows":
        """Return the rows that a mask [N] selects."""
        names = [*self.skipped, *skipped]
        if len(names) > _MAX_SKIPPED:
            names[_MAX_SKIPPED:] = [f"and {len(names) - _MAX_SKIPPED} more rows"]
        table, split, number = self.table.filter(pa.array(kept)), self.split[kept], self.number
        return Rows(table, split, number[kept], self.where, tuple(names), (*self.notes, *notes))

    def replaced(self, columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> "Rows":
        """Return the rows with other values in some columns."""
        table = self.table
        for name, values in columns.items():
            table = table.set_column(table.column_names.index(name), name, values)
        return Rows(table, self.split, self.number, self.where, self.skipped, self.notes)


def join_splits(tables: Mapping[str, Sequence[pa.Table]], where: str) -> Rows:
    """Concatenate the tables of all splits; columns that a table lacks become null."""
    table = pa.concat_tables(chain(*tables.values()), promote_options="permissive")
    sizes = [sum(map(len, of)) for of in tables.values()]
    numbers = np.concatenate([np.arange(size) for size in sizes])
    return Rows(table, np.repeat(list(tables), sizes), numbers, where)


def find_columns(
    configured: Mapping[str, str], existing: Sequence[str]
) -> tuple[Kind, dict[str, str]]:
    """Return the kind of the rows, and the data's columns by the platform's names.

    Args:
        configured: ``data.columns``.
        existing: Columns of the data.

    Raises:
        InputError: A key or a column is unknown, or the columns make no dataset.
    """
    names = ", ".join(existing)
    for name, column in configured.items():
        if name not in COLUMN_NAMES:
            hint = did_you_mean(name, COLUMN_NAMES)
            known = ", ".join(COLUMN_NAMES)
            raise InputError(f"data.columns.{name}: unknown; known are {known}{hint}")
        if column not in existing:
            raise InputError(
                f"data.columns.{name}={column!r} is not in the data; its columns are {names}"
                + did_you_mean(column, existing)
            )
    columns = {name: configured.get(name, name) for name in COLUMN_NAMES}
    columns = {name: column for name, column in columns.items() if column in existing}
    assigned = {name: c for name, c in columns.items() if name in (*_ASSIGN, *SCORED)}
    for found in (columns, (find_layout(existing) or {}) | assigned):
        for kind, required, further in _COLUMNS:
            if all(name in found for name in required):
                read = (*required, *further, *_ASSIGN)
                return kind, {name: c for name, c in found.items() if name in read}
    options = "; or ".join(" and ".join(required) for _, required, _ in _COLUMNS)
    raise InputError(
        f"data.columns: the data's columns are {names}; set the columns of {options} "
        "(e.g. data.columns={text: body, label: topic}), or add a task (docs/adding-a-task.md)"
    )


def clean(
    rows: Rows, names: Mapping[str, str], classes: Sequence[str] | None, *, skip_broken: bool
) -> Rows:
    """Return the rows that lack nothing, with classes, groups and clients spelled in one way.

    Args:
        rows: Rows with the platform's column names.
        names: The data's columns by these names, for messages.
        classes: Class names by which labels are numbered; -1 is no label then.
        skip_broken: Whether to skip incomplete rows instead of rejecting them.

    Raises:
        CorruptFileError: Rows are incomplete; the message names the columns and the first rows.
    """
    table, notes = rows.table, []
    lacking: dict[str, np.ndarray] = {}
    absent = {name: _absent(rows, name) for name in _ASSIGN if name in table.column_names}
    for name in filter(table.column_names.__contains__, _NAMES):
        spelled, changed = _spell(table.column(name), f"{rows.where}: column {names[name]!r}")
        if name == "label" and classes is not None and pa.types.is_integer(spelled.type):
            spelled = pc.if_else(pc.equal(spelled, -1), None, spelled)
        if changed:
            notes.append(f"{changed:,} values of column {names[name]!r} stripped or composed (NFC)")
        rows = rows.replaced({name: spelled})
        lacking[name] = _numpy(pc.is_null(spelled)) & ~absent.get(name, False)
    for group in _CONTENTS:
        if present := [name for name in group if name in table.column_names]:
            blank = [_is_blank(table.column(name)) for name in present]
            lacking[" and ".join(present)] = np.logical_and.reduce(blank)
            texts = [name for name in present if is_text(table.schema.field(name).type)]
            rows = rows.replaced({n: pc.fill_null(rows.table.column(n), "") for n in texts})
    lacking = {name: found for name, found in lacking.items() if found.any()}
    if not lacking:
        return rows.take(np.ones(len(table), bool), (), notes)
    if not skip_broken:
        faults = []
        for name, found in lacking.items():
            first = [f"{rows.split[n]} {rows.number[n]}" for n in np.flatnonzero(found)]
            columns = " and ".join(repr(names.get(n, n)) for n in name.split(" and "))
            faults.append(
                f"{name} (column {columns}) is missing in {len(first)} of {len(found)} rows "
                f"({join_limited(first, _MAX_ROWS)})"
            )
        raise CorruptFileError(
            f"{rows.where}: {'; '.join(faults)}; rows count from 0; correct them, or set "
            "data.skip_broken=true"
        )
    broken = np.logical_or.reduce(list(lacking.values()))
    notes.append(f"{broken.sum():,} rows without {' or '.join(lacking)} skipped")
    return rows.take(~broken, [rows.name(row) for row in np.flatnonzero(broken).tolist()], notes)


def _absent(rows: Rows, name: str) -> np.ndarray:
    """Return the rows [N] of splits in which a column has no value, as if it were not there."""
    null = _numpy(pc.is_null(rows.table.column(name)))
    without = [split for split in np.unique(rows.split) if null[rows.split == split].all()]
    return np.isin(rows.split, without)


def _is_blank(values: pa.ChunkedArray) -> np.ndarray:
    missing = pc.is_null(values)
    if is_text(values.type):
        blank = pc.or_(pc.equal(values, ""), pc.utf8_is_space(values))
        missing = pc.or_(missing, pc.fill_null(blank, False))
    return _numpy(missing)


def _numpy(values: pa.ChunkedArray) -> np.ndarray:
    array: np.ndarray = values.to_numpy()
    return array


def _spell(values: pa.ChunkedArray, where: str) -> tuple[pa.ChunkedArray, int]:
    """Return names as int64 or as stripped texts in NFC, and how many texts were changed.

    Words such as ``NA`` and blank texts become null. Numbers become int64 if all are whole and fit,
    and otherwise texts, so that a class has one name.
    """
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if is_text(kind) or pa.types.is_null(kind):
        texts = values.cast(pa.large_string())
        names = _composed(pc.utf8_trim_whitespace(texts))
        gaps = pa.array(pa.csv.ConvertOptions().null_values, pa.large_string())
        names = pc.if_else(pc.is_in(names, gaps), None, names)
        return names, pc.sum(pc.not_equal(names, texts)).as_py() or 0
    if pa.types.is_nested(kind) or not (
        pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind)
    ):
        raise CorruptFileError(
            f"{where} is {kind}, not one text or number per row; several labels per row or a label "
            "per token need a custom task (docs/adding-a-task.md)"
        )
    if pa.types.is_floating(kind):
        values = pc.if_else(pc.is_nan(values), None, values)
        exact = pc.and_(pc.equal(values, pc.floor(values)), pc.less(pc.abs(values), _EXACT))
        fits = pc.all(exact).as_py() is not False
    else:
        most = pa.scalar(np.iinfo(np.int64).max, pa.uint64())
        fits = not pa.types.is_uint64(kind) or pc.all(pc.less_equal(values, most)).as_py()
    if fits:
        return values.cast(pa.int64()), 0
    words = [v if v is None else repr(v).removesuffix(".0") for v in values.to_pylist()]
    return pa.chunked_array([pa.array(words, pa.large_string())]), 0


def _composed(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return names in NFC; ``utf8_normalize`` of Arrow 25 leaves them in NFD."""
    if pc.all(pc.string_is_ascii(names)).as_py() is not False:
        return names
    encoded = pc.dictionary_encode(names).combine_chunks()
    forms = [nfc(name) for name in encoded.dictionary.to_pylist()]
    return pa.chunked_array([pa.array(forms, pa.large_string()).take(encoded.indices)])


def common_class_names(tables: Iterable[pa.Table], column: str) -> tuple[str, ...] | None:
    """Return the class names in the metadata of tables; None if no table has any.

    Raises:
        InputError: Tables have different class names, so that a number is not one class.
    """
    found = dict.fromkeys(filter(None, (class_names(table, column) for table in tables)))
    if len(found) > 1:
        lists = " and ".join(f"({join_limited(names, 10)})" for names in list(found)[:2])
        raise InputError(
            f"column {column!r}: files have different class names, {lists}; write labels as words"
        )
    return next(iter(found), None)


def is_unlabelled(tables: Sequence[pa.Table], columns: Mapping[str, str]) -> bool:
    """Return whether all labels of a split are -1, which marks rows without labels on the hub."""
    name = columns.get("label", "label")
    labels = [table.column(name) for table in tables if name in table.column_names and len(table)]
    return bool(labels) and all(
        pa.types.is_signed_integer(each.type) and pc.all(pc.equal(each, -1)).as_py()
        for each in labels
    )


#: Fewer classes give no doubt: a toy table may have one row per class.
_FEW_CLASSES = 20


def doubt_labels(classes: Sequence[str], labels: np.ndarray) -> str:
    """Return why labels cannot be classes; empty if they may be.

    They cannot if there are many and most rows are the only row of their class, as in regression
    or question answering. In LFW, 31% of the photos show a person that no other photo shows.
    """
    single = int((np.bincount(labels, minlength=len(classes)) == 1).sum())
    if len(classes) <= _FEW_CLASSES or 2 * single <= len(labels):
        return ""
    return (
        f"{len(classes):,} different labels in {len(labels):,} rows, {single:,} of them only in "
        "one row: a class needs several rows; choose another column as data.columns.label, or "
        "add a task for numbers or texts (docs/adding-a-task.md)"
    )
