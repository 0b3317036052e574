"""What the built-in backbones learn: classes of images, or language from raw text.

Batches are a function of the recipe and the rows alone.

Legend: b rows of a batch, n tokens of a row, N tokens of the whole text, K spans cut out of a row.
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

from trishul_ray.data.prepared import Split
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import draw_weights
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
from trishul_ray.rng import numpy_rng
from trishul_ray.tasks.image_classification import ImageClassification, image_task

#: transformers' class by what is learned. (They are untyped.)
_AUTO: dict[Objective | None, Any] = {
    None: AutoModelForImageClassification,
    "masked": AutoModelForMaskedLM,
    "causal": AutoModelForCausalLM,
    "denoise": AutoModelForSeq2SeqLM,
}


#: Share of a text's places where a masked span begins, and the span's length.
MASK_STARTS, MASK_SPAN = 0.06, 3


#: Spans that T5 restores in a row, and the lengths they are drawn from.
CUTS, CUT_LENGTHS = 8, (2, 3, 4, 5)


assert CUTS <= SENTINELS


#: A byte that no UTF-8 text holds: the end of a row of the dataset.
_END = b"\xff"


#: Labels that do not count, as transformers' losses have it.
_IGNORED = -100


class Learning(ABC):
    """Batches and their loss."""

    #: Batches of an epoch.
    per_epoch: int
    #: Bound on the gradient's norm; None for none.
    clip: float | None = None

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[Mapping[str, Tensor]]:
        """The batches of one epoch, counted from 0."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean loss of a batch."""

    def rate(self, done: float) -> float:
        """The learning rate, as a share of the recipe's, when a share ``done`` is done."""
        return 1.0


def objective_of(builtin: Builtin) -> Objective | None:
    """What a text model learns; None for a classifier of images."""
    return builtin.recipe.objective if isinstance(builtin.recipe, TextRecipe) else None


def new_backbone(builtin: Builtin) -> nn.Module:
    """The untrained built-in, weights drawn from the recipe's seed."""
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model: nn.Module = _AUTO[objective_of(builtin)].from_config(builtin.config())
    draw_weights(model, builtin.recipe.seed)
    return model


def task_for(builtin: Builtin, split: Split) -> ImageClassification:
    """The classification task of a built-in, normalised by its dataset's statistics."""
    shape: Any = builtin.config()
    return image_task(Preprocessing(shape.image_size, shape.num_channels, None, None), split.info)


def learning_of(builtin: Builtin, split: Split) -> Learning:
    """How a built-in learns from the rows of a split.

    Raises:
        InputError: the rows are of another kind, or hold less text than one row of tokens.
    """
    if isinstance(builtin.recipe, TextRecipe):
        return TextLearning(builtin.recipe, split)
    return ImageLearning(builtin, split)


