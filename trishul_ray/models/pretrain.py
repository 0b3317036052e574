"""Central training of the built-in backbones: a Ray Train job around a plain training loop.

The weights are a function of the recipe alone: initial values, batch order and thread count are
fixed, so a rerun writes the same bytes. The training data are a split that no client holds.
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
from transformers import AutoModelForImageClassification

from trishul_ray.data import Split, prepare
from trishul_ray.data.sources import make_cache_folder
from trishul_ray.errors import InputError, RunError
from trishul_ray.models.backbones import draw_weights
from trishul_ray.models.registry import Preprocessing, quiet_transformers
from trishul_ray.models.tiny import BUILTINS, Builtin
from trishul_ray.rng import numpy_rng
from trishul_ray.tasks import ImageClassification, image_task

if TYPE_CHECKING:
    from trishul_ray.experiment import ModelConfig

#: ``progress(stage, fraction)``.
Progress = Callable[[str, float], None]


def new_backbone(builtin: Builtin) -> nn.Module:
    """The untrained built-in, weights drawn from the recipe's seed."""
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model: nn.Module = AutoModelForImageClassification.from_config(builtin.config())
    draw_weights(model, builtin.recipe.seed)
    return model


def task_for(builtin: Builtin, split: Split) -> ImageClassification:
    """The classification task of a built-in, normalised by its dataset's statistics."""
    shape = builtin.config()
    return image_task(Preprocessing(shape.image_size, shape.num_channels, None, None), split.info)


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
    recipe, task, model = builtin.recipe, task_for(builtin, split), new_backbone(builtin)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over threads would depend on their number
    try:
        model.train()
        for epoch in range(recipe.epochs):
            order = numpy_rng(recipe.seed, "pretrain-batches", epoch).permutation(len(split))
            losses = []
            for start in range(0, len(order), recipe.batch_size):
                rows = split.batch(order[start : start + recipe.batch_size])
                batch = task.prepare_batch(rows, "cpu", torch.float32)
                loss = task.loss(model(**task.inputs(batch)), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            if on_epoch is not None:
                on_epoch(epoch + 1, float(np.mean(losses)))
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def save_backbone(model: nn.Module, task: ImageClassification, folder: Path) -> None:
    """Write ``model`` and its preprocessing to ``folder``: beside it first, then renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
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
        with quiet_transformers():
            model.save_pretrained(beside)  # type: ignore[operator]  # a transformers model
        (beside / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
        os.chmod(beside, 0o755)  # mkdtemp makes it private; a shared cache is read by others
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def pretrain(
    name: str, cache: Path, *, progress: Progress | None = None, on_ray: bool = True
) -> Path:
    """The folder of the built-in ``name``, trained now by Ray Train or found in ``cache``.

    Two processes that ask at once train once. Ray must be initialised by the caller. With
    ``on_ray=False`` the same loop runs in this process and gives the same bytes: what an inline
    run does, and an actor on another node, since it must not ask for resources of its own.

    Raises:
        InputError: no such built-in.
        RunError: the training failed.
    """
    builtin = BUILTINS.get(name)
    if builtin is None:
        raise InputError(f"{name!r} is not a built-in backbone; built-in are {', '.join(BUILTINS)}")
    folder = builtin.folder(cache)
    make_cache_folder(folder.parent)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            split = prepare(builtin.recipe.dataset, cache=cache, hub=None).split(
                builtin.recipe.split
            )
            model = new_backbone(builtin)
            if on_ray:
                arrays = _train_on_ray(builtin, cache, progress)
                model.load_state_dict({key: torch.tensor(a) for key, a in arrays.items()})
            else:
                model = train_backbone(builtin, split)
            save_backbone(model, task_for(builtin, split), folder)
    return folder


def ensure_backbone(
    config: "ModelConfig", cache: Path, progress: Progress | None = None, *, on_ray: bool = True
) -> None:
    """Pretrain ``config.name`` if it is a built-in that is wanted pretrained and is missing."""
    if config.name in BUILTINS and config.init == "pretrained":
        pretrain(config.name, cache, progress=progress, on_ray=on_ray)


def _train_loop(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the Ray Train worker runs; its return value travels back to the driver."""
    import ray.train

    builtin: Builtin = settings["builtin"]
    recipe = builtin.recipe
    split = prepare(recipe.dataset, cache=Path(settings["cache"]), hub=None).split(recipe.split)

    losses: list[float] = []

    def on_epoch(epoch: int, loss: float) -> None:
        losses.append(loss)
        settings["queue"].put((epoch / recipe.epochs, loss))

    model = train_backbone(builtin, split, on_epoch=on_epoch)
    # Once: the controller takes reports in at its polling interval, seconds each.
    ray.train.report({"epochs": recipe.epochs, "loss": losses[-1]})
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def _train_on_ray(
    builtin: Builtin, cache: Path, progress: Progress | None
) -> dict[str, np.ndarray]:
    """Run :func:`_train_loop` as a one-worker TorchTrainer; state dict as arrays."""
    from ray.train import LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer
    from ray.util.queue import Queue

    queue = Queue(actor_options={"num_cpus": 0})
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(queue, done, builtin.name, progress), daemon=True)
    with tempfile.TemporaryDirectory(prefix="train-", dir=cache) as storage:
        trainer = TorchTrainer(
            _train_loop,  # type: ignore[arg-type]  # may return a value since Ray Train 2
            train_loop_config={"builtin": builtin, "cache": str(cache), "queue": queue},
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


def _tell(queue: Any, done: threading.Event, name: str, progress: Progress | None) -> None:
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
            progress(f"pretraining {name}, loss {loss:.3f}", fraction)
