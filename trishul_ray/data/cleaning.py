"""Find the columns that a dataset needs, and clean them: names, and rows that lack something.

Errors name the file and, where possible, the row. Legend of shapes: N rows.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trishul_ray.data.columns import FileOfLines, at_row, decoded, is_text, nfc
from trishul_ray.data.dataset import Kind
from trishul_ray.data.hub import class_names
from trishul_ray.data.instructions import find_layout
from trishul_ray.errors import CorruptFileError, InputError, did_you_mean
from trishul_ray.runtime.lazy import pc

#: Integers of smaller absolute value are the same as floats.
_EXACT = 2.0**53

#: The platform's column names: the keys of ``data.columns``.
COLUMN_NAMES = (
    *("text", "text_pair", "label", "image"),
    *("question", "context", "answers"),
    *("instruction", "input", "output", "messages", "references", "choices", "choice"),
    *("client", "group"),
)

#: Columns of instructions that only :mod:`trishul_ray.runs.evaluate` reads.
SCORED = ("references", "choices", "choice")

#: Columns that rows of each kind must have, and those that they may have besides. If several fit,
#: the first is taken.
_COLUMNS: tuple[tuple[Kind, tuple[str, ...], tuple[str, ...]], ...] = (
    ("image", ("image", "label"), ()),
    ("qa", ("question", "context", "answers"), ()),
    ("text", ("text", "label"), ("text_pair",)),
    ("instruction", ("messages",), SCORED),
    ("instruction", ("instruction", "output"), ("input", *SCORED)),
)


#: Content of columns that datasets for other tasks have on the hub.
_OTHER_TASKS = {
    "chosen": "preferences",
    **dict.fromkeys(("ner_tags", "pos_tags"), "a label for each token"),
    **dict.fromkeys(("objects", "bbox"), "objects in images"),
}


#: Columns that assign rows of any kind to clients and groups.
_ASSIGN = ("client", "group")


@dataclass(frozen=True)
class ColumnMapping:
    """Kind of the rows, and the platform's column names with those of the data."""

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
        # Preferences have prompts, too, which alone are no instructions with answers.
        layout = {} if "chosen" in existing else find_layout(existing) or {}
        own = (*_ASSIGN, *SCORED)
        for found in (columns, layout | {k: c for k, c in columns.items() if k in own}):
            for kind, required, further in _COLUMNS:
                if all(name in found for name in required):
                    read = (*required, *further, *_ASSIGN)
                    return cls(kind, {name: c for name, c in found.items() if name in read})
        options = "; or ".join(" and ".join(required) for _, required, _ in _COLUMNS)
        for column, content in _OTHER_TASKS.items():
            if column in existing and not configured:
                raise InputError(
                    f"data.columns: the data's columns are {names}; {column} hold {content}, for "
                    "which there is no task: add one of your own (docs/adding-a-task.md), or set "
                    f"the columns of {options}"
                )
        raise InputError(
            f"data.columns: the data's columns are {names}; set those of {options} "
            "(e.g. data.columns={text: body, label: topic})"
        )


#: Pairs of a table's name, for messages, and its rows.
NamedTables = Sequence[tuple[str, pa.Table]]


def check_optional(splits: Mapping[str, NamedTables], mapping: ColumnMapping) -> None:
    """Raise a CorruptFileError if some files alone have a column that all of them may lack.

    Texts are the same columns in all files; what else belongs to a row, in all files of its split.
    """
    fitting = [
        names for kind, required, names in _COLUMNS
        if kind == mapping.kind and {*required} <= mapping.columns.keys()
    ]  # fmt: skip
    for name in dict.fromkeys((*itertools.chain(*fitting), *_ASSIGN)):
        column, apart = mapping.columns.get(name, name), name in (*_ASSIGN, *SCORED)
        for tables in splits.values() if apart else [list(itertools.chain(*splits.values()))]:
            having = [where for where, table in tables if column in table.column_names]
            if having and (lacking := [where for where, _ in tables if where not in having]):
                raise CorruptFileError(
                    f"{lacking[0]}: no column {column!r}, which {having[0]} has; add it, or remove "
                    "it there"
                )


#: Columns that hold names: a class, a sub-dataset, a client.
_NAMES = ("label", "group", "client")

#: Columns without which a row says nothing; of two that go together, one may be blank.
_CONTENTS = (
    *(("text", "text_pair"), ("question",), ("context",), ("image",)),
    *(("instruction", "input"), ("output",), ("messages",)),
)

#: Rows to name in one message for each fault.
_MAX_ROWS = 5

#: Rows left out to name in ``result.json``.
_MAX_SKIPPED = 100


@dataclass(frozen=True)
class CleanTables:
    """Cleaned tables of one split.

    Attributes:
        tables: their names and rows; what a row lacks is filled with any value of its type.
        retained: whether a row lacks nothing, bool [N] of each table.
    """

    tables: NamedTables
    retained: Sequence[np.ndarray]


