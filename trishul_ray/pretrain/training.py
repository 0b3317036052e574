"""Central training of the built-in backbones: a Ray Train job around a plain training loop.

The weights are a function of the recipe and its dataset alone: initial values, batch order and
thread count are fixed, so a rerun writes the same bytes. The digits it trains on are a split that
no client holds; text models read a dataset's raw training texts, never a label.
"""

import json
import os
import shutil
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

from trishul_ray.data.prepare import make_cache_folder, prepare
from trishul_ray.data.prepared import Progress, Split
from trishul_ray.errors import InputError, RunError
from trishul_ray.models.builtin import BUILTINS, Builtin, byte_tokenizer
from trishul_ray.models.lookup import quiet_transformers
from trishul_ray.pretrain.objectives import learning_of, new_backbone, objective_of, task_for

if TYPE_CHECKING:
    from trishul_ray.config import ModelConfig


def train_backbone(
    builtin: Builtin, split: Split, *, on_epoch: Callable[[int, float], None] | None = None
) -> nn.Module:
    """Train ``builtin`` on ``split`` in this process, on one CPU thread.

    Args:
        builtin: architecture and recipe.
        split: rows to train on.
        on_epoch: called with the number of epochs done and their last mean loss.

    Returns:
        the trained model in eval mode; the same bytes on every call.
    """
    recipe, learning, model = builtin.recipe, learning_of(builtin, split), new_backbone(builtin)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    total = recipe.epochs * learning.per_epoch
    settings: Any = model.config
    caching = getattr(settings, "use_cache", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over threads would depend on their number
    try:
        if caching is not None:
            settings.use_cache = False  # of no use in training
        model.train()
        for epoch in range(recipe.epochs):
            losses: list[float] = []
            for step, batch in enumerate(learning.batches(epoch)):
                loss = learning.loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                if learning.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), learning.clip)
                done = (epoch * learning.per_epoch + step + 1) / (total + 1)
                optimizer.param_groups[0]["lr"] = recipe.lr * learning.rate(done)
                optimizer.step()
                losses.append(float(loss.detach()))
            if on_epoch is not None:
                on_epoch(epoch + 1, float(np.mean(losses)))
    finally:
        torch.set_num_threads(threads)
        if caching is not None:
            settings.use_cache = caching
    return model.eval()


