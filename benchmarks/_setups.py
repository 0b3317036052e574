"""Define the experiments to measure: a small ViT and ViT-B/16, on real or synthetic images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import ViTConfig

from trishul_ray.data.dataset import DatasetInfo, PreparedDataset, write_split
from trishul_ray.data.partition import partition
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.prepare import Prepared, prepare_run
from trishul_ray.runtime.random_streams import numpy_rng

SMALL = "trishul/vit-cifar10-128x6"
LARGE = "google/vit-base-patch16-224-in21k"
#: Rows and classes of the synthetic data, equal to the small CIFAR-100 mirror.
ROWS = {"train": 10_000, "test": 2_000}
CLASSES = 100


@dataclass(frozen=True)
class Setup:
    """An experiment with its data."""

    label: str
    experiment: Experiment
    prepared: Prepared


def small(scratch: Path, data: str, overrides: Sequence[str] = ()) -> Setup:
    """Set up a ViT of width 128 with 6 blocks, budget 8 (4 heads of rank 22), 32x32 images."""
    base = load_experiment(None, ["dataset=cifar100"]).storage.paths
    if base.hub is not None and (base.hub / SMALL).is_dir():
        label, model = SMALL, [f"model={SMALL}"]
    else:
        folder = random_vit(scratch / "vit-128x6-random", 128, 6, 4)
        label, model = "ViT 128x6, random weights", [f"model={folder}", "model.init=random"]
    return _setup(label, scratch, data, [*model, "budget=8", *overrides])


def large(scratch: Path, data: str, overrides: Sequence[str] = ()) -> Setup:
    """Set up ViT-B/16 at 224x224, random weights, lower budget (4 heads of rank 110 on q and v)."""
    chosen = [f"model={LARGE}", "model.init=random", "budget=lower", *overrides]
    return _setup("ViT-B/16, random weights", scratch, data, chosen)


def random_vit(folder: Path, width: int, blocks: int, heads: int, patch: int = 4) -> Path:
    """Write the configuration of a ViT for 32x32 images without dropout, and return its folder."""
    ViTConfig(
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=32,
        patch_size=patch,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ).save_pretrained(folder)
    return folder


def _setup(label: str, scratch: Path, data: str, overrides: Sequence[str]) -> Setup:
    common = [
        "dataset=cifar100",
        "tracking.mlflow=false",
        f"storage.runs={scratch / 'runs'}",
        *overrides,
    ]
    if data != "synthetic":
        experiment = load_experiment(None, common)
        return Setup(f"{label}, {data}", experiment, prepare_run(experiment))
    experiment = load_experiment(None, [*common, "dataset=synthetic"])
    # Every client needs at least one row.
    rows = ROWS | {"train": max(ROWS["train"], experiment.federation.clients)}
    prepared = dealt(experiment, synthetic(scratch / "synthetic", rows))
    return Setup(f"{label}, synthetic images", experiment, prepared)


def small_on_noise(
    scratch: Path, width: int, blocks: int, overrides: Sequence[str], patch: int = 4
) -> Setup:
    """Set up a ViT with random weights and attention heads of width 64, on synthetic images."""
    folder = random_vit(scratch / "vit", width, blocks, width // 64, patch)
    chosen = [f"model={folder}", "model.init=random", *overrides]
    return _setup(f"ViT {width}x{blocks}", scratch, "synthetic", chosen)


def dealt(experiment: Experiment, dataset: PreparedDataset) -> Prepared:
    clients, labels = experiment.federation.clients, dataset.train.labels
    return Prepared(dataset, partition(labels, experiment.partition, clients, experiment.seed))


def synthetic(folder: Path, rows: Mapping[str, int] = ROWS) -> PreparedDataset:
    """Write noise in the shape of CIFAR-100 with random labels, for timing only."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = numpy_rng(0, "synthetic-images")
    info = DatasetInfo(
        name="synthetic",
        kind="image",
        classes=tuple(str(label) for label in range(CLASSES)),
        image_shape=(3, 32, 32),
        mean=(0.5, 0.5, 0.5),
        std=(0.29, 0.29, 0.29),
    )
    for split, count in rows.items():
        columns = {
            "pixels": rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8),
            "label": rng.permutation(np.arange(count, dtype=np.int64) % CLASSES),
        }
        write_split(folder / f"{split}.arrow", columns, info)
    return PreparedDataset(folder, tuple(rows))


def has_real_data() -> bool:
    """Return whether a mirror with CIFAR-100 is configured (storage.hub or TRISHUL_HUB)."""
    hub = load_experiment(None, ["dataset=cifar100"]).storage.paths.hub
    return hub is not None and (hub / "uoft-cs" / "cifar100").is_dir()
