"""Convert the tables of user data to a dataset: columns, class names, images and splits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trishul_ray.data.columns import (
    common_class_names,
    is_text,
    lookalike,
    number_names,
    read_answers,
    read_labels,
    read_texts,
)
from trishul_ray.data.conversations import (
    has_context,
    plain_choices,
    plain_messages,
    plain_references,
)
from trishul_ray.data.dataset import (
    LABELED,
    Columns,
    DatasetInfo,
    Kind,
    Origin,
    ProgressCallback,
    Splits,
    length,
    split_off_test,
    take_rows,
)
from trishul_ray.data.images import (
    NamedImage,
    decode_and_resize,
    named_images,
    pixel_statistics,
)
from trishul_ray.data.tables import concatenate, missing_words
from trishul_ray.data.user.cleaning import absent_columns, clean, doubt_labels, find_columns
from trishul_ray.errors import CorruptFileError, InputError, first_line, join_limited

#: Optional text columns, in reading order.
_TEXT_FIELDS: dict[Kind, tuple[str, ...]] = {
    "image": (),
    "text": ("text", "text_pair"),
    "qa": ("question", "context"),
    "instruction": ("instruction", "input", "messages"),
}

#: Maximum number of skipped rows in ``result.json``, and of names in a note.
_MAX_SKIPPED, _MAX_NAMED = 100, 10


def to_dataset(
    name: str,
    origin: Origin,
    tables: Mapping[str, Sequence[pa.Table]],
    progress: ProgressCallback,
    *,
    columns: Mapping[str, str],
    test_share: float,
    skip_broken: bool,
    folder: Path | None,
) -> tuple[DatasetInfo, Splits]:
    """Build the description of the rows, and the columns [N, ...] of ``train`` and ``test``.

    Args:
        name: Name of the dataset.
        origin: Source of the rows.
        tables: Tables of ``train`` and, optionally, ``test``.
        progress: Called with the fraction of decoded images.
        columns: ``data.columns``.
        test_share: Fraction of the rows that become test rows without a test split.
        skip_broken: Whether to skip incomplete rows instead of rejecting them.
        folder: Folder that image paths in the tables are relative to, or None without paths.

    Raises:
        InputError: The columns do not make a dataset, or a split or a second class is missing.
        CorruptFileError: Rows are malformed or incomplete.
    """
    where = origin.place
    try:
        table = concatenate(chain(*tables.values()), where)
        kind, names = find_columns(columns, table.column_names)
        classes = None
        if kind in LABELED:
            classes = common_class_names(chain(*tables.values()), names["label"])
        unread = [
            f"{column!r} ({count:,} rows)"
            for column in filter(str.strip, table.column_names)
            if column not in names.values()
            and (count := len(table) - table.column(column).null_count)
        ]
        said = [f"columns not read: {join_limited(unread, _MAX_NAMED)}"] if unread else []
        table = table.select(list(names.values())).rename_columns(list(names))
        sizes = {split: sum(map(len, parts)) for split, parts in tables.items()}
        if not sizes["train"]:
            raise InputError(f"{where}: the train split has no rows")
        splits_of_rows = [split for split, n in sizes.items() for _ in range(n)]
        names_of_rows = [f"{split} row {row}" for split, n in sizes.items() for row in range(n)]
        table = table.append_column("split", pa.array(splits_of_rows, pa.string()))
        table = table.append_column("name", pa.array(names_of_rows, pa.string()))
        absent = absent_columns(table)
        if kind == "instruction":
            table, counts = _with_conversations(table, where)
            said += counts
        table, skipped, notes = clean(
            table, names, classes, absent, where, skip_broken=skip_broken,
            missing=missing_words(chain(*tables.values())),
        )  # fmt: skip
        read, fields = _read_columns(kind, table, where, classes)
    except pa.ArrowException as error:
        raise CorruptFileError(f"{where}: {first_line(error)}") from error
    if kind == "image":
        images = _list_images(table, where, folder)
        resized = decode_and_resize(
            images, lambda done: progress(f"{name} images", done), skip_broken=skip_broken
        )
        readable = np.array([image not in resized.broken for _, image in images], dtype=bool)
        table = table.filter(pa.array(readable))
        read = take_rows(read, np.flatnonzero(readable)) | {"pixels": resized.pixels}
        skipped, notes = (*skipped, *resized.broken), (*notes, *resized.notes)
    if len(skipped) > _MAX_SKIPPED:
        skipped = (*skipped[:_MAX_SKIPPED], f"and {len(skipped) - _MAX_SKIPPED} more rows")
    if kind in LABELED:
        fields["doubt"] = doubt_labels(fields["classes"], read["label"])
    splits: dict[str, Columns] = {}
    for split in tables:
        found = take_rows(read, np.flatnonzero(table.column("split").to_numpy() == split))
        splits[split] = {k: v for k, v in found.items() if (split, k) not in absent}
    if "test" not in splits:
        splits = split_off_test(splits["train"], test_share, where)
    notes = (*notes, *said, *_check_splits(kind, splits, fields, where))
    origin = replace(origin, notes=(*origin.notes, *notes))
    return DatasetInfo(name, kind, origin=origin, skipped=skipped, **fields), splits


def _check_splits(kind: Kind, splits: Splits, fields: dict[str, Any], where: str) -> list[str]:
    """Check the splits, add fields that depend on the training rows, and return notes.

    Raises:
        InputError: A split has no rows, or all rows have the same class.
    """
    for split, columns in splits.items():
        if not length(columns):
            raise InputError(f"{where}: the {split} split has no rows")
    classes, train, notes = fields.get("classes", ()), splits["train"], []
    if kind in LABELED and len(classes) < 2:
        raise InputError(f"{where}: all rows have class {classes[0]!r}; provide at least two")
    for what, column in (("classes", "label"), ("clients", "client")):
        names = fields.get(what, ())
        if len(lost := np.setdiff1d(np.arange(len(names)), train.get(column, ()))):
            named = join_limited([repr(names[n]) for n in lost], _MAX_NAMED)
            notes.append(f"{what} without training rows: {named}")
    for what in ("classes", "groups", "clients"):
        names = fields.get(what, ())
        if len({lookalike(name) for name in names}) < len(names):
            notes.append(f"warning: some {what} differ only in case, width or invisible characters")
    if kind == "image":
        pixels: Any = train["pixels"]
        mean, std = pixel_statistics(pixels)
        # Pixels are divided by std, which is zero for a constant channel.
        std = tuple(value or 1.0 for value in std)
        fields |= {"image_shape": pixels.shape[1:], "mean": mean, "std": std}
    elif kind != "qa":
        fields["fields"] = tuple(name for name in _TEXT_FIELDS[kind] if name in train)
    return notes


def _with_conversations(table: pa.Table, where: str) -> tuple[pa.Table, list[str]]:
    """Convert conversations of instruction rows to JSON texts, null without an answer.

    A prompt and a completion that are lists of messages form a conversation (TRL). If any row has a
    system message or a history (Alpaca), all rows become conversations. Also return notes.
    """
    present = [n for n in ("messages", "instruction", "output") if n in table.column_names]
    context = [n for n in ("system", "history") if n in table.column_names]
    lists = [name for name in present if pa.types.is_list(table.schema.field(name).type)]
    if len(lists) == 1 and len(present) > 1:
        raise CorruptFileError(
            f"{where}: prompts and answers must be both texts, or both lists of messages"
        )
    with_context = sum(map(has_context, table.select(context).to_pylist()))
    if "messages" not in present and not lists and not with_context:
        return table.drop_columns(context), []
    names = [f"{where}, {row}" for row in table.column("name").to_pylist()]
    read = [*present, *context, *({"input"} & {*table.column_names})]
    messages, notes = plain_messages(table.select(read).to_pylist(), names, "+".join(present))
    if with_context:
        notes.append(f"{with_context:,} rows with a column of system messages or earlier turns")
    return table.drop_columns(read).append_column("messages", messages), notes


def _read_columns(
    kind: Kind, table: pa.Table, where: str, classes: tuple[str, ...] | None
) -> tuple[Columns, dict[str, Any]]:
    """Read all columns except images, and the names of classes, groups and clients."""
    fields: dict[str, Any] = {}
    texts = _TEXT_FIELDS[kind] + ("output",) * (kind == "instruction")
    columns: Columns = {
        name: read_texts(table, name, where) for name in texts if name in table.column_names
    }
    if kind == "qa":
        columns["answers"] = read_answers(table, "answers", where)
    named = {"client": "clients", "group": "groups"}
    if kind in LABELED and classes is not None:
        columns["label"] = read_labels(table, "label", len(classes), where, classes)
        fields["classes"] = classes
    elif kind in LABELED:
        named["label"] = "classes"
    if kind == "instruction":
        names = [f"{where}, {row}" for row in table.column("name").to_pylist()]
        if "references" in table.column_names:
            further = table.column("references").to_pylist()
            columns["references"] = plain_references(further, names, "references")
        if {"choices", "choice"} <= {*table.column_names}:
            lists, right = (table.column(name).to_pylist() for name in ("choices", "choice"))
            columns |= plain_choices(lists, right, names, "choices")
    for name, field in named.items():
        if name in table.column_names:
            values = table.column(name).combine_chunks()
            columns[name], fields[field] = number_names(values)
    return columns, fields


def _list_images(table: pa.Table, where: str, folder: Path | None) -> list[NamedImage]:
    """List the images, encoded or as paths."""
    values = table.column("image")
    if is_text(values.type) and folder is not None:
        return [(folder / path, str(folder / path)) for path in values.to_pylist()]
    return named_images(values, where, table.column("name").to_pylist())