def save_backbone(model: nn.Module, builtin: Builtin, split: Split, folder: Path) -> None:
    """Write a trained built-in with its preprocessing: beside ``folder`` first, then renamed.

    Args:
        model: trained on ``split``.
        builtin: which one it is.
        split: gives images their normalization.
        folder: its place. It can be used as ``model=FOLDER``.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet_transformers():
            model.save_pretrained(beside)  # type: ignore[operator]  # a transformers model
            if objective_of(builtin) is not None:
                byte_tokenizer(builtin.family).save_pretrained(beside)
        if objective_of(builtin) is None:
            task = task_for(builtin, split)
            processor = {
                "image_processor_type": "ViTImageProcessor",
                "do_resize": True,
                "size": {"height": task.image_size, "width": task.image_size},
                "do_rescale": True,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "image_mean": list(task.mean),
                "image_std": list(task.std),
            }
            (beside / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
        os.chmod(beside, 0o755)  # mkdtemp makes it private; a shared cache is read by others
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def builtin_named(name: str, dataset: str | None = None) -> Builtin:
    """The built-in ``name``; a text model may be trained on another dataset than its recipe's.

    Raises:
        InputError: no such built-in, or one that learns from its own images alone.
    """
    builtin = BUILTINS.get(name)
    if builtin is None:
        raise InputError(f"{name!r} is not a built-in backbone; built-in are {', '.join(BUILTINS)}")
    if dataset is None or dataset == builtin.recipe.dataset:
        return builtin
    if objective_of(builtin) is None:
        raise InputError(f"{name} is pretrained on {builtin.recipe.dataset} alone, not {dataset}")
    return builtin.on(dataset)


def pretrain(
    builtin: Builtin,
    cache: Path,
    *,
    hub: Path | None = None,
    progress: Progress | None = None,
    on_ray: bool = True,
) -> Path:
    """The folder of a built-in, trained now by Ray Train or found in ``cache``.

    Two processes that ask at once train once. Ray must be initialised by the caller. With
    ``on_ray=False`` the same loop runs in this process and gives the same bytes: what an inline
    run does, and an actor on another node, since it must not ask for resources of its own.

    Args:
        builtin: see :func:`builtin_named`.
        cache: folder for prepared data and backbones.
        hub: a local mirror, for the texts.
        progress: told of the stage and the fraction done.
        on_ray: see above.

    Raises:
        InputError: the dataset cannot be had.
        RunError: the training failed.
    """
    folder = builtin.folder(cache)
    make_cache_folder(folder.parent)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            split = _rows(builtin, cache, hub, progress)
            if on_ray:
                arrays = _train_on_ray(builtin, cache, hub, progress)
                model = new_backbone(builtin)
                model.load_state_dict({key: torch.tensor(a) for key, a in arrays.items()})
            else:
                model = train_backbone(builtin, split, on_epoch=_teller(builtin, progress))
            save_backbone(model, builtin, split, folder)
    return folder


def ensure_backbone(
    config: "ModelConfig",
    cache: Path,
    progress: Progress | None = None,
    *,
    hub: Path | None = None,
    on_ray: bool = True,
) -> None:
    """Pretrain ``config.name`` if it is a built-in that is wanted pretrained and is missing.

    Raises:
        InputError: the texts it learns from cannot be had; says what to do instead.
    """
    if config.name not in BUILTINS or config.init != "pretrained":
        return
    builtin = BUILTINS[config.name]
    try:
        pretrain(builtin, cache, hub=hub, progress=progress, on_ray=on_ray)
    except InputError as error:
        raise InputError(
            f"model.name={builtin.name!r} is not pretrained yet, and what it learns from is not "
            f"here ({error}); model.init=random needs nothing"
        ) from error


def _rows(
    builtin: Builtin, cache: Path, hub: Path | None, progress: Progress | None = None
) -> Split:
    """What a built-in learns from, prepared now or found in the cache."""
    recipe = builtin.recipe
    return prepare(recipe.dataset, cache=cache, hub=hub, progress=progress).split(recipe.split)


def _teller(builtin: Builtin, progress: Progress | None) -> Callable[[int, float], None] | None:
    """``progress`` as a training loop calls it."""
    if progress is None:
        return None
    tell = progress
    return lambda epoch, loss: tell(_stage(builtin, loss), epoch / builtin.recipe.epochs)


def _stage(builtin: Builtin, loss: float) -> str:
    return f"pretraining {builtin.name}, loss {loss:.3f}"


def _train_loop(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the Ray Train worker runs; its return value travels back to the driver."""
    import ray.train

    builtin: Builtin = settings["builtin"]
    recipe = builtin.recipe
    split = _rows(builtin, Path(settings["cache"]), settings["hub"])
    losses: list[float] = []

    def on_epoch(epoch: int, loss: float) -> None:
        losses.append(loss)
        settings["queue"].put((epoch / recipe.epochs, loss))

    model = train_backbone(builtin, split, on_epoch=on_epoch)
    # Once: the controller takes reports in at its polling interval, seconds each.
    ray.train.report({"epochs": recipe.epochs, "loss": losses[-1]})
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def _train_on_ray(
    builtin: Builtin, cache: Path, hub: Path | None, progress: Progress | None
) -> dict[str, np.ndarray]:
    """Run :func:`_train_loop` as a one-worker TorchTrainer; state dict as arrays."""
    from ray.train import LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer
    from ray.util.queue import Queue

    queue = Queue(actor_options={"num_cpus": 0})
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(queue, done, builtin, progress), daemon=True)
    with tempfile.TemporaryDirectory(prefix="train-", dir=cache) as storage:
        trainer = TorchTrainer(
            _train_loop,  # type: ignore[arg-type]  # may return a value since Ray Train 2
            train_loop_config={
                "builtin": builtin,
                "cache": str(cache),
                "hub": hub,
                "queue": queue,
            },
            scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
            run_config=RunConfig(
                name=f"pretrain-{builtin.name}",
                storage_path=storage,
                logging_config=LoggingConfig(log_level="ERROR"),  # type: ignore[call-arg]  # as above
            ),
        )
        teller.start()
        try:
            result = trainer.fit()
        except TrainingFailedError as error:
            raise RunError(
                f"pretraining {builtin.name} failed: {error}. Nothing was kept; `trishul "
                f"pretrain {builtin.name}` tries again"
            ) from error
        finally:
            done.set()
            teller.join()
            queue.shutdown()
    arrays: dict[str, np.ndarray] = result.return_value  # type: ignore[attr-defined]  # as above
    return arrays


def _tell(queue: Any, done: threading.Event, builtin: Builtin, progress: Progress | None) -> None:
    """Pass the worker's progress on until the training is over and the queue is empty."""
    while True:
        over = done.is_set()
        try:
            fraction, loss = queue.get(timeout=0.2)
        except Empty:
            if over:
                return
            continue
        if progress is not None:
            progress(_stage(builtin, loss), fraction)
