"""A rating: the classes are numbers, and the model predicts their expectation.

The loss is the squared error; ``closeness`` is 1 minus the mean error over the classes' range.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trishul_ray.errors import InputError
from trishul_ray.tasks.base import constant, count_rows, exact_sum, register, sum_rows
from trishul_ray.tasks.sequence_classification import SequenceClassification


@register("rating")
class Rating(SequenceClassification):
    """Predict a number."""

    headline = "closeness"
    row_score = "closeness"
    sample = ("dataset=table", "data.path=tests/tasks/newcomers/ratings.csv")
    numbers: tuple[float, ...] = ()

    @classmethod
    def build(cls, experiment: Any, info: Any, backbone: Any) -> "Rating":
        task = super().build(experiment, info, backbone)
        try:
            numbers = tuple(map(float, info.classes))
        except ValueError:
            raise InputError(f"task.kind=rating: {info.classes} are no numbers") from None
        task.numbers = numbers
        return task

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.headline, "loss")

    @property
    def classes(self) -> None:
        return None

    def errors(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.class_logits(outputs).float()
        numbers = constant(self.numbers, logits.dtype, logits.device)
        return logits.softmax(dim=1) @ numbers - numbers[batch["labels"]]

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return self.errors(outputs, batch).square().mean()

    def row_scores(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        span = max(self.numbers) - min(self.numbers)
        return 1 - self.errors(outputs, batch).abs() / span

    def evaluate(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
        errors = self.errors(outputs, batch)
        scores = {"loss_sum": errors.square(), "closeness": self.row_scores(outputs, batch)}
        return sum_rows(scores, batch, self.groups, by="closeness")

    def merge(self, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        count = count_rows(sums)
        return {
            "loss": exact_sum(sums, "loss_sum") / count,
            "closeness": exact_sum(sums, "closeness") / count,
        }
