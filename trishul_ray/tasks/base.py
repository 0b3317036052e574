"""The contract of a task: what a batch is, what the loss is, what is measured.

A task holds a few numbers and no state; it pickles to any process. Sums of measurements are
Python floats in float64, so that their merge does not depend on how batches were spread over
workers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Task(ABC):
    """From rows to loss and metrics."""

    #: Keys of a prepared batch that are the answer, not an input of the model.
    targets: tuple[str, ...] = ("labels",)

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
        """Metrics from the sums of all batches; ``loss`` is always among them."""

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of a prepared batch that the model is called with."""
        return {name: value for name, value in batch.items() if name not in self.targets}


def total(sums: Sequence[Mapping[str, float]], key: str) -> float:
    """Exactly rounded sum of ``key`` over ``sums``: the same in any order."""
    return math.fsum(part[key] for part in sums)


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model's output, or the tensor itself."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    if not isinstance(logits, Tensor):
        raise TypeError(f"expected logits as a tensor, got {type(logits).__name__}")
    return logits
