"""One's own tables to a dataset, by the names of their columns.

``data.columns`` says what a canonical column is called in the data; a column that already has its
canonical name needs no word. What the rows are follows from what is there: images, questions, or
texts. Labels, groups and clients may be texts or integers and are numbered in sorted order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trishul_ray.data.hub import class_names
from trishul_ray.data.images import Item, decode_all, pixel_statistics
from trishul_ray.data.prepared import Column, DatasetInfo
from trishul_ray.data.public import Columns
from trishul_ray.data.tables import (
    join,
    length,
    number,
    read_answers,
    read_labels,
    read_raw,
    read_texts,
    take,
)
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.rng import numpy_rng

#: Keys of ``data.columns``.
CANONICAL = (
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


#: What a row must have, by what it is; the first that is complete counts.
_KINDS = {
    "image": ("image", "label"),
    "qa": ("question", "context", "answers"),
    "text": ("text", "label"),
}


#: A file's name and its rows.
Tables = Sequence[tuple[str, pa.Table]]


@dataclass(frozen=True)
class Mapped:
    """Which column of the data is which.

    Attributes:
        kind: image, qa or text.
        columns: canonical name to the data's.
    """

    kind: str
    columns: Mapping[str, str]

    @classmethod
    def of(cls, wanted: Mapping[str, str], have: Sequence[str]) -> "Mapped":
        """What ``data.columns`` and the data's own names make together.

        Raises:
            InputError: an unknown key, a column that the data lack, or too little to train on.
        """
        for canonical, column in wanted.items():
            if canonical not in CANONICAL:
                known = ", ".join(CANONICAL)
                raise InputError(f"data.columns.{canonical}: unknown; known are {known}")
            if column not in have:
                raise InputError(
                    f"data.columns.{canonical}={column!r}: the data have {', '.join(have)}"
                )
        found = {name: wanted.get(name, name) for name in CANONICAL}
        found = {name: column for name, column in found.items() if column in have}
        for kind, needed in _KINDS.items():
            if all(name in found for name in needed):
                return cls(kind, found)
        ways = "; or ".join(" and ".join(needed) for needed in _KINDS.values())
        raise InputError(
            f"data.columns: the data have {', '.join(have)}; name the columns of {ways} "
            "(e.g. data.columns={text: body, label: topic})"
        )


def build(
    name: str,
    source: str,
    tables: Mapping[str, Tables],
    wanted: Mapping[str, str],
    test_share: float,
    *,
    folder: Path | None,
    progress: Callable[[str, float], None],
) -> tuple[DatasetInfo, dict[str, Columns]]:
    """The dataset that tables hold.

    Args:
        name: of the dataset.
        source: where it is from, for people.
        tables: of ``train`` and, if there is one, ``test``.
        wanted: ``data.columns``.
        test_share: share of the rows set aside where there is no ``test``.
        folder: what paths of images are relative to; None: there are none.
        progress: told of the stage and the fraction done.

    Raises:
        InputError: the columns do not make a dataset.
        CorruptFileError: a row is not as it should be; names file and row.
    """
    mapped = Mapped.of(wanted, tables["train"][0][1].column_names)

    def tell(split: str, fraction: float) -> None:
        progress(f"{name} {split}", fraction)

    fields: dict[str, Any] = {}
    splits: dict[str, Columns] = {}
    classes = class_names(tables["train"][0][1], mapped.columns.get("label", ""))
    for split, parts in tables.items():
        splits[split] = join([_plain(mapped, table, where, classes) for where, table in parts])
        tell(split, 1.0)
    if mapped.kind == "image":
        column = mapped.columns["image"]
        items = {s: _items(parts, column, folder) for s, parts in tables.items()}
        pixels, note = decode_all(items, tell)
        source += note
        for split, stored in pixels.items():
            splits[split]["pixels"] = stored
    for canonical, plural in (("label", "classes"), ("group", "groups"), ("client", None)):
        raw = {s: c[canonical] for s, c in splits.items() if canonical in c}
        if not raw:
            continue
        if canonical == "label" and classes is not None:
            fields["classes"] = classes
            continue
        numbered, names = number(raw, what=mapped.columns[canonical])
        for split, values in numbered.items():
            splits[split][canonical] = values
        if plural is not None:
            fields[plural] = names
    if "test" not in splits:
        splits = set_aside(splits["train"], test_share)
    return describe(name, mapped.kind, source, splits, fields), splits


def describe(
    name: str, kind: str, source: str, splits: Mapping[str, Columns], fields: Mapping[str, Any]
) -> DatasetInfo:
    """The description of finished columns.

    Raises:
        InputError: no rows, or a single class.
    """
    more = dict(fields)
    for split, columns in splits.items():
        if not length(columns):
            raise InputError(f"{source}: the {split} split has no rows")
    if kind != "qa" and len(more["classes"]) < 2:
        raise InputError(f"{source}: all rows are of class {more['classes'][0]!r}; two are needed")
    if kind == "image":
        pixels = splits["train"]["pixels"]
        mean, std = pixel_statistics(pixels)
        # A channel that never changes has nothing to scale.
        more |= {"image_shape": pixels.shape[1:], "mean": mean}
        more["std"] = tuple(value or 1.0 for value in std)
    if kind == "text":
        more["fields"] = tuple(f for f in ("text", "text_pair") if f in splits["train"])
    return DatasetInfo(name=name, kind=kind, source=source, **more)  # type: ignore[arg-type]  # of _KINDS


def set_aside(columns: Columns, share: float) -> dict[str, Columns]:
    """``train`` and ``test`` of rows without test rows.

    A permutation drawn from ``numpy_rng(0, "test-share")`` decides, the same for every experiment;
    rows keep their order. Both get at least one row.

    Raises:
        InputError: fewer than two rows.
    """
    rows = length(columns)
    if rows < 2:
        raise InputError(f"data.test_share={share}: {rows} rows cannot be split")
    count = min(rows - 1, max(1, round(share * rows)))
    order = numpy_rng(0, "test-share").permutation(rows)
    chosen = {"train": np.sort(order[count:]), "test": np.sort(order[:count])}
    return {
        split: {name: _pick(column, rows) for name, column in columns.items()}
        for split, rows in chosen.items()
    }


def _pick(column: Column, rows: np.ndarray) -> Column:
    return column.take(pa.array(rows)) if isinstance(column, pa.Array) else column[rows]


def _plain(mapped: Mapped, table: pa.Table, where: str, classes: tuple[str, ...] | None) -> Columns:
    """All columns but the images; labels, groups and clients still raw."""
    found: Columns = {}
    texts = {"text": ("text", "text_pair"), "qa": ("question", "context")}
    for canonical in texts.get(mapped.kind, ()):
        if canonical in mapped.columns:
            found[canonical] = read_texts(table, mapped.columns[canonical], where)
    if mapped.kind == "qa":
        found["answers"] = read_answers(table, mapped.columns["answers"], where)
    elif classes is not None:
        found["label"] = read_labels(table, mapped.columns["label"], len(classes), where)
    else:
        found["label"] = read_raw(table, mapped.columns["label"], where)
    for canonical in ("group", "client"):
        column = mapped.columns.get(canonical)
        if column is not None and column in table.column_names:
            found[canonical] = read_raw(table, column, where)
    return found


def _items(parts: Tables, column: str, folder: Path | None) -> list[Item]:
    """The images of a split: encoded bytes, or files."""
    items: list[Item] = []
    for where, table in parts:
        values = take(table, column, where)
        kind = values.type
        is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        is_path = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        is_path = is_path and folder is not None
        if not (is_struct or is_path or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise CorruptFileError(
                f"{where}: column {column!r} is {kind}, not images (bytes, or paths of files)"
            )
        for row, value in enumerate(values.to_pylist()):
            encoded = value["bytes"] if is_struct else value
            if encoded is None:
                raise CorruptFileError(f"{where}, row {row}: the image has no bytes")
            if is_path and folder is not None:
                encoded = folder / encoded
            items.append((encoded, f"{where}, row {row}"))
    return items
