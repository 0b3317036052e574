"""The experiments that are timed: a small ViT and ViT-B/16, on real or on synthetic images."""

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
from trishul_ray.rng import numpy_rng

SMALL = "trishul/vit-cifar10-128x6"
LARGE = "google/vit-base-patch16-224-in21k"
#: Rows and classes of the synthetic stand-in: those of the small CIFAR-100 mirror.
ROWS = {"train": 10_000, "test": 2_000}
CLASSES = 100


@dataclass(frozen=True)
class Setup:
    """One experiment, with the data it runs on."""

    label: str
    experiment: Experiment
    prepared: Prepared


def small(scratch: Path, data: str, overrides: Sequence[str] = ()) -> Setup:
    """ViT of width 128 with 6 blocks, budget 8 (4 heads of rank 22), 32x32 images."""
    base = load_experiment(None, ["dataset=cifar100"]).storage.places
    if base.hub is not None and (base.hub / SMALL).is_dir():
        label, model = SMALL, [f"model={SMALL}"]
    else:
        folder = scratch / "vit-128x6-random"
        ViTConfig(
            hidden_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=512,
            image_size=32,
            patch_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ).save_pretrained(folder)
        label, model = "ViT 128x6, random weights", [f"model={folder}", "model.init=random"]
    return _setup(label, scratch, data, [*model, "budget=8", *overrides])


def large(scratch: Path, data: str, overrides: Sequence[str] = ()) -> Setup:
    """ViT-B/16 at 224x224 with random weights, lower budget (4 heads of rank 110 on q and v)."""
    chosen = [f"model={LARGE}", "model.init=random", "budget=lower", *overrides]
    return _setup("ViT-B/16, random weights", scratch, data, chosen)


def _setup(label: str, scratch: Path, data: str, overrides: Sequence[str]) -> Setup:
    common = [
        "dataset=cifar100",
        "tracking.mlflow=false",
        f"storage.runs={scratch / 'runs'}",
        *overrides,
    ]
    if data == "synthetic":
        common.append("dataset=synthetic")
    experiment = load_experiment(None, common)
    if data != "synthetic":
        return Setup(f"{label}, {data}", experiment, prepare_run(experiment))
    dataset = synthetic(scratch / "synthetic")
    fed = experiment.federation
    shards = partition(dataset.train.labels, experiment.partition, fed.clients, experiment.seed)
    return Setup(f"{label}, synthetic images", experiment, Prepared(dataset, shards))


def synthetic(folder: Path, rows: Mapping[str, int] = ROWS) -> PreparedDataset:
    """Noise of CIFAR-100's shape with random labels: good for timing, never for accuracy."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = numpy_rng(0, "synthetic-images")
    info = DatasetInfo(
        name="synthetic",
        kind="image",
        classes=tuple(str(label) for label in range(CLASSES)),
        image_shape=(3, 32, 32),
        mean=(0.5, 0.5, 0.5),
        std=(0.29, 0.29, 0.29),
        source="noise drawn by the benchmark",
    )
    for split, count in rows.items():
        columns = {
            "pixels": rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8),
            "label": rng.permutation(np.arange(count, dtype=np.int64) % CLASSES),
        }
        write_split(folder / f"{split}.arrow", columns, info)
    return PreparedDataset(folder, tuple(rows))


def has_real_data() -> bool:
    """Whether a mirror with CIFAR-100 is set (storage.hub or TRISHUL_HUB)."""
    hub = load_experiment(None, ["dataset=cifar100"]).storage.places.hub
    return hub is not None and (hub / "uoft-cs" / "cifar100").is_dir()
