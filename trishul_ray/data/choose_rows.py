"""Derive datasets from prepared rows: unseen groups, held-out rows, encoded rows."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trishul_ray.data.cache import Contents, derived
from trishul_ray.data.dataset import (
    Column,
    PreparedDataset,
    ProgressCallback,
    Split,
    join,
    take_rows,
)
from trishul_ray.data.partition import draw_held_out
from trishul_ray.data.user.cleaning import SCORED
from trishul_ray.errors import InputError, did_you_mean, join_limited

if TYPE_CHECKING:
    from trishul_ray.config.fields import DataConfig


def choose_rows(dataset: PreparedDataset, config: "DataConfig", *, cache: Path) -> PreparedDataset:
    """Select the training, test and validation rows that the section ``data`` defines.

    All training rows of ``test_groups`` become test rows, after the existing ones.

    Raises:
        InputError: A group is unknown, no training rows remain, or the rows are not instructions.
    """
    info, train, groups = dataset.info, dataset.train, config.test_groups
    field = f"data.test_groups={','.join(groups)}"
    if unknown := sorted({*groups} - {*info.groups}):
        known = join_limited(info.groups, 8) if info.groups else "none"
        hint = did_you_mean(unknown[0], info.groups)
        raise InputError(
            f"{field}: {unknown[0]!r} is not a group of dataset {info.name}; it has {known}{hint}"
        )
    if groups and (missing := {"group", *dataset.test.columns} - {*train.columns}):
        raise InputError(
            f"{field}: the training rows of dataset {info.name} have no column {min(missing)}"
        )
    if config.drop_repeated and info.kind != "instruction":
        raise InputError(f"data.drop_repeated requires instructions, not dataset {info.name}")

    def divide() -> Contents:
        columns = {name: dataset.split(name).read() for name in dataset.split_names}
        kept, notes = np.ones(len(train), dtype=bool), list(info.origin.notes)
        if groups:
            kept = ~np.isin(train.column("group"), [info.groups.index(group) for group in groups])
            unseen = take_rows(columns["train"], np.flatnonzero(~kept))
            test = [columns["test"], {name: unseen[name] for name in columns["test"]}]
            columns["test"] = join(test)
        if config.drop_repeated:
            repeated = find_repeated(columns["train"], columns["test"]) & kept
            notes.append(f"{repeated.sum():,} training rows skipped that are also test rows")
            kept &= ~repeated
        if not kept.any():
            raise InputError(f"{field}: no training rows of dataset {info.name} remain")
        columns["train"] = take_rows(columns["train"], np.flatnonzero(kept))
        return replace(info, origin=replace(info.origin, notes=tuple(notes))), columns

    if groups or config.drop_repeated:
        key = json.dumps([sorted(groups), config.drop_repeated])
        dataset = derived(cache, "chosen", dataset, key, divide)
    return hold_out(dataset, config.validation_share, cache=cache)


def find_repeated(train: Mapping[str, Column], test: Mapping[str, Column]) -> np.ndarray:
    """Return which training rows have the texts or token ids of a test row, bool [N]."""

    def keys(rows: Mapping[str, Column]) -> Iterator[Any]:
        if {"input_ids", "length"} <= {*rows}:
            pairs = zip(rows["input_ids"], rows["length"].tolist(), strict=True)
            return (ids[:length].tobytes() for ids, length in pairs)
        columns = [rows[name] for name in sorted(rows) if name not in SCORED]
        texts = [column.to_pylist() for column in columns if not isinstance(column, np.ndarray)]
        return zip(*texts, strict=True)

    tested = set(keys(test))
    return np.array([key in tested for key in keys(train)])


def hold_out(dataset: PreparedDataset, share: float, *, cache: Path) -> PreparedDataset:
    """Move a fraction ``share`` of the training rows to the split ``validation``.

    The sampled rows depend only on the data (:func:`~trishul_ray.data.partition.draw_held_out`).
    They are equal fractions of every client if the rows have a client column, otherwise of every
    class or sub-dataset. Rows with the same inputs are held out together. With a fraction of 0, the
    dataset is returned unchanged.

    Raises:
        InputError: There are too few rows.
    """
    if not share:
        return dataset
    info, train = dataset.info, dataset.train

    def divide() -> Contents:
        names = [name for name in ("client", "label", "group") if name in train.columns]
        strata = train.column(names[0]) if names else np.zeros(len(train), np.int64)
        held = draw_held_out(_number_inputs(train), strata, share, train.fingerprint)
        if not held.any():
            raise InputError(
                f"data.validation_share={share} of {len(train)} training rows selects no row; set "
                "a larger share"
            )
        columns = {name: dataset.split(name).read() for name in dataset.split_names}
        for name, rows in (("validation", held), ("train", ~held)):
            columns[name] = take_rows(train.read(), np.flatnonzero(rows))
        return info, columns

    return derived(cache, "validation", dataset, repr(share), divide, ("validation",))


def _number_inputs(split: Split) -> np.ndarray:
    """Number the distinct inputs of a split; rows with equal inputs have equal numbers [N]."""
    if split.info.kind == "image":
        keys = [hashlib.sha256(row).digest() for row in split.column("pixels")]
        return np.unique(np.array(keys), return_inverse=True)[1]
    fields = split.info.fields or ("question", "context")
    columns = [split.texts(name).dictionary_encode().indices.to_numpy() for name in fields]
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


class Encoder(Protocol):
    """Converts the texts of a split into numeric columns."""

    @property
    def key(self) -> str:
        """Text that changes whenever an encoded number may change: tokenizer, lengths, prompt."""

    def encode(self, split: Split, progress: Callable[[float], None]) -> Mapping[str, np.ndarray]:
        """Encode the texts as numeric columns [N, ...]."""


def encode(
    dataset: PreparedDataset,
    encoder: Encoder,
    *,
    cache: Path,
    progress: ProgressCallback | None = None,
) -> PreparedDataset:
    """Encode the texts of a dataset, or open the encoded rows of an earlier call.

    The columns ``label``, ``group`` and ``client`` are copied. See
    :func:`~trishul_ray.data.prepare.prepare` for ``cache`` and ``progress``.
    """
    info, splits = dataset.info, dataset.split_names

    def encoded(name: str) -> dict[str, Column]:
        def report(done: float) -> None:
            if progress is not None:
                progress(f"encoding {info.name} {name}", done)

        split = dataset.split(name)
        kept = [c for c in ("label", "group", "client") if c in split.columns]
        copied: dict[str, Column] = {column: np.array(split.column(column)) for column in kept}
        return {**encoder.encode(split, report), **copied}

    def encode_splits() -> Contents:
        return info, {name: encoded(name) for name in splits}

    return derived(cache, "encoded", dataset, encoder.key, encode_splits)
