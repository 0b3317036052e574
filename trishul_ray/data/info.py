"""What a dataset says of itself. Shapes: N rows, C channels, H x W pixels."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: What a dataset's rows are: see :class:`DatasetInfo`.
Kind = Literal["image", "text", "qa"]


@dataclass(frozen=True)
class DatasetInfo:
    """What a dataset says of itself; stored as JSON in every prepared file.

    Columns by kind. ``image``: ``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N]. ``text``:
    the columns of ``fields`` as strings, and ``label``. ``qa``: ``question``, ``context`` and
    ``answers`` (a JSON list of texts) as strings. Any of them may also have ``group`` int64 [N]
    (an index into ``groups``) and ``client`` int64 [N] (who holds the row, for a natural
    partition).

    Attributes:
        name: the dataset's name in the registry.
        kind: what its rows are.
        source: where the rows came from, for people.
        classes: class names; their number is the number of classes. Empty for ``qa``.
        groups: names of sub-datasets (MRQA) or of parts of the test rows (MNLI); may be empty.
        fields: text columns in reading order; ``text`` only.
        image_shape: (C, H, W); ``image`` only, as are the two below.
        mean: per channel, of pixels / 255 over the first split.
        std: per channel, likewise.
    """

    name: str
    kind: Kind
    source: str
    classes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    image_shape: tuple[int, int, int] = (0, 0, 0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` reads them back."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DatasetInfo":
        """Inverse of :meth:`to_json`."""
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**fields)
