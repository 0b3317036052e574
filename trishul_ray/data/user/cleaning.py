"""Find the columns of user tables, normalize names, and reject or skip incomplete rows.

Legend of shapes: N rows.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from trishul_ray.data.columns import is_text, nfc
from trishul_ray.data.conversations import find_layout
from trishul_ray.data.dataset import Kind
from trishul_ray.errors import CorruptFileError, InputError, did_you_mean, join_limited
from trishul_ray.runtime.lazy import pc

#: Canonical column names, which are the keys of ``data.columns``.
COLUMN_NAMES = (
    *("text", "text_pair", "label", "image"),
    *("question", "context", "answers"),
    *("instruction", "input", "output", "messages", "system", "history"),
    *("references", "choices", "choice"),
    *("client", "group"),
)

#: Columns of instructions that only :mod:`trishul_ray.runs.evaluate` reads.
SCORED = ("references", "choices", "choice")

#: Columns of a system message and of earlier turns.
_CONTEXT = ("system", "history")

#: Required and optional columns of each kind of rows. The first kind whose required columns exist
#: is selected.
_COLUMNS: tuple[tuple[Kind, tuple[str, ...], tuple[str, ...]], ...] = (
    ("image", ("image", "label"), ()),
    ("qa", ("question", "context", "answers"), ()),
    ("text", ("text", "label"), ("text_pair",)),
    ("instruction", ("messages",), ("system", *SCORED)),
    ("instruction", ("instruction", "output"), ("input", *_CONTEXT, *SCORED)),
)

#: Columns that assign rows of any kind to clients and groups.
_ASSIGN = ("client", "group")

#: Columns that may be missing in some splits.
_OPTIONAL = (*_ASSIGN, *SCORED)

#: Columns of names: a class, a client, a sub-dataset.
_NAMES = ("label", *_ASSIGN)

#: Columns without which a row is incomplete. Of two columns, one may be blank.
_CONTENTS = (
    *(("text", "text_pair"), ("question",), ("context",), ("answers",), ("image",)),
    *(("instruction", "input"), ("output",), ("messages",)),
)

#: Maximum number of rows to name in a message per fault.
_MAX_ROWS = 5


def find_columns(
    configured: Mapping[str, str], existing: Sequence[str]
) -> tuple[Kind, dict[str, str]]:
    """Determine the kind of the rows, and the data's columns keyed by canonical name.

    Args:
        configured: ``data.columns``.
        existing: Columns of the data.

    Raises:
        InputError: A key or a column is unknown, or the columns match no kind of dataset.
    """
    names = ", ".join(existing)
    for name, column in configured.items():
        if name not in COLUMN_NAMES:
            hint = did_you_mean(name, COLUMN_NAMES)
            known = ", ".join(COLUMN_NAMES)
            raise InputError(f"data.columns.{name} is unknown; known: {known}{hint}")
        if column not in existing:
            raise InputError(
                f"data.columns.{name}={column!r} is not in the data, which has {names}"
                + did_you_mean(column, existing)
            )
    columns = {name: configured.get(name, name) for name in COLUMN_NAMES}
    columns = {name: column for name, column in columns.items() if column in existing}
    assigned = {name: c for name, c in columns.items() if name in (*_ASSIGN, *_CONTEXT, *SCORED)}
    for found in (columns, (find_layout(existing) or {}) | assigned):
        for kind, required, further in _COLUMNS:
            if all(name in found for name in required):
                read = (*required, *further, *_ASSIGN)
                return kind, {name: c for name, c in found.items() if name in read}
    options = "; or ".join(" and ".join(required) for _, required, _ in _COLUMNS)
    raise InputError(
        f"data.columns: the data's columns are {names}; map them to {options} "
        "(e.g. data.columns={text: body, label: topic}), or add a task (docs/adding-a-task.md)"
    )


def absent_columns(table: pa.Table) -> set[tuple[str, str]]:
    """Find optional columns that are null in a whole split, as pairs of split and column."""
    absent = set()
    names = [name for name in _OPTIONAL if name in table.column_names]
    optional = table.select(["split", *names])  # selected before filtering, which would copy images
    for split in pc.unique(optional["split"]).to_pylist():
        part = optional.filter(pc.equal(optional["split"], split))
        absent |= {(split, name) for name in names if part[name].null_count == len(part)}
    return absent


def clean(
    table: pa.Table,
    names: Mapping[str, str],
    classes: Sequence[str] | None,
    absent: set[tuple[str, str]],
    where: str,
    *,
    skip_broken: bool,
    missing: frozenset[str],
) -> tuple[pa.Table, tuple[str, ...], tuple[str, ...]]:
    """Select the complete rows, and normalize the names of classes, groups and clients.

    Args:
        table: Rows with canonical column names, ``split``, and ``name`` for messages.
        names: The data's columns keyed by canonical name, for messages.
        classes: Class names that number the labels; then -1 marks a missing label.
        absent: The :func:`absent_columns`, whose nulls are not missing values.
        where: Source of the rows, for messages.
        skip_broken: Whether to skip incomplete rows instead of rejecting them.
        missing: Words that mark a missing name, such as ``NA`` in CSV files.

    Returns:
        The rows, the names of the skipped rows, and notes for reports.

    Raises:
        CorruptFileError: Rows are incomplete; the message names the columns and the first rows.
    """
    notes = []
    lacking: dict[str, np.ndarray] = {}
    words: dict[str, str] = {}
    for name in filter(table.column_names.__contains__, _NAMES):
        values = table.column(name)
        spelled, changed = _spell(values, f"{where}: column {names[name]!r}", missing)
        if name == "label" and classes is not None and pa.types.is_integer(spelled.type):
            spelled = pc.if_else(pc.equal(spelled, -1), None, spelled)
        if changed:
            notes.append(f"{changed:,} values of column {names[name]!r} stripped or composed (NFC)")
        table = _replaced(table, name, spelled)
        unused = pa.array([split for split, column in absent if column == name], pa.string())
        used = pc.invert(pc.is_in(table.column("split"), unused))
        lacking[name] = pc.and_(pc.is_null(spelled), used).to_numpy()
        if is_text(values.type) and (marks := missing & {*pc.unique(values).to_pylist()} - {""}):
            words[name] = f"; {join_limited(sorted(marks), 3)} means missing in CSV files"
    for group in _CONTENTS:
        if present := [name for name in group if name in table.column_names]:
            blank = [_is_blank(table.column(name)) for name in present]
            lacking[" and ".join(present)] = np.logical_and.reduce(blank)
            for name in present:
                if is_text(table.schema.field(name).type):
                    table = _replaced(table, name, pc.fill_null(table.column(name), ""))
    lacking = {name: found for name, found in lacking.items() if found.any()}
    if not lacking:
        return table, (), tuple(notes)
    if not skip_broken:
        faults = []
        for name, found in lacking.items():
            first = table.column("name").filter(pa.array(found)).to_pylist()
            columns = " and ".join(repr(names.get(n, n)) for n in name.split(" and "))
            faults.append(
                f"{name} (column {columns}) is missing in {len(first)} of {len(found)} rows "
                f"({join_limited(first, _MAX_ROWS)}{words.get(name, '')})"
            )
        raise CorruptFileError(
            f"{where}: {'; '.join(faults)}; rows count from 0; correct them, or set "
            "data.skip_broken=true"
        )
    broken = pa.array(np.logical_or.reduce(list(lacking.values())))
    skipped = table.column("name").filter(broken).to_pylist()
    notes.append(f"{len(skipped):,} rows without {' or '.join(lacking)} skipped")
    return table.filter(pc.invert(broken)), tuple(skipped), tuple(notes)


def _replaced(table: pa.Table, name: str, values: pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def _is_blank(values: pa.ChunkedArray) -> np.ndarray:
    missing = pc.is_null(values)
    if is_text(values.type):
        blank = pc.or_(pc.equal(values, ""), pc.utf8_is_space(values))
        missing = pc.or_(missing, pc.fill_null(blank, False))
    array: np.ndarray = missing.to_numpy()
    return array


def _spell(
    values: pa.ChunkedArray, where: str, missing: frozenset[str]
) -> tuple[pa.ChunkedArray, int]:
    """Convert names to int64 or to stripped texts in NFC, and count the changed texts.

    Blank texts and the words in ``missing`` become null. Numbers become int64 if all are whole,
    otherwise texts, so that each class has a single name.
    """
    kind = values.type
    if is_text(kind) or pa.types.is_null(kind):
        texts = values.to_pylist()
        names = [None if text is None else nfc(text.strip()) for text in texts]
        changed = sum(name != text for name, text in zip(names, texts, strict=True))
        gaps = {"", *missing}
        names = [None if name in gaps else name for name in names]
        return pa.chunked_array([pa.array(names, pa.large_string())]), changed
    if pa.types.is_floating(kind):
        values = values.cast(pa.float64())  # float16 lacks these functions
        values = pc.if_else(pc.is_nan(values), None, values)
        if pc.all(pc.equal(values, pc.floor(values))).as_py() is False:
            words = [v if v is None else repr(v).removesuffix(".0") for v in values.to_pylist()]
            return pa.chunked_array([pa.array(words, pa.large_string())]), 0
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise CorruptFileError(
            f"{where} is {kind}, not one text or number per row; several labels per row, or labels "
            "per token, require a custom task (docs/adding-a-task.md)"
        )
    return values.cast(pa.int64()), 0


def is_unlabelled(tables: Sequence[pa.Table], columns: Mapping[str, str]) -> bool:
    """Return whether all labels of a split are -1, which marks rows without labels on the hub."""
    name = columns.get("label", "label")
    labels = [table.column(name) for table in tables if name in table.column_names and len(table)]
    return bool(labels) and all(
        pa.types.is_signed_integer(each.type) and pc.all(pc.equal(each, -1)).as_py()
        for each in labels
    )


#: Fewer classes are not doubted: a toy table may have one row per class.
_FEW_CLASSES = 20


def doubt_labels(classes: Sequence[str], labels: np.ndarray) -> str:
    """Explain why labels cannot be classes, or return an empty string.

    Labels are doubted if there are many and most rows are the only row of their class, as in
    regression or question answering. In LFW, 31% of the photos show a person who appears in no
    other photo.
    """
    single = int((np.bincount(labels, minlength=len(classes)) == 1).sum())
    if len(classes) <= _FEW_CLASSES or 2 * single <= len(labels):
        return ""
    return (
        f"{len(classes):,} distinct labels in {len(labels):,} rows, {single:,} of them in a single "
        "row, but a class needs several rows; choose another column as data.columns.label, or "
        "add a task for numbers or texts (docs/adding-a-task.md)"
    )
