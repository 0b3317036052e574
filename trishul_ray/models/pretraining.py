"""Pretrain the built-in backbones centrally: a plain training loop inside a Ray Train job.

The weights are a function of the recipe and its dataset alone: initial values, batch order and
thread count are fixed, so a rerun writes the same bytes. The image models train on a split of the
digits that no client holds. Text models read the raw training texts of a dataset, never a label.

Shapes: b rows of a batch, n tokens of a row, N tokens of the whole text, K spans removed from a
row.
"""

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
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
from trishul_ray.models.builtin import (
    BOS,
    BUILTINS,
    CLS,
    EOS,
    FIRST_BYTE,
    FIRST_SENTINEL,
    MASK,
    SENTINELS,
    SEP,
    Builtin,
    Objective,
    TextRecipe,
)
from trishul_ray.models.lookup import quiet_transformers
from trishul_ray.models.tokenizers import byte_tokenizer
from trishul_ray.models.weights import seeded
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.storage.durable import make_cache_folder, scratch_folder
from trishul_ray.storage.integrity import sealed_folder

# The auto class of transformers for each objective; they have no types.
_AUTO_CLASSES: dict[Objective | None, Any] = {
    None: AutoModelForImageClassification,
    "masked": AutoModelForMaskedLM,
    "causal": AutoModelForCausalLM,
    "denoise": AutoModelForSeq2SeqLM,
}

#: Share of positions at which a masked span begins, and the length of a span.
MASK_STARTS, MASK_SPAN = 0.06, 3

#: Spans removed from a row for T5, and the lengths that they are drawn from.
REMOVED_SPANS, REMOVED_LENGTHS = 8, (2, 3, 4, 5)

assert REMOVED_SPANS <= SENTINELS

#: A byte that occurs in no UTF-8 text. It marks the end of a row of the dataset.
_END = b"\xff"

#: Label of positions that the losses of transformers ignore.
_IGNORED_LABEL = -100

#: A batch: its inputs and labels by name.
Batch = dict[str, Tensor]


def text_objective(builtin: Builtin) -> Objective | None:
    """Return the objective of a text model, or None for an image classifier."""
    return builtin.recipe.objective if isinstance(builtin.recipe, TextRecipe) else None


def new_backbone(builtin: Builtin) -> nn.Module:
    """Return the untrained built-in, with weights drawn from the recipe's seed."""
    with quiet_transformers(), seeded(builtin.recipe.seed):
        model: nn.Module = _AUTO_CLASSES[text_objective(builtin)].from_config(builtin.config())
    return model


def train_backbone(
    builtin: Builtin, split: Split, *, on_epoch: Callable[[int, float], None] | None = None
) -> nn.Module:
    """Return a built-in trained on a split in this process, on one CPU thread, in eval mode.

    It has the same bytes on every call. ``on_epoch`` is called after each epoch with the number of
    epochs done and the mean loss.

    Raises:
        InputError: The rows hold no text, or less than one row of tokens.
    """
    recipe, model = builtin.recipe, new_backbone(builtin)
    batches_of: Callable[[int], Iterator[Batch]]
    if isinstance(recipe, TextRecipe):
        total_steps = recipe.epochs * recipe.steps
        batches_of = partial(text_batches, recipe, byte_tokens(split, recipe.length))
    else:
        total_steps = None  # its learning rate is constant
        batches_of = partial(image_batches, builtin, split)
    step = 0
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
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
            for batch in batches_of(epoch):
                loss = _loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                step += 1
                if total_steps is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    factor = _lr_factor(step / (total_steps + 1))
                    optimizer.param_groups[0]["lr"] = recipe.lr * factor
                optimizer.step()
                losses.append(float(loss.detach()))
            if on_epoch is not None:
                on_epoch(epoch + 1, float(np.mean(losses)))
    finally:
        torch.set_num_threads(threads)
        if use_cache is not None:
            config.use_cache = use_cache
    return model.eval()


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy: of the classes, or of a text as transformers computes it."""
    if "pixel_values" in batch:
        logits: Tensor = model(pixel_values=batch["pixel_values"]).logits
        return F.cross_entropy(logits, batch["labels"])
    loss: Tensor = model(**batch).loss
    return loss


def _lr_factor(done: float) -> float:
    """Rise linearly from zero over the first twentieth, then fall linearly to zero."""
    return min(done / 0.05, (1.0 - done) / 0.95)


def image_batches(builtin: Builtin, split: Split, epoch: int) -> Iterator[Batch]:
    """Yield all rows of gray images once, in a new order, as the model takes them."""
    recipe, shape = builtin.recipe, builtin.architecture
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


def text_batches(recipe: TextRecipe, tokens: np.ndarray, epoch: int) -> Iterator[Batch]:
    """Yield as many batches as the recipe has steps, at random positions of the tokens [N]."""
    make_batch = {"masked": masked_batch, "causal": causal_batch, "denoise": denoising_batch}[
        recipe.objective
    ]
    rng = numpy_rng(recipe.seed, "pretrain-batches", epoch)
    window = np.arange(recipe.length)
    for _ in range(recipe.steps):
        starts = rng.integers(0, len(tokens) - recipe.length, recipe.batch_size)
        rows = tokens[starts[:, None] + window].astype(np.int64)  # [b, n]
        yield {name: torch.from_numpy(value) for name, value in make_batch(rows, rng).items()}


def byte_tokens(split: Split, length: int = 0) -> np.ndarray:
    """Return all texts of a split as byte tokens, int16 [N], with an end token after each row.

    Raises:
        InputError: The rows hold no text, or no more than ``length`` tokens.
    """
    fields = split.info.fields if split.info.kind == "text" else ()
    if split.info.kind == "qa":
        fields = ("question", "context")
    if not fields:
        raise InputError(f"dataset {split.info.name} holds no text to pretrain on")
    columns = [split.texts(name).to_pylist() for name in fields]
    text = b"".join("\n".join(row).encode() + _END for row in zip(*columns, strict=True))
    codes = np.frombuffer(text, np.uint8)
    if len(codes) <= length:
        raise InputError(
            f"dataset {split.info.name} holds {len(codes)} bytes of text: pretraining needs more "
            f"than {length}"
        )
    return np.where(codes == _END[0], EOS, codes.astype(np.int16) + FIRST_BYTE).astype(np.int16)


def causal_batch(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Predict every token of ``rows`` [b, n] from those before it.

    Labels equal the inputs, because the model's loss shifts them.
    """
    tokens = np.concatenate([np.full((len(rows), 1), BOS), rows], axis=1)
    return {"input_ids": tokens, "labels": tokens.copy()}


