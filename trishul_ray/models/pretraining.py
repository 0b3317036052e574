"""Pretrain the built-in image models centrally: a plain training loop inside a Ray Train job.

The recipe and its dataset determine the weights: initial values, batch order and thread count are
fixed, so a rerun writes the same bytes. The models train on a split of the digits that belongs to
no client.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageClassification

from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.dataset import DatasetInfo, ProgressCallback, Split
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError, RunError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BUILTINS, Builtin, Recipe
from trishul_ray.models.find_model import quiet_transformers
from trishul_ray.models.weights import seeded
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.storage.integrity import make_once

#: A batch: inputs and labels, keyed by name.
Batch = dict[str, Tensor]


def needs_pretraining(backbone: Backbone) -> bool:
    """Return whether the pretrained weights of a built-in are missing in the cache."""
    builtin = BUILTINS.get(backbone.name)
    if builtin is None or backbone.config.init != "pretrained":
        return False
    return not builtin.folder(backbone.paths.cache).is_dir()


def ensure_pretrained(
    backbone: Backbone, progress: ProgressCallback | None = None, *, on_ray: bool = True
) -> None:
    """Pretrain a backbone if it :func:`needs_pretraining`.

    Two processes that call this at the same time train only once. The caller must have initialized
    Ray. With ``on_ray=False`` the same loop runs in this process and writes the same bytes: for
    inline runs, and for actors on another node, which must not request resources.

    Raises:
        InputError: The backbone is a text model, which has no pretrained weights.
        RunError: The training failed.
    """
    if not needs_pretraining(backbone):
        return
    builtin, paths = BUILTINS[backbone.name], backbone.paths
    recipe = recipe_of(builtin)

    def make(new: Path) -> None:
        split = _training_split(recipe, paths, progress)
        if progress is not None:
            progress(f"pretraining {builtin.name}", 0.0)
        train = _train_on_ray if on_ray else _train_here
        save_backbone(train(builtin, paths), builtin, split, new)

    make_once(paths.cache, builtin.place, make)


def recipe_of(builtin: Builtin) -> Recipe:
    """Return the recipe of a built-in; raise an InputError for text models, which have none."""
    if builtin.recipe is None:
        raise InputError(
            f"model.name={builtin.name!r} has no pretrained weights; set model.init=random"
        )
    return builtin.recipe


def new_backbone(builtin: Builtin) -> nn.Module:
    """Create the untrained image model, with weights drawn from seed 0."""
    with quiet_transformers(), seeded(0):
        model: nn.Module = AutoModelForImageClassification.from_config(builtin.config())
    return model


def train_backbone(builtin: Builtin, split: Split) -> nn.Module:
    """Train a built-in on a split in this process, on one CPU thread, and set eval mode.

    The result has the same bytes on every call.
    """
    recipe, model = recipe_of(builtin), new_backbone(builtin)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Sums over threads would depend on their number.
    try:
        model.train()
        for epoch in range(recipe.epochs):
            for batch in image_batches(builtin, split, epoch):
                logits = model(pixel_values=batch["pixel_values"]).logits
                loss = F.cross_entropy(logits, batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def image_batches(builtin: Builtin, split: Split, epoch: int) -> Iterator[Batch]:
    """Yield all rows of gray images once, in a new order, converted for the model."""
    recipe, shape = recipe_of(builtin), builtin.architecture
    channels, size = shape["num_channels"], shape["image_size"]
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in image_statistics(builtin, split.info))
    order = numpy_rng(recipe.seed, "pretrain-batches", epoch).permutation(len(split))
    for start in range(0, len(order), recipe.batch_size):
        rows = split.batch(order[start : start + recipe.batch_size])
        images = rows["pixels"].float().div_(255).expand(-1, channels, -1, -1)
        if images.shape[-1] != size:
            images = F.interpolate(
                images, size=(size, size), mode="bilinear", align_corners=False, antialias=True
            )
        yield {"pixel_values": (images - mean) / std, "labels": rows["label"]}


def image_statistics(
    builtin: Builtin, info: DatasetInfo
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of a dataset's gray pixels, for each channel of the model."""
    channels = builtin.architecture["num_channels"]
    return info.mean * channels, info.std * channels


def save_backbone(model: nn.Module, builtin: Builtin, split: Split, folder: Path) -> None:
    """Write a trained built-in with its preprocessor, for use as ``model=FOLDER``.

    The statistics of the training split normalize images.
    """
    (mean, std), size = image_statistics(builtin, split.info), builtin.architecture["image_size"]
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True, "size": {"height": size, "width": size},
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": list(mean), "image_std": list(std),
    }  # fmt: skip
    with quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]  # a transformers model
    text = json.dumps(processor, indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")


def _training_split(
    recipe: Recipe, paths: StoragePaths, progress: ProgressCallback | None = None
) -> Split:
    dataset = prepare(recipe.dataset, cache=paths.cache, hub=paths.hub, progress=progress)
    return dataset.split(recipe.split)


def _train_here(builtin: Builtin, paths: StoragePaths) -> nn.Module:
    return train_backbone(builtin, _training_split(recipe_of(builtin), paths))


def _train_on_ray(builtin: Builtin, paths: StoragePaths) -> nn.Module:
    """Train in a TorchTrainer with one worker."""
    # Import here: every client imports this file, and Ray Train takes seconds.
    from ray.train import LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    def train() -> dict[str, np.ndarray]:
        model = _train_here(builtin, paths)
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    with scratch_folder("train", paths.cache) as storage:
        trainer = TorchTrainer(
            train,  # type: ignore[arg-type]  # may return a value since Ray Train 2
            scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
            run_config=RunConfig(
                name=f"pretrain-{builtin.name}",
                storage_path=storage,
                logging_config=LoggingConfig(log_level="ERROR"),  # type: ignore[call-arg]  # as above
            ),
        )
        try:
            result = trainer.fit()
        except TrainingFailedError as error:
            raise RunError(
                f"pretraining {builtin.name} failed: {error}. Nothing was stored; repeat the "
                "command to try again"
            ) from error
    arrays: dict[str, np.ndarray] = result.return_value  # type: ignore[attr-defined]  # as above
    model = new_backbone(builtin)
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    return model
