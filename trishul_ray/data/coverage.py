"""The number of a dataset's rows that a run uses."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from pydantic import ConfigDict

from trishul_ray.data.dataset import PreparedDataset
from trishul_ray.data.prepare import official_rows
from trishul_ray.storage.durable import Json


@dataclass(frozen=True)
class RowCounts:
    """Row counts of a split.

    Attributes:
        used: Rows that are used for training or scored.
        held: Rows in the source.
        official: Rows of the published dataset; for user data, the same as ``held``.
    """

    used: int
    held: int
    official: int

    def __str__(self) -> str:
        # "60 of 363,846", or "363,846" if all are used.
        complete = self.used == self.official
        return f"{self.used:,}" if complete else f"{self.used:,} of {self.official:,}"


@dataclass(frozen=True)
class Coverage:
    """The rows that a run's scores are based on.

    ``validation`` is the number of scored rows that are held out of the training rows. ``revision``
    is the commit of the hub's repository, or None if unknown or not from the hub. ``skipped``
    contains the names of skipped rows, and ``cut`` describes truncated rows.
    """

    dataset: str
    source: str
    revision: str | None
    train: RowCounts
    test: RowCounts
    skipped: tuple[str, ...] = ()
    validation: int = 0
    cut: tuple[str, ...] = ()

    #: Readers ignore the additional fields of :meth:`to_json`.
    __pydantic_config__: ClassVar = ConfigDict(extra="ignore")

    @property
    def part(self) -> bool:
        """Whether training or scoring does not use exactly the official rows."""
        return any(rows.used != rows.official for rows in (self.train, self.test))

    @property
    def sentence(self) -> str:
        """Dataset, rows, source and revision in one line."""
        unknown = self.revision is None and self.source.startswith(("hub:", "mirror:"))
        held_out = f"{self.validation:,} validation rows and " if self.validation else ""
        return (
            f"{'part' if self.part else 'all'} of {self.dataset}: {self.train} training rows, "
            f"{held_out}{self.test} test rows scored; {self.source}{', revision unknown' * unknown}"
        )

    def to_json(self) -> Json:
        """Return all fields as plain JSON values, without the last three if they are empty."""
        fields = asdict(self) | {"part": self.part, "sentence": self.sentence}
        for name in ("skipped", "validation", "cut"):
            if not fields[name]:
                del fields[name]
        return fields


def measure_coverage(
    dataset: PreparedDataset, train_limit: int | None = None, test_limit: int | None = None
) -> Coverage:
    """Compute the rows of a prepared dataset, raw or encoded, that a run with these limits uses.

    ``test_limit`` also applies to validation rows.
    """
    info = dataset.info
    official = official_rows(info.name) or {}

    def count(split: str, limit: int | None) -> RowCounts:
        held = len(dataset.split(split))
        used = held if limit is None else min(limit, held)
        return RowCounts(used, held, official.get(split, held))

    train, test = count("train", train_limit), count("test", test_limit)
    held_out = 0
    if "validation" in dataset.split_names:
        held_out = count("validation", test_limit).used
    origin = info.origin
    return Coverage(info.name, str(origin), origin.revision, train, test, info.skipped, held_out)
