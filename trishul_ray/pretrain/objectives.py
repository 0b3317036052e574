"""Pretraining objectives of the built-in backbones: image classes, or language from raw text.

Batches are a function of the recipe and the rows alone.

Shapes: b rows of a batch, n tokens of a row, N tokens of the whole text, K spans removed from a
row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from trishul_ray.data.dataset import Split
from trishul_ray.errors import InputError
from trishul_ray.models.builtin import (
    BOS,
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
from trishul_ray.models.lookup import Preprocessing, quiet_transformers
from trishul_ray.models.weights import draw_weights
from trishul_ray.rng import numpy_rng
from trishul_ray.tasks.image_classification import ImageClassification, image_task

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


class PretrainingTask(ABC):
    """Batches of a pretraining and their loss."""

    batches_per_epoch: int
    max_grad_norm: float | None = None  # None for no limit

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[Mapping[str, Tensor]]:
        """Yield the batches of one epoch, counted from 0."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a batch."""

    def lr_factor(self, progress: float) -> float:
        """Return the factor on the recipe's learning rate at ``progress`` in [0, 1]."""
        return 1.0


def text_objective(builtin: Builtin) -> Objective | None:
    """Return the objective of a text model, or None for an image classifier."""
    return builtin.recipe.objective if isinstance(builtin.recipe, TextRecipe) else None


def new_backbone(builtin: Builtin) -> nn.Module:
    """Return the untrained built-in, with weights drawn from the recipe's seed."""
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model: nn.Module = _AUTO_CLASSES[text_objective(builtin)].from_config(builtin.config())
    draw_weights(model, builtin.recipe.seed)
    return model


def classification_task(builtin: Builtin, split: Split) -> ImageClassification:
    """Return the classification task of an image model, normalized by the dataset's statistics."""
    config: Any = builtin.config()
    expected = Preprocessing(config.image_size, config.num_channels, None, None)
    return image_task(expected, split.info)


def pretraining_task(builtin: Builtin, split: Split) -> PretrainingTask:
    """Return the task that pretrains a built-in on the rows of a split.

    Raises:
        InputError: The rows hold no text, or less than one row of tokens.
    """
    if isinstance(builtin.recipe, TextRecipe):
        return TextPretraining(builtin.recipe, split)
    return ImagePretraining(builtin, split)


class ImagePretraining(PretrainingTask):
    """Classify images; each epoch takes all rows once, in shuffled order."""

    def __init__(self, builtin: Builtin, split: Split) -> None:
        self.recipe, self.split = builtin.recipe, split
        self.task = classification_task(builtin, split)
        self.batches_per_epoch = -(-len(split) // builtin.recipe.batch_size)

    def batches(self, epoch: int) -> Iterator[Mapping[str, Tensor]]:
        """Yield the batches of a new permutation."""
        recipe, split = self.recipe, self.split
        order = numpy_rng(recipe.seed, "pretrain-batches", epoch).permutation(len(split))
        for start in range(0, len(order), recipe.batch_size):
            rows = split.batch(order[start : start + recipe.batch_size])
            yield self.task.prepare_batch(rows, "cpu", torch.float32)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy."""
        return self.task.loss(model(**self.task.inputs(batch)), batch)


class TextPretraining(PretrainingTask):
    """Learn language from windows at random positions of the dataset's concatenated texts."""

    max_grad_norm = 1.0

    def __init__(self, recipe: TextRecipe, split: Split) -> None:
        self.recipe, self.batches_per_epoch = recipe, recipe.steps
        self.tokens = byte_tokens(split)  # [N]
        if len(self.tokens) <= recipe.length:
            raise InputError(
                f"dataset {split.info.name} holds {len(self.tokens)} bytes of text: pretraining "
                f"needs more than {recipe.length}"
            )

    def lr_factor(self, progress: float) -> float:
        """Rise linearly from zero over the first twentieth, then fall linearly to zero."""
        return min(progress / 0.05, (1.0 - progress) / 0.95)

    def batches(self, epoch: int) -> Iterator[Mapping[str, Tensor]]:
        """Yield as many batches as the recipe has steps."""
        recipe = self.recipe
        make_batch = {"masked": masked_batch, "causal": causal_batch, "denoise": denoising_batch}[
            recipe.objective
        ]
        rng = numpy_rng(recipe.seed, "pretrain-batches", epoch)
        window = np.arange(recipe.length)
        for _ in range(recipe.steps):
            starts = rng.integers(0, len(self.tokens) - recipe.length, recipe.batch_size)
            rows = self.tokens[starts[:, None] + window].astype(np.int64)  # [b, n]
            yield {name: torch.from_numpy(value) for name, value in make_batch(rows, rng).items()}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy over the labels, as transformers computes it."""
        loss: Tensor = model(**batch).loss
        return loss


def byte_tokens(split: Split) -> np.ndarray:
    """Return all texts of a split as byte tokens, int16 [N], with an end token after each row.

    Raises:
        InputError: The rows hold no text.
    """
    fields = split.info.fields if split.info.kind == "text" else ()
    if split.info.kind == "qa":
        fields = ("question", "context")
    if not fields:
        raise InputError(f"dataset {split.info.name} holds no text to pretrain on")
    columns = [split.texts(name).to_pylist() for name in fields]
    text = b"".join("\n".join(row).encode() + _END for row in zip(*columns, strict=True))
    codes = np.frombuffer(text, np.uint8)
    return np.where(codes == _END[0], EOS, codes.astype(np.int16) + FIRST_BYTE).astype(np.int16)


def causal_batch(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Predict every token of ``rows`` [b, n] from those before it.

    Labels equal the inputs, because the model's loss shifts them.
    """
    tokens = np.concatenate([np.full((len(rows), 1), BOS), rows], axis=1)
    return {"input_ids": tokens, "labels": tokens.copy()}


def masked_batch(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Predict the tokens of random spans of ``rows`` [b, n] from both sides.

    Of the tokens to predict, 80 % are masked, 10 % replaced by random bytes, and 10 % kept.
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