class ImageLearning(Learning):
    """Classes of images, all rows once an epoch in shuffled order."""

    def __init__(self, builtin: Builtin, split: Split) -> None:
        """Keep the rows."""
        self.recipe, self.split, self.task = builtin.recipe, split, task_for(builtin, split)
        self.per_epoch = -(-len(split) // builtin.recipe.batch_size)

    def batches(self, epoch: int) -> Iterator[Mapping[str, Tensor]]:
        """Batches of a fresh permutation."""
        recipe, split = self.recipe, self.split
        order = numpy_rng(recipe.seed, "pretrain-batches", epoch).permutation(len(split))
        for start in range(0, len(order), recipe.batch_size):
            rows = split.batch(order[start : start + recipe.batch_size])
            yield self.task.prepare_batch(rows, "cpu", torch.float32)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy."""
        return self.task.loss(model(**self.task.inputs(batch)), batch)


class TextLearning(Learning):
    """Language, from windows at random places of the dataset's texts, one after the other."""

    clip = 1.0

    def __init__(self, recipe: TextRecipe, split: Split) -> None:
        """Read the whole text as tokens, int16 [N]."""
        self.recipe, self.per_epoch = recipe, recipe.steps
        self.tokens = tokens_of(split)
        if len(self.tokens) <= recipe.length:
            raise InputError(
                f"dataset {split.info.name} holds {len(self.tokens)} bytes of text: pretraining "
                f"needs more than {recipe.length}"
            )

    def rate(self, done: float) -> float:
        """Up from zero over the first twentieth, then linearly down to zero."""
        return min(done / 0.05, (1.0 - done) / 0.95)

    def batches(self, epoch: int) -> Iterator[Mapping[str, Tensor]]:
        """The recipe's number of batches."""
        recipe = self.recipe
        make = {"masked": masked, "causal": causal, "denoise": denoise}[recipe.objective]
        rng = numpy_rng(recipe.seed, "pretrain-batches", epoch)
        window = np.arange(recipe.length)
        for _ in range(recipe.steps):
            starts = rng.integers(0, len(self.tokens) - recipe.length, recipe.batch_size)
            rows = self.tokens[starts[:, None] + window].astype(np.int64)  # [b, n]
            yield {name: torch.from_numpy(value) for name, value in make(rows, rng).items()}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy over the labels that count, as transformers computes it."""
        found: Tensor = model(**batch).loss
        return found


def tokens_of(split: Split) -> np.ndarray:
    """All texts of a split as byte tokens, int16 [N]; an end mark after each row.

    Raises:
        InputError: the rows hold no text.
    """
    fields = split.info.fields if split.info.kind == "text" else ()
    if split.info.kind == "qa":
        fields = ("question", "context")
    if not fields:
        raise InputError(f"dataset {split.info.name} holds no text to pretrain on")
    columns = [split.texts(name).to_pylist() for name in fields]
    whole = b"".join("\n".join(row).encode() + _END for row in zip(*columns, strict=True))
    codes = np.frombuffer(whole, np.uint8)
    return np.where(codes == _END[0], EOS, codes.astype(np.int16) + FIRST_BYTE).astype(np.int16)


def causal(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Every token [b, n] from those before it; the model's loss shifts the labels itself."""
    first = np.full((len(rows), 1), BOS)
    tokens = np.concatenate([first, rows], axis=1)
    return {"input_ids": tokens, "labels": tokens.copy()}


def masked(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Spans of [b, n] from both sides: four in five masked, one in ten replaced, the rest kept."""
    starts = rng.random(rows.shape) < MASK_STARTS
    chosen = starts.copy()
    for shift in range(1, MASK_SPAN):
        chosen[:, shift:] |= starts[:, :-shift]
    fate = rng.random(rows.shape)
    other = rng.integers(FIRST_BYTE, FIRST_BYTE + 256, rows.shape)
    seen = np.where(chosen & (fate < 0.8), MASK, rows)
    seen = np.where(chosen & (fate >= 0.9), other, seen)
    ends = [np.full((len(rows), 1), mark) for mark in (CLS, SEP)]
    none = np.full((len(rows), 1), _IGNORED)
    return {
        "input_ids": np.concatenate([ends[0], seen, ends[1]], axis=1),
        "labels": np.concatenate([none, np.where(chosen, rows, _IGNORED), none], axis=1),
    }


def denoise(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """K spans cut out of [b, n], each behind its sentinel, as Raffel et al. 2020 train T5.

    One span from each K-th of a row, all of one batch equally long.
    """
    length = int(rng.choice(CUT_LENGTHS))
    count, width = rows.shape
    part = width // CUTS
    offsets = rng.integers(0, part - length, (count, CUTS))
    starts = offsets + part * np.arange(CUTS)  # [b, K]
    sentinels = np.broadcast_to(FIRST_SENTINEL + np.arange(CUTS), starts.shape)
    places = starts[:, :, None] + np.arange(length)  # [b, K, length]
    spans = np.take_along_axis(rows, places.reshape(count, -1), 1).reshape(places.shape)
    left = rows.copy()
    np.put_along_axis(left, starts, sentinels, 1)
    keep = np.ones(rows.shape, bool)
    np.put_along_axis(keep, places[:, :, 1:].reshape(count, -1), False, 1)
    end = np.full((count, 1), EOS)
    targets = np.concatenate([sentinels[:, :, None], spans], axis=2).reshape(count, -1)
    return {
        "input_ids": np.concatenate([left[keep].reshape(count, -1), end], axis=1),
        "labels": np.concatenate([targets, end], axis=1),
    }
