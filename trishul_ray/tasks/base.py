"""The contract of a task: what a batch is, what the loss is, what is measured.

A task holds a few numbers and no state; it pickles to any process. Sums of measurements are
Python floats in float64, so that their merge does not depend on how batches were spread over
workers.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from trishul_ray.adapters.model import AdaptedModel
    from trishul_ray.data.prepare import Encoder


#: Which of transformers' model classes a task runs on.
Architecture = Literal["image-classification", "sequence-classification", "seq2seq-lm", "causal-lm"]


class Task(ABC):
    """From rows to loss and metrics."""

    #: Which kind of model it needs.
    architecture: Architecture
    #: The metric that counts, a share in [0, 1]; higher is better.
    headline: str = "accuracy"
    #: Keys of a prepared batch that are the answer, not an input of the model.
    targets: tuple[str, ...] = ("labels",)
    #: Outputs of a classification head; None for a model without one.
    num_classes: int | None = None
    #: Parts of the test rows, by their ``group`` column, that the headline is also given for.
    groups: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what :meth:`merge` gives, the headline first.

        A group without an evaluated row (a small ``evaluation.limit``) has no metric: its name
        stands here, but not in what :meth:`merge` gives.
        """
        return (self.headline, "loss", *(group_metric(self.headline, g) for g in self.groups))

    @property
    def encoder(self) -> "Encoder | None":
        """How the dataset's texts become the numbers of a batch; None where rows are numbers."""
        return None

    @abstractmethod
    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Rows as stored to what the model takes, on ``device``; floats in ``dtype``."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean loss of a prepared batch: a scalar to differentiate, float32 or wider.

        Args:
            outputs: the model's logits, or its output object that has ``logits``.
            batch: what :meth:`prepare_batch` gave.
        """

    @abstractmethod
    def evaluate(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Sums over a prepared batch: ``loss_sum``, ``count`` and the task's own counts."""

    @abstractmethod
    def merge(self, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Metrics from the sums of all batches: every name in :attr:`metrics` that has a row.

        Called where no model is: it needs nothing but the sums.
        """

    def predict(self, model: "AdaptedModel", batch: Mapping[str, Tensor]) -> Any:
        """What :meth:`evaluate` judges: the model's outputs, or what it generates.

        Args:
            model: with the adapters bound.
            batch: what :meth:`prepare_batch` gave.
        """
        return model.forward(**self.inputs(batch))

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The part of a prepared batch that the model is called with, and switches of the call."""
        return {name: value for name, value in batch.items() if name not in self.targets}


def group_metric(headline: str, group: str) -> str:
    """Name of the headline over one group: ``f1`` and ``SQuAD`` give ``f1_squad``."""
    return f"{headline}_{re.sub(r'[^0-9a-z]+', '_', group.lower())}"


def total(sums: Sequence[Mapping[str, float]], key: str) -> float:
    """Exactly rounded sum of ``key`` over ``sums``: the same in any order."""
    return math.fsum(part[key] for part in sums)


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model's output, or the tensor itself."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    if not isinstance(logits, Tensor):
        raise TypeError(f"expected logits as a tensor, got {type(logits).__name__}")
    return logits


def group_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ``group`` column [b] of stored rows as part of a prepared batch; it stays where it is."""
    return {"group": batch["group"]} if "group" in batch else {}


def sum_rows(
    scores: Mapping[str, Tensor], batch: Mapping[str, Tensor], groups: Sequence[str], by: str
) -> dict[str, float]:
    """Sums in float64 of every score, with ``count``; of the score ``by`` also for each group.

    Args:
        scores: numbers [b] by name.
        batch: prepared; with ``group`` int64 [b] where its rows are in groups.
        groups: their names.
        by: the score that is also summed by group, as ``<by>/<group>`` and ``count/<group>``.
    """
    rows = {name: values.detach().to("cpu", torch.float64) for name, values in scores.items()}
    sums = {name: float(values.sum()) for name, values in rows.items()}
    sums["count"] = float(len(rows[by]))
    for index, group in enumerate(groups):
        member = batch["group"].cpu() == index if "group" in batch else rows[by].new_zeros(0)
        chosen = rows[by][member.bool()] if len(member) else member
        sums[f"{by}/{group}"] = float(chosen.sum())
        sums[f"count/{group}"] = float(len(chosen))
    return sums


def counted(sums: Sequence[Mapping[str, float]]) -> float:
    """How many rows all sums are over.

    Raises:
        ValueError: none.
    """
    count = total(sums, "count")
    if count == 0:
        raise ValueError("no rows were evaluated")
    return count


def group_shares(
    sums: Sequence[Mapping[str, float]], groups: Sequence[str], by: str, headline: str
) -> dict[str, float]:
    """The headline of every group that has a row: what :func:`sum_rows` summed as ``by``."""
    counts = {group: total(sums, f"count/{group}") for group in groups}
    return {
        group_metric(headline, group): total(sums, f"{by}/{group}") / count
        for group, count in counts.items()
        if count
    }


def class_sums(
    logits: Tensor,
    batch: Mapping[str, Tensor],
    groups: Sequence[str],
    answers: Tensor | None = None,
) -> dict[str, float]:
    """``loss_sum``, ``correct`` and ``count`` of logits [b, K] for ``batch["labels"]`` [b].

    A row whose logits are not finite counts as wrong: argmax would call NaN class 0.

    Args:
        logits: of any float dtype; computed with in float32.
        batch: prepared.
        groups: see :func:`sum_rows`.
        answers: the columns of ``logits`` that stand for the classes, int64 [classes], where K is
            a vocabulary: the loss is over all K, the prediction among these. None: all, in order.
    """
    logits, labels = logits.float(), batch["labels"]
    choices = logits if answers is None else logits[:, answers]
    losses = F.cross_entropy(
        logits, labels if answers is None else answers[labels], reduction="none"
    )
    correct = (choices.argmax(dim=-1) == labels) & choices.isfinite().all(dim=-1)
    return sum_rows({"loss_sum": losses, "correct": correct}, batch, groups, by="correct")


def merge_classes(sums: Sequence[Mapping[str, float]], groups: Sequence[str]) -> dict[str, float]:
    """``loss`` and ``accuracy`` over all rows, and ``accuracy`` by group.

    Raises:
        ValueError: nothing was counted.
    """
    count = counted(sums)
    return {
        "loss": total(sums, "loss_sum") / count,
        "accuracy": total(sums, "correct") / count,
        **group_shares(sums, groups, "correct", "accuracy"),
    }
