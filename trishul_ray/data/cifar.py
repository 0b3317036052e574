"""CIFAR-10 and CIFAR-100 in the hub's parquet layout, from a local mirror or the hub itself.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trishul_ray.data.base import DatasetInfo
from trishul_ray.data.pixels import MODE_CHANNELS, decode_images, pixel_statistics, read_labels
from trishul_ray.errors import CorruptFileError, InputError


@dataclass(frozen=True)
class HubImages:
    """An image classification dataset stored as ``<hub>/<repo>/<config>/<split>-*.parquet``.

    Attributes:
        name: name in the registry.
        description: one line for people.
        repo: the dataset's name on the hub, owner/name.
        config: the configuration's name, which is the folder of its files.
        label: label column.
        classes: number of classes.
        image: image column, structs {bytes, path}.
        mode: Pillow mode of every image.
        size: (height, width) of every image.
        splits: splits to prepare.
    """

    name: str
    description: str
    repo: str
    config: str
    label: str
    classes: int
    image: str = "img"
    mode: str = "RGB"
    size: tuple[int, int] = (32, 32)
    splits: tuple[str, ...] = ("train", "test")

    def key(self, hub: Path | None) -> str:
        """What decides the rows, beside the format: the mirror's files, or the hub's name."""
        files = self._mirrored(hub)
        if files is None:
            return f"hub:{self.repo}/{self.config}"
        found = [file.resolve() for split in self.splits for file in files[split]]
        return json.dumps([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in found])

    def read(
        self, hub: Path | None, progress: Callable[[str, float], None]
    ) -> tuple[DatasetInfo, Mapping[str, Mapping[str, np.ndarray]]]:
        """Rows of every split: ``pixels`` uint8 [N, C, H, W] and ``label`` int64 [N].

        Raises:
            CorruptFileError: a file or row is not as it should be; names file, row and fault.
            InputError: neither the mirror nor the hub has the dataset.
        """
        files = self._mirrored(hub)
        columns: dict[str, dict[str, np.ndarray]] = {}
        names: tuple[str, ...] = tuple(str(label) for label in range(self.classes))
        for split in self.splits:
            if files is None:
                tables = [(f"hub dataset {self.repo}, split {split}", self._download(split, hub))]
            else:
                tables = [(str(file), _read_parquet(file)) for file in files[split]]
            parts = [self._decode(table, where, split, progress) for where, table in tables]
            columns[split] = {
                name: np.concatenate([part[name] for part in parts]) for name in parts[0]
            }
            if not len(columns[split]["label"]):
                raise CorruptFileError(f"{tables[0][0]}: the {split} split has no rows")
            names = _class_names(tables[0][1], self.label, self.classes) or names
        mean, std = pixel_statistics(columns[self.splits[0]]["pixels"])
        info = DatasetInfo(
            name=self.name,
            classes=names,
            image_shape=(MODE_CHANNELS[self.mode], *self.size),
            mean=mean,
            std=std,
            source=f"hub:{self.repo}" if files is None else f"mirror:{self.repo}",
        )
        return info, columns

    def _mirrored(self, hub: Path | None) -> dict[str, list[Path]] | None:
        """Files of every split in the mirror, or None where the mirror lacks the dataset."""
        if hub is None or not (hub / self.repo).is_dir():
            return None
        folder = hub / self.repo / self.config
        files = {split: sorted(folder.glob(f"{split}-*.parquet")) for split in self.splits}
        for split, found in files.items():
            if not found:
                raise InputError(f"mirror {folder} lacks {split}-*.parquet of {self.repo}")
        return files

    def _decode(
        self, table: pa.Table, where: str, split: str, progress: Callable[[str, float], None]
    ) -> dict[str, np.ndarray]:
        label = read_labels(table, self.label, self.classes, where)
        stage = f"{self.name} {split}"
        pixels = decode_images(
            table, self.image, self.mode, self.size, where, lambda done: progress(stage, done)
        )
        return {"pixels": pixels, "label": label}

    def _download(self, split: str, hub: Path | None) -> pa.Table:
        """The split from the hub (or from its own offline cache), images still encoded."""
        import datasets  # seconds to import: only where the hub is asked
        from huggingface_hub.errors import HfHubHTTPError

        try:
            loaded = datasets.load_dataset(self.repo, self.config, split=split)
        except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
            looked = f"mirror {hub} does not hold it" if hub else "no mirror is set"
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"dataset {self.name} ({self.repo}) not found: {looked} (storage.hub or "
                f"TRISHUL_HUB), and the Hugging Face hub did not give it: {reason}"
            ) from error
        return loaded.cast_column(self.image, datasets.Image(decode=False)).data.table


def _read_parquet(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CorruptFileError(f"{file}: not a readable parquet file ({reason})") from error


def _class_names(table: pa.Table, column: str, classes: int) -> tuple[str, ...] | None:
    """Class names from the Hugging Face metadata of a table, where it carries them."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = tuple(str(name) for name in features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return None
    return names if len(names) == classes else None


CIFAR100 = HubImages(
    name="cifar100",
    description="32x32 color photos, 100 classes, 50,000 train / 10,000 test",
    repo="uoft-cs/cifar100",
    config="cifar100",
    label="fine_label",
    classes=100,
)

CIFAR10 = HubImages(
    name="cifar10",
    description="32x32 color photos, 10 classes, 50,000 train / 10,000 test",
    repo="uoft-cs/cifar10",
    config="plain_text",
    label="label",
    classes=10,
)
