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

if TYPE_CHECKING:
    from trishul_ray.adapters.attach import AdaptedModel
    from trishul_ray.data.encoding import Encoder

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
