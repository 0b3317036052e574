"""Contract checks of a dataset, whose rows come from ``TRISHUL_HUB``, the cache or the hub."""

from pathlib import Path

from trishul_ray.config.fields import DataConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.contract.checks import Check, require
from trishul_ray.data.dataset import PreparedDataset
from trishul_ray.data.prepare import official_rows, prepare


def checks_of(name: str) -> list[Check]:
    return [
        Check("has at most the rows that sizes declares", lambda folder: rows_are_official(name)),
        Check("has rows of every class", lambda folder: classes_have_rows(name)),
        Check("has the same fingerprint again", lambda folder: fingerprint_is_stable(name, folder)),
    ]


def _prepared(name: str, cache: Path | None = None) -> PreparedDataset:
    """Load the dataset as a run does; with ``cache``, read it again into that folder."""
    paths = StoragePaths.at()
    return prepare(DataConfig(name=name), cache=cache or paths.cache, hub=paths.hub)


def rows_are_official(name: str) -> None:
    """Check that both splits have rows, and at most as many as ``sizes`` declares."""
    found = _prepared(name)
    for split, rows in (official_rows(name) or {}).items():
        held = len(found.split(split))
        require(0 < held <= rows, f"{held} {split} rows, but sizes declares {rows}")


def classes_have_rows(name: str) -> None:
    """Check that every class has a training row; pass for rows without classes."""
    found = _prepared(name)
    if "label" not in found.train.columns:
        return
    missing = sorted({*range(found.info.num_classes or 0)} - {*found.train.labels.tolist()})
    names = [found.info.classes[label] for label in missing]
    require(not missing, f"no training row of class {', '.join(names[:5])}")


def fingerprint_is_stable(name: str, folder: Path) -> None:
    """Check that the rows are identical when they are read again into another folder."""
    same = _prepared(name).fingerprint == _prepared(name, folder).fingerprint
    require(same, "its rows differ when they are read again: read them in a fixed order")
