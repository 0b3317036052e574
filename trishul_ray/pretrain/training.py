"""Pretrain the built-in backbones centrally: a plain training loop inside a Ray Train job.

The weights are a function of the recipe and its dataset alone. Initial values, batch order and
thread count are fixed, so a rerun writes the same bytes. The image model trains on a split of the
digits that no client holds. Text models read the raw training texts of a dataset, never a label.
"""

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from torch import nn

from trishul_ray.data.dataset import ProgressCallback, Split
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError, RunError
from trishul_ray.files import complete_folder, make_cache_folder
from trishul_ray.models.builtin import BUILTINS, Builtin
from trishul_ray.models.lookup import quiet_transformers
from trishul_ray.models.tokenizers import byte_tokenizer
from trishul_ray.pretrain.objectives import (
    classification_task,
    new_backbone,
    pretraining_task,
    text_objective,
)

if TYPE_CHECKING:
    from trishul_ray.config import Places
    from trishul_ray.models.backbone import Backbone


def train_backbone(
    builtin: Builtin, split: Split, *, on_epoch: Callable[[int, float], None] | None = None
) -> nn.Module:
    """Return a built-in trained on a split in this process, on one CPU thread, in eval mode.

    It has the same bytes on every call. ``on_epoch`` is called after each epoch with the number of
    epochs done and the mean loss.
    """
    recipe, task, model = builtin.recipe, pretraining_task(builtin, split), new_backbone(builtin)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    total_steps = recipe.epochs * task.batches_per_epoch
    config: Any = model.config
    use_cache = getattr(config, "use_cache", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over threads would depend on their number
    try:
        if use_cache is not None:
            config.use_cache = False  # not needed in training
        model.train()
        for epoch in range(recipe.epochs):
            losses: list[float] = []
            for step, batch in enumerate(task.batches(epoch)):
                loss = task.loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                if task.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), task.max_grad_norm)
                progress = (epoch * task.batches_per_epoch + step + 1) / (total_steps + 1)
                optimizer.param_groups[0]["lr"] = recipe.lr * task.lr_factor(progress)
                optimizer.step()
                losses.append(float(loss.detach()))
            if on_epoch is not None:
                on_epoch(epoch + 1, float(np.mean(losses)))
    finally:
        torch.set_num_threads(threads)
        if use_cache is not None:
            config.use_cache = use_cache
    return model.eval()


def save_backbone(model: nn.Module, builtin: Builtin, split: Split, folder: Path) -> None:
    """Write a trained built-in with its tokenizer or preprocessor, which ``model=FOLDER`` can use.

    The statistics of the split it was trained on normalize images. The folder appears when it
    is complete.
    """
    with complete_folder(folder) as temporary:
        with quiet_transformers():
            model.save_pretrained(temporary)  # type: ignore[operator]  # a transformers model
            if text_objective(builtin) is not None:
                byte_tokenizer(builtin.model_type).save_pretrained(temporary)
        if text_objective(builtin) is None:
            task = classification_task(builtin, split)
            processor = {
                "image_processor_type": "ViTImageProcessor",
                "do_resize": True, "size": {"height": task.image_size, "width": task.image_size},
                "do_rescale": True, "rescale_factor": 1 / 255,
                "do_normalize": True, "image_mean": list(task.mean), "image_std": list(task.std),
            }  # fmt: skip
            text = json.dumps(processor, indent=2) + "\n"
            (temporary / "preprocessor_config.json").write_text(text, encoding="utf-8")


def get_builtin(name: str, dataset: str | None = None) -> Builtin:
    """Return the built-in ``name``, with another dataset in its recipe if one is given.

    Raises:
        InputError: There is no such built-in, or it is an image model, which has only one dataset.
    """
    builtin = BUILTINS.get(name)
    if builtin is None:
        raise InputError(f"{name!r} is not a built-in backbone; built-in are {', '.join(BUILTINS)}")
    if dataset is None or dataset == builtin.recipe.dataset:
        return builtin
    if text_objective(builtin) is None:
        raise InputError(f"{name} is pretrained on {builtin.recipe.dataset} alone, not {dataset}")
    return builtin.trained_on(dataset)


