"""Make a dataset of your own tables, by the names of their columns.

``data.columns`` maps the platform's column names (:data:`COLUMN_NAMES`) to those of the data;
columns that have the platform's name already need no entry. The columns that are there decide what
the rows are: images, questions or texts. Labels, groups and clients may be texts or integers; they
are numbered in sorted order.

Legend of shapes: N rows, C channels, H x W pixels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trishul_ray.data.cleaning import (
    CleanTables,
    NamedTables,
    check_unique,
    clean,
    differing_in_case,
)
from trishul_ray.data.hub import class_names
from trishul_ray.data.images import MAX_NAMED, NamedImage, decode_and_resize, pixel_statistics
from trishul_ray.data.prepared import DatasetInfo, Kind
from trishul_ray.data.public import Columns
from trishul_ray.data.tables import (
    get_column,
    is_text,
    join,
    length,
    number_values,
    read_answers,
    read_labels,
    read_raw,
    read_texts,
    split_off_test,
    take_rows,
)
from trishul_ray.errors import CorruptFileError, InputError, did_you_mean

#: The platform's column names: the keys of ``data.columns``.
COLUMN_NAMES = (
    "text",
    "text_pair",
    "label",
    "image",
    "question",
    "context",
    "answers",
    "client",
    "group",
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

        Raises:
            InputError: a key or a column is unknown, or columns to train on are missing.
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


def build_dataset(
    name: str,
    source: str,
    tables: Mapping[str, NamedTables],
    columns: Mapping[str, str],
    test_share: float,
    *,
    image_folder: Path | None,
    progress: Callable[[str, float], None],
    skip_broken: bool = False,
) -> tuple[DatasetInfo, dict[str, Columns]]:
    """Return the description of a dataset of tables, and the columns of ``train`` and ``test``.

    Args:
        name: name of the dataset.
        source: where the tables are from, for ``info.source``.
        tables: tables of the ``train`` split and, if there is one, of the ``test`` split.
        columns: ``data.columns``.
        test_share: share of the train rows to set aside if there is no ``test`` split.
        image_folder: folder that image paths are relative to; None if images cannot be paths.
        progress: called with the stage and the fraction done.
        skip_broken: whether to leave out rows whose image cannot be read.

    Raises:
        InputError: the columns do not make a dataset.
        CorruptFileError: a row is malformed; the message names table and row.
    """
    first, first_table = tables["train"][0]
    for where, table in (named for parts in tables.values() for named in parts):
        check_unique(table.column_names, where)
    mapping = ColumnMapping.resolve(columns, first_table.column_names)
    if not sum(table.num_rows for _, table in tables["train"]):
        raise InputError(f"{first}: there are no rows")

    def report(split: str, fraction: float) -> None:
        progress(f"{name} {split}", fraction)

    classes = class_names(first_table, mapping.columns.get("label", ""))
    cleaned, note, skipped = clean(tables, mapping.columns, skip_broken=skip_broken)
    source += note
    fields: dict[str, Any] = {"skipped": skipped}
    splits: dict[str, Columns] = {}
    for split, parts in cleaned.items():
        read = [_read_columns(mapping, t, where, classes) for where, t in parts.tables]
        splits[split] = _rows_kept(join(read), np.concatenate(parts.kept))
        report(split, 1.0)
    if mapping.kind == "image":
        column = mapping.columns["image"]
        images = {s: _list_images(parts, column, image_folder) for s, parts in cleaned.items()}
        resized = decode_and_resize(images, report, skip_broken=skip_broken)
        source += resized.note
        fields["skipped"] += resized.skipped
        for split, pixels in resized.pixels.items():
            kept = resized.kept[split]
            splits[split] = {n: take_rows(c, kept) for n, c in splits[split].items()}
            splits[split]["pixels"] = pixels
    for column, field in (("label", "classes"), ("group", "groups"), ("client", "clients")):
        raw = {split: values[column] for split, values in splits.items() if column in values}
        if not raw:
            continue
        if column == "label" and classes is not None:
            fields["classes"] = classes  # the labels are numbers already
            continue
        numbered, names = number_values(raw, what=mapping.columns[column])
        for split, values in numbered.items():
            splits[split][column] = values
        fields[field] = names
    source += differing_in_case(fields.get("classes", ()))
    if "test" not in splits:
        splits = split_off_test(splits["train"], test_share, first)
    source += _clients_without_rows(splits["train"], fields.get("clients", ()))
    return make_info(name, mapping.kind, source, splits, fields), splits


def _read_columns(
    mapping: ColumnMapping, table: pa.Table, where: str, classes: tuple[str, ...] | None
) -> Columns:
    """Read all columns but the images.

    Groups and clients are raw; so are labels, unless their class names are known.
    """
    columns: Columns = {}
    texts = {"text": ("text", "text_pair"), "qa": ("question", "context")}
    for name in texts.get(mapping.kind, ()):
        if name in mapping.columns:
            columns[name] = read_texts(table, mapping.columns[name], where)
    if mapping.kind == "qa":
        columns["answers"] = read_answers(table, mapping.columns["answers"], where)
    elif classes is not None:
        columns["label"] = read_labels(table, mapping.columns["label"], len(classes), where)
    else:
        columns["label"] = read_raw(table, mapping.columns["label"], where)
    for name in ("group", "client"):
        column = mapping.columns.get(name)
        if column is not None and column in table.column_names:
            columns[name] = read_raw(table, column, where)
    return columns


def _rows_kept(columns: Columns, kept: np.ndarray) -> Columns:
    if kept.all():
        return columns
    return {name: take_rows(column, np.flatnonzero(kept)) for name, column in columns.items()}


def _clients_without_rows(train: Columns, clients: Sequence[str]) -> str:
    """Return a note on the clients all of whose rows are test rows; empty if there are none."""
    lost = np.setdiff1d(np.arange(len(clients)), train.get("client", ()))
    named = ", ".join(repr(clients[n]) for n in lost[:MAX_NAMED])
    return f", without training rows: client{'s' * (len(lost) > 1)} {named}" if len(lost) else ""


def _list_images(split: CleanTables, column: str, folder: Path | None) -> list[NamedImage]:
    """Return the images of a split, encoded or as paths of their files."""
    images: list[NamedImage] = []
    for (where, table), kept in zip(split.tables, split.kept, strict=True):
        values = get_column(table.filter(pa.array(kept)), column, where)
        kind = values.type
        is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        is_path = folder is not None and is_text(kind)
        if not (is_struct or is_path or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise CorruptFileError(
                f"{where}: column {column!r} is {kind}, not images (bytes, or paths of files)"
            )
        for row, value in zip(np.flatnonzero(kept), values.to_pylist(), strict=True):
            image = value["bytes"] if is_struct else value
            if image is None:
                raise CorruptFileError(f"{where}, row {row}: the image has no bytes")
            if is_path and folder is not None:
                image = folder / image
            images.append((image, f"{where}, row {row}"))
    return images


def make_info(
    name: str, kind: Kind, source: str, splits: Mapping[str, Columns], fields: Mapping[str, Any]
) -> DatasetInfo:
    """Return the description of finished columns, with ``classes`` and ``groups`` of ``fields``.

    Raises:
        InputError: a split has no rows, or there is only one class.
    """
    fields = dict(fields)
    for split, columns in splits.items():
        if not length(columns):
            raise InputError(f"{source}: the {split} split has no rows")
    if kind != "qa" and len(fields["classes"]) < 2:
        only = fields["classes"][0]
        raise InputError(f"{source}: all rows are of class {only!r}; two classes are needed")
    if kind == "image":
        pixels = splits["train"]["pixels"]
        mean, std = pixel_statistics(pixels)
        fields |= {"image_shape": pixels.shape[1:], "mean": mean}
        # Pixels are divided by std: do not divide by zero if a channel is constant.
        fields["std"] = tuple(value or 1.0 for value in std)
    if kind == "text":
        fields["fields"] = tuple(f for f in ("text", "text_pair") if f in splits["train"])
    return DatasetInfo(name=name, kind=kind, source=source, **fields)
