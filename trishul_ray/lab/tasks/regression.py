"""Regression: a head with one output predicts the number in a row's label, such as a score.

Legend: b rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trishul_ray.errors import InputError
from trishul_ray.lab.tasks.correlations import Correlations
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.durable import Json
from trishul_ray.tasks.base import constant, register
from trishul_ray.tasks.sequence_classification import SequenceClassification
from trishul_ray.tasks.sums import Metrics, RowScores

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.data.dataset import DatasetInfo
    from trishul_ray.models.backbone import Backbone


@register("regression")
class Regression(SequenceClassification):
    """Predict numbers from one or two fields of text; the loss is the squared error.

    ``closeness`` of a row is 1 minus the absolute error divided by the range of the dataset's
    labels, and at least 0. ``pearson`` and ``spearman`` are the metrics of STS-B: A. Wang et al.,
    "GLUE", ICLR 2019, arXiv 1804.07461.
    """

    any_labels = True
    sample = ("dataset=synthetic/stsb",)
    row_metrics = ("closeness",)
    joint_metrics = Correlations.correlations
    num_classes = 1
    numbers: tuple[float, ...] = ()

    @classmethod
    def build(cls, config: TaskConfig, info: DatasetInfo, backbone: Backbone) -> Regression:
        """Build the task for a dataset whose class names are numbers.

        Raises:
            InputError: The class names are not two or more finite numbers.
        """
        task = super().build(config, info, backbone)
        assert isinstance(task, Regression)
        try:
            task.numbers = tuple(map(float, info.classes))
        except ValueError as error:
            raise InputError(f"task.kind=regression: a label is not a number ({error})") from None
        if len(task.numbers) < 2 or not all(map(math.isfinite, task.numbers)):
            raise InputError("task.kind=regression: labels must be two or more finite numbers")
        task.num_classes = 1
        return task

    @property
    def classes(self) -> None:
        """Class names: None, because the task predicts numbers."""
        return None

    @property
    def metrics(self) -> Metrics:
        """The mean closeness, the loss and the correlations."""
        return Correlations(self.row_metrics, self.groups)

    def settings(self) -> Json:
        """Add the range of the labels to the settings of a classification."""
        return super().settings() | {"range": [min(self.numbers), max(self.numbers)]}

    def predictions(self, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the predicted and the labeled numbers, float32 or float64 [b]."""
        predicted = self.class_logits(outputs)[:, 0]
        predicted = predicted if predicted.dtype == torch.float64 else predicted.float()
        return predicted, constant(self.numbers, predicted.dtype, predicted.device)[batch["labels"]]

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean squared error of the batch."""
        return torch.nn.functional.mse_loss(*self.predictions(outputs, batch))

    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        """Compute the squared error and the closeness of each row.

        The closeness is 0 if the prediction is not finite.
        """
        predicted, labels = pair = self.predictions(outputs, batch)
        errors = (predicted - labels).abs() / (max(self.numbers) - min(self.numbers))
        closeness = (1 - errors).clamp(min=0).nan_to_num(0)
        losses = (predicted - labels).square()
        return RowScores(losses, {"closeness": closeness}, kept=torch.stack(pair, dim=1))

    def answers(self, outputs: Any, classes: Sequence[str]) -> list[str]:
        """Return the predicted number of each row with four significant digits."""
        return [f"{number:.4g}" for number in self.class_logits(outputs)[:, 0].tolist()]
