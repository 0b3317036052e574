"""What the rows of a public dataset hold: which columns, and how they become ours.

Every layout turns a table in the hub's columns into canonical columns (``decode``), and says what
a ``DatasetInfo`` needs once all of them are known (``finish``). Readers of original archives give
the same columns as ``decode`` and share ``finish``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from trishul_ray.data.base import Column
from trishul_ray.data.columns import number, read_answers, read_labels, read_raw, read_texts
from trishul_ray.data.hub import class_names
from trishul_ray.data.info import Kind
from trishul_ray.data.pixels import MODE_CHANNELS, decode_images, pixel_statistics

#: ``tell(fraction)`` of the work in hand.
Tell = Callable[[float], None]
#: Columns by canonical name.
Columns = dict[str, Column]


class Layout(Protocol):
    """See the module."""

    @property
    def kind(self) -> Kind:
        """What the rows are."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The hub's columns that are read."""
        ...

    def decode(self, table: pa.Table, where: str, tell: Tell) -> Columns:
        """Canonical columns [N, ...] of a table; ``group`` may be raw texts."""
        ...

    def names(self, table: pa.Table) -> tuple[str, ...] | None:
        """Class names, where the table carries them."""
        ...

    def finish(
        self, splits: Mapping[str, Columns], names: tuple[str, ...] | None
    ) -> tuple[dict[str, Any], Mapping[str, Columns]]:
        """Fields of ``DatasetInfo``, and every split's columns as they are stored."""
        ...


@dataclass(frozen=True)
class ImageLayout:
    """Images of one mode and size, with labels.

    Attributes:
        image: the image column, structs {bytes, path}.
        label: the label column, integers.
        classes: number of classes.
        mode: Pillow mode of every image.
        size: (height, width) of every image.
    """

    label: str
    classes: int
    image: str = "img"
    mode: str = "RGB"
    size: tuple[int, int] = (32, 32)
    kind: Kind = "image"

    @property
    def columns(self) -> tuple[str, ...]:
        """The hub's columns that are read."""
        return (self.image, self.label)

    def decode(self, table: pa.Table, where: str, tell: Tell) -> Columns:
        """``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N]."""
        label = read_labels(table, self.label, self.classes, where)
        pixels = decode_images(table, self.image, self.mode, self.size, where, tell)
        return {"pixels": pixels, "label": label}

    def names(self, table: pa.Table) -> tuple[str, ...] | None:
        """Class names of the hub's metadata, if there is one for each class."""
        found = class_names(table, self.label)
        return found if found is not None and len(found) == self.classes else None

    def finish(
        self, splits: Mapping[str, Columns], names: tuple[str, ...] | None
    ) -> tuple[dict[str, Any], Mapping[str, Columns]]:
        """Class names, the shape, and the statistics of the training pixels."""
        mean, std = pixel_statistics(splits["train"]["pixels"])
        fields = {
            "classes": names or tuple(str(label) for label in range(self.classes)),
            "image_shape": (MODE_CHANNELS[self.mode], *self.size),
            "mean": mean,
            "std": std,
        }
        return fields, splits


@dataclass(frozen=True)
class TextLayout:
    """One or two texts with a label.

    Attributes:
        fields: the text columns, in reading order.
        classes: class names; the label is an index into them.
        label: the label column, integers.
    """

    fields: tuple[str, ...]
    classes: tuple[str, ...]
    label: str = "label"
    kind: Kind = "text"

    @property
    def columns(self) -> tuple[str, ...]:
        """The hub's columns that are read."""
        return (*self.fields, self.label)

    def decode(self, table: pa.Table, where: str, tell: Tell) -> Columns:
        """The texts under their names, and ``label`` int64 [N]."""
        columns: Columns = {field: read_texts(table, field, where) for field in self.fields}
        columns["label"] = read_labels(table, self.label, len(self.classes), where)
        tell(1.0)
        return columns

    def names(self, table: pa.Table) -> tuple[str, ...] | None:
        """None: the names are known."""
        return None

    def finish(
        self, splits: Mapping[str, Columns], names: tuple[str, ...] | None
    ) -> tuple[dict[str, Any], Mapping[str, Columns]]:
        """Class names and fields."""
        return {"classes": self.classes, "fields": self.fields}, splits


@dataclass(frozen=True)
class QaLayout:
    """Questions with contexts and answers, of several sub-datasets.

    Attributes:
        subsets: names of the sub-datasets, in the order of their numbers; others that occur are
            numbered after them, sorted.
        subset: the column that names the sub-dataset.
    """

    subsets: tuple[str, ...]
    subset: str = "subset"
    kind: Kind = "qa"

    @property
    def columns(self) -> tuple[str, ...]:
        """The hub's columns that are read."""
        return ("question", "context", "answers", self.subset)

    def decode(self, table: pa.Table, where: str, tell: Tell) -> Columns:
        """``question``, ``context``, ``answers`` (JSON lists) and ``group``, texts all [N]."""
        columns: Columns = {
            "question": read_texts(table, "question", where),
            "context": read_texts(table, "context", where),
            "answers": read_answers(table, "answers", where),
            "group": read_raw(table, self.subset, where),
        }
        tell(1.0)
        return columns

    def names(self, table: pa.Table) -> tuple[str, ...] | None:
        """None: there are no classes."""
        return None

    def finish(
        self, splits: Mapping[str, Columns], names: tuple[str, ...] | None
    ) -> tuple[dict[str, Any], Mapping[str, Columns]]:
        """Names of the sub-datasets that occur, and ``group`` as int64 [N]."""
        numbered, groups = number(
            {split: columns["group"] for split, columns in splits.items()}, self.subsets, "group"
        )
        stored = {split: columns | {"group": numbered[split]} for split, columns in splits.items()}
        return {"groups": groups}, stored
