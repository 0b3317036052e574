"""How much of a dataset a run trains on and is scored on, of how many official rows."""

from dataclasses import asdict, dataclass
from typing import Any

from trishul_ray.data.prepare import official_rows
from trishul_ray.data.prepared import PreparedDataset


@dataclass(frozen=True)
class Rows:
    """Rows of one split.

    Attributes:
        used: trained on, or scored.
        held: what the source holds.
        official: what the published dataset has; ``held`` for one's own data, whole by definition.
    """

    used: int
    held: int
    official: int

    def __str__(self) -> str:
        """Return ``60 of 363,846``, or ``363,846`` where all are used."""
        whole = self.used == self.official
        return f"{self.used:,}" if whole else f"{self.used:,} of {self.official:,}"


@dataclass(frozen=True)
class Coverage:
    """What a run's scores are scores of.

    Attributes:
        dataset: name of the dataset.
        source: where the rows came from.
        revision: commit of the hub's repository; None where it is unknown or there is none.
        train: rows the clients train on.
        test: rows that are scored.
    """

    dataset: str
    source: str
    revision: str | None
    train: Rows
    test: Rows

    @property
    def part(self) -> bool:
        """Return whether training or scoring saw other than all the official rows."""
        return any(rows.used != rows.official for rows in (self.train, self.test))

    @property
    def sentence(self) -> str:
        """Return dataset, rows, source and revision in one line."""
        unknown = self.revision is None and self.source.startswith(("hub:", "mirror:"))
        return (
            f"{'part' if self.part else 'all'} of {self.dataset}: {self.train} training rows, "
            f"{self.test} test rows scored; {self.source}{', revision unknown' * unknown}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with ``part`` and ``sentence`` beside the fields."""
        return asdict(self) | {"part": self.part, "sentence": self.sentence}


def measure_coverage(
    dataset: PreparedDataset, train_limit: int | None = None, test_limit: int | None = None
) -> Coverage:
    """Return how much of ``dataset`` a run covers.

    Args:
        dataset: as prepared, of texts or encoded.
        train_limit: ``data.train_limit``.
        test_limit: ``evaluation.limit``.
    """
    info = dataset.info
    official = official_rows(info.name) or {}
    on_hub = info.source.startswith(("hub:", "mirror:"))
    revision = info.source.partition("@")[2] if on_hub else ""

    def rows(split: str, limit: int | None) -> Rows:
        held = len(dataset.split(split))
        return Rows(held if limit is None else min(limit, held), held, official.get(split, held))

    return Coverage(
        dataset=info.name,
        source=info.source,
        revision=revision or None,
        train=rows("train", train_limit),
        test=rows("test", test_limit),
    )
