"""From texts to the fixed-size numbers a task trains on, prepared once and memory-mapped.

An encoded dataset lies beside the raw one in the cache, under a key of the raw rows' fingerprint
and of everything in the encoder that decides a number.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from trishul_ray.data.base import PreparedDataset, Split
from trishul_ray.data.info import DatasetInfo
from trishul_ray.data.sources import in_cache

#: ``progress(stage, fraction)``.
Progress = Callable[[str, float], None]


class Encoder(Protocol):
    """Turns a split's texts into columns of numbers."""

    @property
    def key(self) -> str:
        """Text that changes whenever an encoded number may: tokenizer, lengths, prompt."""
        ...

    def encode(self, split: Split, progress: Callable[[float], None]) -> Mapping[str, np.ndarray]:
        """Columns [N, ...] of numbers; ``label``, ``group`` and ``client`` are carried over."""
        ...


def encode(
    dataset: PreparedDataset,
    encoder: Encoder,
    *,
    cache: Path,
    progress: Progress | None = None,
) -> PreparedDataset:
    """``dataset`` as ``encoder`` sees it; see the module.

    Args:
        dataset: with columns of texts.
        encoder: of the task that will train on it.
        cache: folder for prepared files.
        progress: told of the stage and the fraction done.
    """
    info, splits = dataset.info, dataset.split_names

    def read() -> tuple[DatasetInfo, dict[str, dict[str, np.ndarray]]]:
        columns = {}
        for name in splits:
            split = dataset.split(name)

            def tell(done: float, name: str = name) -> None:
                if progress is not None:
                    progress(f"encoding {info.name} {name}", done)

            columns[name] = dict(encoder.encode(split, tell)) | {
                column: np.array(split.column(column))
                for column in ("label", "group", "client")
                if column in split.columns
            }
        return info, columns

    key = f"{dataset.fingerprint}\n{encoder.key}"
    return in_cache(cache, f"{info.name}-encoded", key, splits, read)