def masked_batch(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Predict the tokens of random spans of ``rows`` [b, n] from both sides.

    80 % of the tokens to predict are masked, 10 % replaced by random bytes, and 10 % unchanged.
    """
    starts = rng.random(rows.shape) < MASK_STARTS
    chosen = starts.copy()
    for shift in range(1, MASK_SPAN):
        chosen[:, shift:] |= starts[:, :-shift]
    draw = rng.random(rows.shape)
    random_bytes = rng.integers(FIRST_BYTE, FIRST_BYTE + 256, rows.shape)
    inputs = np.where(chosen & (draw < 0.8), MASK, rows)
    inputs = np.where(chosen & (draw >= 0.9), random_bytes, inputs)
    first, last = (np.full((len(rows), 1), token) for token in (CLS, SEP))
    ignored = np.full((len(rows), 1), _IGNORED_LABEL)
    labels = np.where(chosen, rows, _IGNORED_LABEL)
    return {
        "input_ids": np.concatenate([first, inputs, last], axis=1),
        "labels": np.concatenate([ignored, labels, ignored], axis=1),
    }


def denoising_batch(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Replace K spans of ``rows`` [b, n] by sentinels and restore them, as Raffel et al. 2020.

    One span is taken from each K-th part of a row. All spans of a batch have the same length.
    """
    length = int(rng.choice(REMOVED_LENGTHS))
    count, width = rows.shape
    part = width // REMOVED_SPANS
    offsets = rng.integers(0, part - length, (count, REMOVED_SPANS))
    starts = offsets + part * np.arange(REMOVED_SPANS)  # [b, K]
    sentinels = np.broadcast_to(FIRST_SENTINEL + np.arange(REMOVED_SPANS), starts.shape)
    positions = starts[:, :, None] + np.arange(length)  # [b, K, length]
    spans = np.take_along_axis(rows, positions.reshape(count, -1), 1).reshape(positions.shape)
    remaining = rows.copy()
    np.put_along_axis(remaining, starts, sentinels, 1)
    keep = np.ones(rows.shape, bool)
    np.put_along_axis(keep, positions[:, :, 1:].reshape(count, -1), False, 1)
    end = np.full((count, 1), EOS)
    targets = np.concatenate([sentinels[:, :, None], spans], axis=2).reshape(count, -1)
    return {
        "input_ids": np.concatenate([remaining[keep].reshape(count, -1), end], axis=1),
        "labels": np.concatenate([targets, end], axis=1),
    }


def save_backbone(model: nn.Module, builtin: Builtin, split: Split, folder: Path) -> None:
    """Write a trained built-in with its tokenizer or preprocessor, which ``model=FOLDER`` can use.

    The statistics of the split it was trained on normalize images. The folder appears when it
    is complete.
    """
    with sealed_folder(folder) as temporary:
        with quiet_transformers():
            model.save_pretrained(temporary)  # type: ignore[operator]  # a transformers model
            if text_objective(builtin) is not None:
                byte_tokenizer(builtin.model_type).save_pretrained(temporary)
        if text_objective(builtin) is None:
            (mean, std), size = image_statistics(builtin, split.info), builtin.config().image_size
            processor = {
                "image_processor_type": "ViTImageProcessor",
                "do_resize": True, "size": {"height": size, "width": size},
                "do_rescale": True, "rescale_factor": 1 / 255,
                "do_normalize": True, "image_mean": list(mean), "image_std": list(std),
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
        InputError: The dataset is not available.
        RunError: The training failed.
    """
    folder = builtin.folder(places.cache)
    make_cache_folder(folder.parent)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            split = _training_split(builtin, places, progress)

            def on_epoch(epoch: int, loss: float) -> None:
                if progress is not None:
                    stage = f"pretraining {builtin.name}, loss {loss:.3f}"
                    progress(stage, epoch / builtin.recipe.epochs)

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
        InputError: The texts to pretrain on are not available; the message says what to do instead.
    """
    if not needs_pretraining(backbone):
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
    builtin: Builtin, places: Places, progress: ProgressCallback | None = None
) -> Split:
    recipe = builtin.recipe
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