def pretrain(
    builtin: Builtin,
    places: "Places",
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
        InputError: The dataset is not available.
        RunError: The training failed.
    """
    folder = builtin.folder(places.cache)
    make_cache_folder(folder.parent)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            split = _training_split(builtin, places, progress)
            if on_ray:
                arrays = _train_on_ray(builtin, places, progress)
                model = new_backbone(builtin)
                model.load_state_dict({key: torch.tensor(a) for key, a in arrays.items()})
            else:
                model = train_backbone(builtin, split, on_epoch=_on_epoch(builtin, progress))
            save_backbone(model, builtin, split, folder)
    return folder


def ensure_pretrained(
    backbone: "Backbone", progress: ProgressCallback | None = None, *, on_ray: bool = True
) -> None:
    """:func:`pretrain` a backbone if it is a built-in that is needed pretrained.

    Raises:
        InputError: The texts to pretrain on are not available; the message says what to do instead.
    """
    if backbone.name not in BUILTINS or backbone.config.init != "pretrained":
        return
    builtin = BUILTINS[backbone.name]
    try:
        pretrain(builtin, backbone.places, progress=progress, on_ray=on_ray)
    except InputError as error:
        raise InputError(
            f"model.name={builtin.name!r} is not pretrained yet, and its training data is not "
            f"available ({error}); model.init=random needs none"
        ) from error


def _training_split(
    builtin: Builtin, places: "Places", progress: ProgressCallback | None = None
) -> Split:
    recipe = builtin.recipe
    dataset = prepare(recipe.dataset, cache=places.cache, hub=places.hub, progress=progress)
    return dataset.split(recipe.split)


def _on_epoch(
    builtin: Builtin, progress: ProgressCallback | None
) -> Callable[[int, float], None] | None:
    """Adapt ``progress`` to the callback of :func:`train_backbone`."""
    if progress is None:
        return None
    return lambda epoch, loss: progress(_stage(builtin, loss), epoch / builtin.recipe.epochs)


def _stage(builtin: Builtin, loss: float) -> str:
    return f"pretraining {builtin.name}, loss {loss:.3f}"


def _train_loop(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Train in the Ray Train worker; the driver receives the returned state dict."""
    import ray.train

    builtin: Builtin = settings["builtin"]
    epochs = builtin.recipe.epochs
    split = _training_split(builtin, settings["places"])
    losses: list[float] = []

    def on_epoch(epoch: int, loss: float) -> None:
        losses.append(loss)
        settings["queue"].put((epoch / epochs, loss))

    model = train_backbone(builtin, split, on_epoch=on_epoch)
    # Report once: the controller polls for reports, which takes seconds each.
    ray.train.report({"epochs": epochs, "loss": losses[-1]})
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def _train_on_ray(
    builtin: Builtin, places: "Places", progress: ProgressCallback | None
) -> dict[str, np.ndarray]:
    """Run :func:`_train_loop` in a TorchTrainer with one worker; return the state dict."""
    from ray.train import LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer
    from ray.util.queue import Queue

    queue = Queue(actor_options={"num_cpus": 0})
    done = threading.Event()
    forwarder = threading.Thread(
        target=_forward_progress, args=(queue, done, builtin, progress), daemon=True
    )
    with tempfile.TemporaryDirectory(prefix="train-", dir=places.cache) as storage:
        trainer = TorchTrainer(
            _train_loop,  # type: ignore[arg-type]  # may return a value since Ray Train 2
            train_loop_config={"builtin": builtin, "places": places, "queue": queue},
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
            done.set()
            forwarder.join()
            queue.shutdown()
    arrays: dict[str, np.ndarray] = result.return_value  # type: ignore[attr-defined]  # as above
    return arrays


def _forward_progress(
    queue: Any, done: threading.Event, builtin: Builtin, progress: ProgressCallback | None
) -> None:
    """Forward the worker's progress until the training is over and the queue is empty."""
    while True:
        finished = done.is_set()
        try:
            fraction, loss = queue.get(timeout=0.2)
        except Empty:
            if finished:
                return
            continue
        if progress is not None:
            progress(_stage(builtin, loss), fraction)