#: Notes on how names were changed, in order: stripped, and composed.
_CHANGED = (
    "white space around {} of column {!r} removed",
    "{} of column {!r} changed to the Unicode form NFC",
)

#: Number of names that were changed by each of these notes, by column.
_Changes = Mapping[str, Counter[str]]


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
    changes: _Changes = {text: Counter() for text in _CHANGED}
    found, skipped = {}, []
    for split, tables in _with_like_names(splits, columns).items():
        cleaned, retained = [], []
        for where, whole in tables:
            table, lacking = _clean_table(whole, where, columns, changes)
            faults |= {(where, name): rows for name, rows in lacking.items()}
            missing = np.logical_or.reduce([np.zeros(whole.num_rows, bool), *lacking.values()])
            skipped += [at_row(where, row) for row in np.flatnonzero(missing).tolist()]
            cleaned.append((where, table))
            retained.append(~missing)
        found[split] = CleanTables(cleaned, retained)
    if faults and not skip_broken:
        raise CorruptFileError(_describe(faults, columns))
    notes = [
        text.format(_count(count, "value"), column)
        for text, counts in changes.items()
        for column, count in counts.items()
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


#: Fewer classes are no reason for doubt: a toy table may have a row of each, and stars halves.
_FEW_CLASSES = 20

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")

#: Characters of a label that is rather a text to write than the name of a class.
_LONG_NAME = 60


def question_labels(classes: Sequence[str], labels: np.ndarray) -> tuple[str, str]:
    """Return a note on labels that look unlike classes, and why they cannot be any; may be empty.

    Labels are no classes if there are more than :data:`_FEW_CLASSES`, and either more than half of
    the rows are the only ones of their class, or the names are numbers with fractions. Rows that
    are alone say nothing on others: most of a regression's or an answer's rows are. Collections
    with a long tail are far from it: 31 % of the photos of LFW (4,069 of 13,233, in 5,749 classes)
    show a person that no other photo shows. Scores in few steps, as STS-B's, repeat; but a class
    has a number with a fraction only if it is one of few, such as half stars, or a code.

    Args:
        classes: names of the classes.
        labels: indices into them, of all rows of all splits, int64 [N].
    """
    counts = np.bincount(labels, minlength=len(classes))
    present = [name for name, count in zip(classes, counts, strict=True) if count]
    single = int((counts == 1).sum())
    numbers = [name for name in present if _NUMBER.fullmatch(name)]
    fractions = len(numbers) == len(present) and any(float(n) % 1 for n in numbers)
    facts = [f"{len(present):,} different labels in {len(labels):,} rows"]
    if 10 * single > len(labels):
        facts.append(f"{single:,} of them in one row alone")
    if fractions:
        facts.append(f"all numbers, such as {next(n for n in numbers if float(n) % 1)}")
    note = f", {', '.join(facts)}" if len(facts) > 1 else ""
    if len(present) <= _FEW_CLASSES or not (2 * single > len(labels) or fractions):
        return note, ""
    own_task = "a task of your own (docs/adding-a-task.md)"
    if len(numbers) == len(present):
        why = f"they are numbers to estimate, not classes, and regression needs {own_task}; codes "
        why += "that look like numbers need a letter before them"
    elif np.mean([len(name) for name in present]) > _LONG_NAME:
        why = "they are texts to write, not classes; for answers to questions the columns are "
        why += f"question, context and answers; other texts need {own_task}"
    else:
        why = "a class needs several rows to be learned and scored; choose another column as "
        why += f"data.columns.label, or add {own_task}"
    return note, f"{', '.join(facts)}: {why}"


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


def _with_like_names(
    splits: Mapping[str, NamedTables], columns: Mapping[str, str]
) -> dict[str, NamedTables]:
    """Return tables in which each column of names has one type, as far as they are numbers.

    Numbers become int64 if all in all tables are whole and fit, and otherwise texts: a class or a
    client has one name, even if one file alone holds fractions, or ids of 64 bits without sign.
    """
    alike = {split: list(tables) for split, tables in splits.items()}
    for column in (columns[name] for name in _NAMES if name in columns):
        found: list[tuple[str, int, pa.ChunkedArray]] = []
        for split, tables in alike.items():
            for number, (_, table) in enumerate(tables):
                if column in table.column_names:
                    values = decoded(table.column(column))
                    if pa.types.is_floating(values.type):
                        values = pc.if_else(pc.is_nan(values), None, values)
                    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
                        found.append((split, number, values))
        whole = all(_are_whole(values) for _, _, values in found)
        for split, number, values in found:
            where, table = alike[split][number]
            spelled = values.cast(pa.int64()) if whole else _spelled(values)
            alike[split][number] = (where, _replaced(table, column, spelled))
    return dict(alike)


def _are_whole(values: pa.ChunkedArray) -> bool:
    """Return whether all numbers are whole and can be told apart as int64."""
    known = pc.drop_null(values)
    if pa.types.is_uint64(values.type):
        most = pa.scalar(np.iinfo(np.int64).max, pa.uint64())
        return pc.all(pc.less_equal(known, most)).as_py() is not False
    if pa.types.is_integer(values.type):
        return True
    whole = pc.and_(pc.equal(known, pc.floor(known)), pc.less(pc.abs(known), _EXACT))
    return pc.all(whole).as_py() is not False


def _spelled(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return numbers as texts: 3 and 3.0 as "3"."""
    words = [v if v is None else repr(v).removesuffix(".0") for v in values.to_pylist()]
    return pa.chunked_array([pa.array(words, pa.large_string())])


def _clean_table(
    table: pa.Table, where: str, columns: Mapping[str, str], changes: _Changes
) -> tuple[pa.Table, dict[str, np.ndarray]]:
    """Return a cleaned table, and which of its rows lack what, bool [N] by column.

    Adds to ``changes``.
    """
    lacking: dict[str, np.ndarray] = {}
    for name in _NAMES:
        if (column := columns.get(name, "")) in table.column_names:
            values, missing = _clean_names(table.column(column), where, column, changes)
            if class_names(table, column) is not None and pa.types.is_integer(values.type):
                # On the hub, -1 is what a ClassLabel without a label is stored as.
                unlabelled: np.ndarray = pc.equal(values, -1).to_numpy()
                missing = missing | unlabelled
            if missing.any() and not missing.all():  # any that is there, in place of the others
                values = pc.if_else(pa.array(missing), values[int(np.argmin(missing))], values)
            table = _replaced(table, column, values)
            lacking[name] = missing
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
    values: pa.ChunkedArray, where: str, column: str, changes: _Changes
) -> tuple[pa.ChunkedArray, np.ndarray]:
    """Return stripped names in the Unicode form NFC, and which of them are missing."""
    values = decoded(values)
    missing = pc.is_null(values)
    if is_text(values.type):
        values = values.cast(pa.large_string())
        try:
            trimmed = pc.utf8_trim_whitespace(values)
        except pa.ArrowInvalid as error:
            raise CorruptFileError(f"{where}: column {column!r} is not UTF-8 ({error})") from error
        spelled = pa.array(pa.csv.ConvertOptions().null_values, pa.large_string())
        missing = pc.or_(missing, pc.is_in(trimmed, spelled))
        names = _composed(trimmed)
        steps = itertools.pairwise((values, trimmed, names))
        for counts, (before, after) in zip(changes.values(), steps, strict=True):
            changed = pc.and_not(pc.fill_null(pc.not_equal(after, before), False), missing)
            if count := pc.sum(changed).as_py():
                counts[column] += count
        values = names
    return values, missing.to_numpy()


def _composed(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return names in the Unicode form NFC, which ``utf8_normalize`` of Arrow 25 leaves in NFD."""
    if pc.all(pc.string_is_ascii(names)).as_py() is not False:
        return names
    encoded = pc.dictionary_encode(names).combine_chunks()
    forms = [nfc(name) for name in encoded.dictionary.to_pylist()]
    return pa.chunked_array([pa.array(forms, pa.large_string()).take(encoded.indices)])


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
    parts, counted = [], ""
    for (where, name), flags in faults.items():
        rows = np.flatnonzero(flags)
        unit, first_row = "row", 0
        if isinstance(where, FileOfLines):
            unit, first_row = "line", where.first
        else:
            counted = "; rows count from 0"
        first = ", ".join(map(str, rows[:_MAX_ROWS] + first_row))
        first += ", ..." if len(rows) > _MAX_ROWS else ""
        named = " and ".join(repr(columns[n]) for n in name.split(" and "))
        parts.append(
            f"{where}: {name} (column {named}) is missing in {len(rows)} of {len(flags)} rows "
            f"({unit}{'s' * (len(rows) > 1)} {first})"
        )
    return (
        f"{'; '.join(parts)}{counted}; correct or remove them, or set data.skip_broken=true to "
        "leave them out"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def has_labels(tables: NamedTables, columns: Mapping[str, str]) -> bool:
    """Return False if all labels of a split are -1, which marks unlabelled rows on the hub.

    ``columns`` are ``data.columns``.
    """
    label = columns.get("label", "label")
    values = [table.column(label) for _, table in tables if label in table.column_names]
    if not values or not all(pa.types.is_integer(column.type) for column in values):
        return True
    numbers: np.ndarray = np.concatenate([column.to_numpy() for column in values])
    return bool(len(numbers)) and not bool((numbers == -1).all())
