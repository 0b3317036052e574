"""Pretrain the built-in image models centrally: a plain training loop inside a Ray Train job.

The recipe and its dataset determine the weights: initial values, batch order and thread count are
fixed, so a rerun writes the same bytes. The models train on a split of the digits that no client
holds.
"""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from trishul_ray.config.places import Places
from trishul_ray.data.dataset import DatasetInfo, ProgressCallback, Split
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError, RunError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BUILTINS, Builtin, ModelType, Recipe
from trishul_ray.models.find_model import quiet_transformers
from trishul_ray.models.weights import seeded
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.storage.durable import make_cache_folder, scratch_folder
from trishul_ray.storage.integrity import sealed_folder

# The auto class of transformers for each type of model; they have no types.
_AUTO_CLASSES: dict[ModelType, Any] = {
    "vit": AutoModelForImageClassification,
    "bert": AutoModelForMaskedLM,
    "llama": AutoModelForCausalLM,
    "t5": AutoModelForSeq2SeqLM,
}

#: A batch: its inputs and labels by name.
Batch = dict[str, Tensor]


def new_backbone(builtin: Builtin) -> nn.Module:
    """Return the untrained built-in, with weights drawn from the seed 0."""
    with quiet_transformers(), seeded(0):
        model: nn.Module = _AUTO_CLASSES[builtin.model_type].from_config(builtin.config())
    return model


def recipe_of(builtin: Builtin) -> Recipe:
    """Return how a built-in is pretrained; a text model, which has no recipe, is an InputError."""
    if builtin.recipe is None:
        raise InputError(
            f"model.name={builtin.name!r} has no pretrained weights; set model.init=random"
        )
    return builtin.recipe


def train_backbone(
    builtin: Builtin, split: Split, *, on_epoch: Callable[[int, float], None] | None = None
) -> nn.Module:
    """Return a built-in trained on a split in this process, on one CPU thread, in eval mode.

    It has the same bytes on every call. ``on_epoch`` is called after each epoch with the number of
    epochs done and the mean loss.
    """
    recipe, model = recipe_of(builtin), new_backbone(builtin)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over threads would depend on their number
    try:
        model.train()
        for epoch in range(recipe.epochs):
            losses: list[float] = []
            for batch in image_batches(builtin, split, epoch):
                logits = model(pixel_values=batch["pixel_values"]).logits
                loss = F.cross_entropy(logits, batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            if on_epoch is not None:
                on_epoch(epoch + 1, float(np.mean(losses)))
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def image_batches(builtin: Builtin, split: Split, epoch: int) -> Iterator[Batch]:
    """Yield all rows of gray images once, in a new order, as the model takes them."""
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
    """Write a trained built-in with its preprocessor, which ``model=FOLDER`` can use.

    The statistics of the split it was trained on normalize images. The folder appears when it
    is complete.
    """
    (mean, std), size = image_statistics(builtin, split.info), builtin.architecture["image_size"]
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True, "size": {"height": size, "width": size},
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": list(mean), "image_std": list(std),
    }  # fmt: skip
    with sealed_folder(folder) as temporary:
        with quiet_transformers():
            model.save_pretrained(temporary)  # type: ignore[operator]  # a transformers model
        text = json.dumps(processor, indent=2) + "\n"
        (temporary / "preprocessor_config.json").write_text(text, encoding="utf-8")


def pretrain(
    builtin: Builtin,
    places: Places,
    *,
    progress: ProgressCallback | None = None,
    on_ray: bool = True,
) -> Path:
    """Return the folder of a pretrained built-in, training it first if it is not in the cache.

    Two processes that call this at the same time train once. The caller must have initialized Ray.
    With ``on_ray=False`` the same loop runs in this process and writes the same bytes. Inline runs
    use this, and so do actors on another node, which must not request resources of their own.
    ``progress`` is called with the stage and the fraction done.

    Raises:
        InputError: The backbone is a text model, which has no pretrained weights.
        RunError: The training failed.
    """
    folder, recipe = builtin.folder(places.cache), recipe_of(builtin)
    make_cache_folder(folder.parent)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            split = _training_split(builtin, places, progress)

            def on_epoch(epoch: int, loss: float) -> None:
                if progress is not None:
                    stage = f"pretraining {builtin.name}, loss {loss:.3f}"
                    progress(stage, epoch / recipe.epochs)

            if on_ray:
                model = _train_on_ray(builtin, places, on_epoch)
            else:
                model = train_backbone(builtin, split, on_epoch=on_epoch)
            save_backbone(model, builtin, split, folder)
    return folder


def needs_pretraining(backbone: Backbone) -> bool:
    """Return whether a backbone is a built-in that is needed pretrained and is not yet."""
    builtin = BUILTINS.get(backbone.name)
    if builtin is None or backbone.config.init != "pretrained":
        return False
    return not builtin.folder(backbone.places.cache).is_dir()


def ensure_pretrained(
    backbone: Backbone, progress: ProgressCallback | None = None, *, on_ray: bool = True
) -> None:
    """:func:`pretrain` a backbone if it :func:`needs_pretraining`.

    Raises:
        InputError: The backbone is a text model, which has no pretrained weights.
    """
    if not needs_pretraining(backbone):
        return
    pretrain(BUILTINS[backbone.name], backbone.places, progress=progress, on_ray=on_ray)


def _training_split(
    builtin: Builtin, places: Places, progress: ProgressCallback | None = None
) -> Split:
    recipe = recipe_of(builtin)
    dataset = prepare(recipe.dataset, cache=places.cache, hub=places.hub, progress=progress)
    return dataset.split(recipe.split)


def _train_on_ray(
    builtin: Builtin, places: Places, on_epoch: Callable[[int, float], None]
) -> nn.Module:
    """Call :func:`train_backbone` in a TorchTrainer with one worker."""
    # Every client imports this file: it need not import Ray Train, which takes seconds.
    from ray.train import LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer
    from ray.util.queue import Queue

    queue = Queue(actor_options={"num_cpus": 0})  # reports of Ray Train are polled for seconds

    def train() -> dict[str, np.ndarray]:
        split = _training_split(builtin, places)
        model = train_backbone(builtin, split, on_epoch=lambda *done: queue.put(done))
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def forward() -> None:
        while (done := queue.get()) is not None:
            on_epoch(*done)

    forwarder = threading.Thread(target=forward, daemon=True)
    with scratch_folder("train", places.cache) as storage:
        trainer = TorchTrainer(
            train,  # type: ignore[arg-type]  # may return a value since Ray Train 2
            scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
            run_config=RunConfig(
                name=f"pretrain-{builtin.name}",
                storage_path=storage,
                logging_config=LoggingConfig(log_level="ERROR"),  # type: ignore[call-arg]  # as above
            ),
        )
        forwarder.start()
        try:
            result = trainer.fit()
        except TrainingFailedError as error:
            raise RunError(
                f"pretraining {builtin.name} failed: {error}. Nothing was kept; `trishul "
                f"pretrain {builtin.name}` tries again"
            ) from error
        finally:
            queue.put(None)
            forwarder.join()
            queue.shutdown()
    arrays: dict[str, np.ndarray] = result.return_value  # type: ignore[attr-defined]  # as above
    model = new_backbone(builtin)
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    return model
