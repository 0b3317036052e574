"""The contract of a task: its batches, its loss and its metrics; and the registry of tasks.

A task holds a few settings and no state, and pickles to any process. It scores rows; ``sums.py``
adds the scores up.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from trishul_ray.plugins.registry import Registry
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.durable import Json
from trishul_ray.tasks.sums import EvalSums, Metrics, RowScores, client_metric_names

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.adapters.model import AdaptedModel
    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.data.choose_rows import Encoder
    from trishul_ray.data.dataset import DatasetInfo, Kind, Split
    from trishul_ray.models.backbone import Backbone
    from trishul_ray.models.find_model import ModelKind
    from trishul_ray.tasks.text import TokenizerRef

#: Keyword arguments of a model for a batch.
ModelInputs: TypeAlias = dict[str, Any]


class Task(ABC):
    """Turns rows of a dataset into batches, a loss and metrics."""

    #: The rows that the task reads: images, texts or questions.
    reads: ClassVar[Kind]
    #: The families of backbones that it runs on.
    families: ClassVar[tuple[ModelKind, ...]]
    #: The fields of the section ``task`` that it reads, in addition to ``kind``.
    fields_read: ClassVar[frozenset[str]] = frozenset(
        {"max_length", "target_length", "template", "verbalizers"}
    )
    #: Whether the labels may be any values, such as scores, instead of classes with several rows.
    any_labels: ClassVar[bool] = False
    #: For the tests of all tasks: overrides that name a small dataset whose rows the task accepts,
    #: such as ``("dataset=table", "data.path=tests/ratings.csv")``; empty for one of the package's.
    sample: ClassVar[tuple[str, ...]] = ()
    #: The kind of model that the task trains.
    model_kind: ModelKind
    #: Names of the scores of a row, whose means are metrics. The first is the headline: in [0, 1],
    #: higher is better.
    row_metrics: tuple[str, ...] = ("accuracy",)
    #: Keys of a prepared batch that are not inputs of the model.
    targets: tuple[str, ...] = ("labels",)
    #: Outputs of the classification head; None for a model without one.
    num_classes: int | None = None
    #: Names of groups of test rows, indexed by the ``group`` column. Each has its own headline.
    groups: tuple[str, ...] = ()
    #: The tokenizer; None if the rows hold no text.
    tokens: TokenizerRef | None = None

    @classmethod
    def build(cls, config: TaskConfig, info: DatasetInfo, backbone: Backbone) -> Task:
        """Build the task for rows that it reads and a backbone of its families.

        Raises:
            InputError: The settings do not fit the dataset or the backbone.
        """
        raise NotImplementedError(f"{cls.__name__} must define build()")

    @property
    def headline(self) -> str:
        """The main metric."""
        return self.row_metrics[0]

    @property
    def classes(self) -> int | None:
        """Number of classes that :meth:`score` predicts; None if there are no classes."""
        return None

    @property
    def metrics(self) -> Metrics:
        """The metrics, as the coordinator computes them, in a process without a model."""
        return Metrics(self.row_metrics, self.groups, self.classes)

    @property
    def encoder(self) -> Encoder | None:
        """Encoder of the dataset's texts: the task itself; None if the rows hold no text."""
        return None if self.tokens is None else self

    @property
    def key(self) -> str:
        """Text that identifies everything that determines the columns of :meth:`encode`."""
        raise NotImplementedError(f"{type(self).__name__} must define key")

    def encode(self, split: Split, progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Return the texts of all rows as columns of token ids, [N, ...]."""
        raise NotImplementedError(f"{type(self).__name__} must define encode()")

    @abstractmethod
    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Convert stored rows to the model's inputs, on ``device``, with floats in ``dtype``."""

    def losses(self, model: AdaptedModel, batch: Mapping[str, Tensor], clients: int) -> Tensor:
        """Return the mean loss of the rows of each client, [clients], for a step of training.

        Args:
            model: The model, with the clients' parameters bound.
            batch: Prepared mini-batches of all clients, one after the other, of equal size.
            clients: How many.
        """
        outputs = model.forward(**self.inputs(batch))
        if clients == 1:
            return self.loss(outputs, batch)[None]
        logits = logits_of(outputs)
        size = len(logits) // clients
        split = {name: values.split(size) for name, values in batch.items()}
        parts = [{name: own[i] for name, own in split.items()} for i in range(clients)]
        return torch.stack([self.loss(*own) for own in zip(logits.split(size), parts, strict=True)])

    @abstractmethod
    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a prepared batch, a differentiable scalar in float32 or wider.

        ``outputs`` are the model's logits, or its output object with an attribute ``logits``.
        """

    @abstractmethod
    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        """Return the loss of every row of a prepared batch, and each of :attr:`row_metrics`."""

    def evaluate(self, outputs: Any, batch: Mapping[str, Tensor]) -> EvalSums:
        """Return the sums over a prepared batch, from which :attr:`metrics` follow."""
        return EvalSums.of(self.score(outputs, batch), self.metrics, batch)

    def predict(self, model: AdaptedModel, batch: Mapping[str, Tensor]) -> Any:
        """Return what :meth:`score` scores: the model's outputs, or the text it generates."""
        return model.forward(**self.inputs(batch))

    def inputs(self, batch: Mapping[str, Tensor]) -> ModelInputs:
        """Return the keyword arguments of the model for a prepared batch."""
        return {name: value for name, value in batch.items() if name not in self.targets}

    def answers(self, outputs: Any, classes: Sequence[str]) -> list[str]:
        """Return what the model says of every row: the name of a class, or a text.

        Args:
            outputs: Result of :meth:`predict`.
            classes: Names of the dataset's classes.
        """
        raise NotImplementedError(f"{type(self).__name__} must define answers()")

    def respond(
        self, model: AdaptedModel, batch: Mapping[str, Tensor], classes: Sequence[str]
    ) -> list[str]:
        """Return what the model says of every row, for users who predict with it.

        The same as :meth:`answers` of :meth:`predict`, unless answers cost more than scores.
        """
        return self.answers(self.predict(model, batch), classes)

    def count_labels(self, split: Split) -> np.ndarray | None:
        """Return how many tokens of each encoded row its loss is of, [N]; None if of none."""
        return None

    def remarks(self, split: Split) -> list[str]:
        """Return what encoding has changed in the rows of a split, a text each with its count."""
        return []

    def settings(self) -> Json:
        """Return how rows become inputs and outputs answers, as JSON values for ``task.json``."""
        return {}


#: Tasks by kind and the rows that they read, such as ``classification:text``.
TASKS = Registry[type[Task]]("task.kind", "task", "trishul_ray.tasks")

_T = TypeVar("_T", bound=type[Task])


def register(kind: str) -> Callable[[_T], _T]:
    """Return a class decorator that makes a task available as ``task.kind=<kind>``.

    Tasks on other rows may have the same kind.
    """

    def add(cls: _T) -> _T:
        TASKS.add(f"{kind}:{cls.reads}", cls)
        return cls

    return add


def task_classes() -> Mapping[tuple[str, Kind], type[Task]]:
    """Return all registered tasks, by kind and rows."""
    return {(name.partition(":")[0], cls.reads): cls for name, cls in TASKS.all().items()}


def metric_names() -> tuple[str, ...]:
    """Return the names of the metrics of all tasks, but for those of groups of rows."""
    found = [task.row_metrics for task in task_classes().values()]
    names = itertools.chain(*found, ("loss", "macro_f1"), client_metric_names())
    return tuple(dict.fromkeys(names))


def is_metric(name: str) -> bool:
    """Return whether some task may have a metric, also for a group of rows: ``f1_squad``."""
    heads = {task.row_metrics[0] for task in task_classes().values()}
    return name in metric_names() or any(name.startswith(f"{head}_") for head in heads)


def task_kinds() -> tuple[str, ...]:
    """Return what ``task.kind`` may be: ``auto``, and the kinds of all registered tasks."""
    return ("auto", *sorted({kind for kind, _ in task_classes()}))


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's output, or the output itself if it is a tensor."""
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"expected logits as a tensor, got {type(logits).__name__}")
    return logits


