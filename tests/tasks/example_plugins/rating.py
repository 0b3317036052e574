"""A rating: the classes are numbers, and the model predicts their expectation.

The loss is the squared error; ``closeness`` is 1 minus the mean error over the classes' range.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trishul_ray.errors import InputError
from trishul_ray.tasks.base import constant, register
from trishul_ray.tasks.sequence_classification import SequenceClassification
from trishul_ray.tasks.sums import RowScores


@register("rating")
class Rating(SequenceClassification):
    """Predict a number."""

    row_metrics = ("closeness",)
    sample = ("dataset=table", "data.path=tests/tasks/example_plugins/ratings.csv")
    numbers: tuple[float, ...] = ()

    @classmethod
    def build(cls, config: Any, info: Any, backbone: Any) -> "Rating":
        task = super().build(config, info, backbone)
        try:
            numbers = tuple(map(float, info.classes))
        except ValueError:
            raise InputError(f"task.kind=rating: classes {info.classes} must be numbers") from None
        task.numbers = numbers
        return task

    @property
    def classes(self) -> None:
        return None

    def errors(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.class_logits(outputs).float()
        numbers = constant(self.numbers, logits.dtype, logits.device)
        return logits.softmax(dim=1) @ numbers - numbers[batch["labels"]]

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return self.errors(outputs, batch).square().mean()

    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        errors, span = self.errors(outputs, batch), max(self.numbers) - min(self.numbers)
        return RowScores(errors.square(), {"closeness": 1 - errors.abs() / span})
