"""Prepared folders: memory-mapped files that one process writes and others share.

A prepared folder is ``<cache>/data/<step>/<name>-<key>/``. The key is a hash of everything that
determines the rows and their description: the format version, the source's files or the parent's
rows and description, and the settings of the step.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from trishul_ray.data.dataset import (
    FORMAT_VERSION,
    Column,
    DatasetInfo,
    PreparedDataset,
    write_split,
)
from trishul_ray.storage.integrity import make_once

#: The description of a dataset, and the columns [N, ...] of every split.
Contents: TypeAlias = tuple[DatasetInfo, Mapping[str, Mapping[str, Column]]]

#: The step that wrote the rows of a folder.
Step = Literal["raw", "chosen", "validation", "encoded"]


def prepared(
    cache: Path,
    step: Step,
    name: str,
    key: str,
    splits: tuple[str, ...],
    make: Callable[[], Contents],
) -> PreparedDataset:
    """Open a prepared folder, or call ``make`` and write it if it is missing or damaged."""
    digest = hashlib.sha256(f"{FORMAT_VERSION}\n{key}".encode()).hexdigest()[:12]

    def write(new: Path) -> None:
        info, columns = make()
        for split in splits:
            write_split(new / f"{split}.arrow", columns[split], info)

    folder = make_once(cache, f"data/{step}/{name.replace('/', '-')}-{digest}", write)
    return PreparedDataset(folder, splits)


def derived(
    cache: Path,
    step: Step,
    dataset: PreparedDataset,
    key: str,
    make: Callable[[], Contents],
    added: tuple[str, ...] = (),
) -> PreparedDataset:
    """Open or write a folder derived from ``dataset``, with its splits and the ``added`` splits.

    Datasets with the same rows may number classes, groups and clients differently, so the key
    contains the description.
    """
    parent = f"{dataset.fingerprint}\n{dataset.info!r}\n{key}"
    return prepared(cache, step, dataset.info.name, parent, (*dataset.split_names, *added), make)