def to_device(batch: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Return the batch with every tensor on ``device``, without waiting for the device.

    A copy to a GPU starts from page-locked memory; from any other, the host would have to wait
    until the GPU has done all earlier work.
    """
    if torch.device(device).type == "cpu":
        return dict(batch)
    return {name: value.pin_memory().to(device, non_blocking=True) for name, value in batch.items()}


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor that is copied to its device once, not in every step.

    Do not write to it.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def group_column(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the stored columns ``group`` and ``client`` [b], if any; they stay on the CPU."""
    return {name: batch[name] for name in ("group", "client") if name in batch}


def predict_class(logits: Tensor) -> Tensor:
    """Return the class of every row of logits [b, K], int64 [b]; -1 if they are not finite."""
    return logits.argmax(dim=-1).where(logits.isfinite().all(dim=-1), -1)


class Classification(Task):
    """Base of the tasks that predict one of K classes from logits [b, K]."""

    targets = ("labels", "group", "client")

    @property
    def classes(self) -> int | None:
        """Number of classes, K."""
        return self.num_classes

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy of logits [b, K], in float32."""
        return torch.nn.functional.cross_entropy(logits_of(outputs).float(), batch["labels"])

    def class_logits(self, outputs: Any) -> Tensor:
        """Return the logits of the classes [b, K]; the largest is the prediction."""
        return logits_of(outputs)

    def answers(self, outputs: Any, classes: Sequence[str]) -> list[str]:
        """Return the name of the predicted class of every row."""
        return [classes[k] for k in self.class_logits(outputs).argmax(dim=1).tolist()]

    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        """Return cross-entropy and accuracy of every row; see :func:`score_classes`."""
        return score_classes(logits_of(outputs), batch["labels"])


def score_classes(logits: Tensor, labels: Tensor, class_columns: Tensor | None = None) -> RowScores:
    """Return cross-entropy, ``accuracy`` and class of every row of logits [b, K].

    A row whose logits are not finite counts as wrong, because argmax would predict class 0 for
    NaN. The loss is computed in float32, from logits of any float dtype. If K is a vocabulary,
    ``class_columns`` int64 [classes] holds the column of each class: the loss is over all K
    columns, the prediction only among these. Without it, column k is class k.
    """
    logits = logits.float()
    choices = logits if class_columns is None else logits[:, class_columns]
    columns = labels if class_columns is None else class_columns[labels]
    losses = torch.nn.functional.cross_entropy(logits, columns, reduction="none")
    predicted = predict_class(choices)
    scores = {"accuracy": predicted == labels}
    return RowScores(losses, scores, predicted=predicted, labels=labels)
