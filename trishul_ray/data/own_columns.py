"""Read the columns of your own tables: texts, labels by class names, conversations, images.

Errors name the file and, where possible, the row. Legend of shapes: N rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from trishul_ray.data.cleaning import CleanTables, ColumnMapping, NamedTables
from trishul_ray.data.columns import (
    at_row,
    get_column,
    holds_images,
    is_text,
    read_answers,
    read_labels,
    read_raw,
    read_texts,
)
from trishul_ray.data.dataset import LABELLED, Columns, Kind
from trishul_ray.data.hub import class_names
from trishul_ray.data.images import NamedImage
from trishul_ray.data.instructions import plain_choices, plain_messages, plain_references
from trishul_ray.errors import CorruptFileError, InputError, join_limited

#: Columns of texts that rows may have, in reading order.
TEXT_FIELDS: dict[Kind, tuple[str, ...]] = {
    "text": ("text", "text_pair"),
    "instruction": ("instruction", "input", "messages"),
}


def with_plain_messages(
    tables: Mapping[str, NamedTables], mapping: ColumnMapping
) -> tuple[Mapping[str, NamedTables], ColumnMapping]:
    """Return tables whose conversations are JSON texts, null where there is no answer to learn.

    A prompt and a completion that are lists of messages are one conversation (TRL).

    Raises:
        CorruptFileError: One of both is a list of messages, and the other one is a text.
    """
    names = mapping.columns
    parts = [names[name] for name in ("messages", "instruction", "output") if name in names]
    if "messages" not in names:
        _, first = tables["train"][0]
        if mapping.kind != "instruction" or not {*parts} & {*_lists(first)}:
            return tables, mapping
    column, found = "+".join(parts), dict[str, list[tuple[str, pa.Table]]]()
    for split, named in tables.items():
        found[split] = []
        for where, table in named:
            if len(parts) > 1 and (texts := [part for part in parts if part not in _lists(table)]):
                raise CorruptFileError(
                    f"{where}: column {texts[0]!r} is no list of messages; allowed: {parts[0]} and "
                    f"{parts[1]} that are both texts, or both lists of messages"
                )
            values, *answers = (table.column(part).to_pylist() for part in parts)
            for more in answers:
                pairs = zip(values, more, strict=True)
                values = [[*(asked or ()), *(said or ())] or None for asked, said in pairs]
            rows = [at_row(where, row) for row in range(table.num_rows)]
            messages = plain_messages(values, rows, column)
            found[split].append((where, table.drop_columns(parts).append_column(column, messages)))
    kept = {name: each for name, each in names.items() if each not in parts and name != "input"}
    return found, ColumnMapping(mapping.kind, {**kept, "messages": column})


def _lists(table: pa.Table) -> list[str]:
    """Return the names of columns of lists."""
    lists = (pa.types.is_list, pa.types.is_large_list)
    return [field.name for field in table.schema if any(is_one(field.type) for is_one in lists)]


@dataclass(frozen=True)
class ClassNames:
    """The class names of all tables, and by which names each table numbers its labels.

    Attributes:
        names: all names, in the order in which they are found first.
        own: names by table.
        note: what was done where tables number their classes differently, for ``info.source``.
    """

    names: tuple[str, ...]
    own: Mapping[str, tuple[str, ...]]
    note: str

    @classmethod
    def of(cls, splits: Mapping[str, CleanTables], column: str) -> "ClassNames | None":
        """Return the class names that tables have for a column; None if no table has any.

        Raises:
            InputError: a table has numbers without names, and others have different names.
        """
        tables = [named for split in splits.values() for named in split.tables]
        found = {w: names for w, t in tables if (names := class_names(t, column)) is not None}
        if not found:
            return None
        lists = list(dict.fromkeys(found.values()))
        nameless = [(where, table) for where, table in tables if where not in found]
        note = ""
        if len(lists) > 1:
            for where, table in nameless:
                if column in table.column_names and not is_text(table.column(column).type):
                    said = " and ".join(
                        f"{w} ({join_limited(found[w], 10)})"
                        for w in (next(w for w in found if found[w] == one) for one in lists[:2])
                    )
                    raise InputError(
                        f"{where}: column {column!r} holds numbers without class names, and the "
                        f"class names of other tables differ: {said}; write its labels as words"
                    )
            note = f", labels read by name: {len(lists)} different lists of class names"
        elif nameless:
            source = next(iter(found))
            note = f", labels of {len(nameless)} of {len(tables)} tables read by the class names "
            note += f"of {source}"
        return cls(
            tuple(dict.fromkeys(name for names in lists for name in names)),
            {where: found.get(where, lists[0]) for where, _ in tables},
            note,
        )


def read_columns(
    mapping: ColumnMapping, table: pa.Table, where: str, classes: ClassNames | None
) -> Columns:
    """Read all columns but the images.

    Groups and clients are raw; so are labels, unless class names are known.
    """
    names = mapping.columns
    texts = {**TEXT_FIELDS, "qa": ("question", "context")}.get(mapping.kind, ())
    texts += ("output",) * (mapping.kind == "instruction")
    columns: Columns = {n: read_texts(table, names[n], where) for n in texts if n in names}
    if mapping.kind == "qa":
        columns["answers"] = read_answers(table, names["answers"], where)
    if mapping.kind in LABELLED and classes is not None:
        # The table numbers its labels by its own names; words are those of any table.
        own = classes.own[where]
        known = [*own, *(name for name in classes.names if name not in own)]
        labels = read_labels(table, names["label"], len(own), where, known)
        places = np.array([classes.names.index(name) for name in known], dtype=np.int64)
        columns["label"] = places[labels]
    elif mapping.kind in LABELLED:
        columns["label"] = read_raw(table, names["label"], where)
    if mapping.kind == "instruction":
        rows = [at_row(where, row) for row in range(table.num_rows)]
        # The columns are those of the first table, and these may be in test rows alone.
        further, choices, choice = (names.get(n, n) for n in ("references", "choices", "choice"))
        if further in table.column_names:
            found = table.column(further).to_pylist()
            columns["references"] = plain_references(found, rows, further)
        if {choices, choice} <= {*table.column_names}:
            lists, right = (table.column(name).to_pylist() for name in (choices, choice))
            columns |= plain_choices(lists, right, rows, choices)
    for name in ("group", "client"):
        if names.get(name) in table.column_names:
            columns[name] = read_raw(table, names[name], where)
    return columns


def list_images(split: CleanTables, column: str, folder: Path | None) -> list[NamedImage]:
    """Return the images of a split, encoded or as paths of their files."""
    images: list[NamedImage] = []
    for (where, table), retained in zip(split.tables, split.retained, strict=True):
        values = get_column(table.filter(pa.array(retained)), column, where)
        kind = values.type
        is_path = folder is not None and is_text(kind)
        if not (
            holds_images(kind)
            or is_path
            or pa.types.is_binary(kind)
            or pa.types.is_large_binary(kind)
        ):
            raise CorruptFileError(
                f"{where}: column {column!r} is {kind}, not images (bytes, or paths of files)"
            )
        for row, value in zip(np.flatnonzero(retained).tolist(), values.to_pylist(), strict=True):
            image = value["bytes"] if holds_images(kind) else value
            if image is None:
                raise CorruptFileError(f"{at_row(where, row)}: the image has no bytes")
            if is_path and folder is not None:
                image = folder / image
            images.append((image, at_row(where, row)))
    return images
