"""Base class and registry of tasks, which define batches, loss and metrics.

A task stores a few settings and no state, and can be pickled to any process. It scores rows;
``sums.py`` adds the scores.

Legend: N rows of a split, b rows of a batch, K classes.
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
    """Base class of tasks, which turn rows of a dataset into batches, a loss and metrics.

    Subclasses set the class attributes ``reads``, ``families`` and ``model_kind``, implement
    :meth:`build`, :meth:`prepare_batch`, :meth:`loss`, :meth:`score` and :meth:`answers` and, for
    text, :attr:`key` and :meth:`encode`. Tasks that predict one of K classes extend
    :class:`Classification` instead.

    Example:
        A classification task with smoothed labels, in a file that ``--plugin`` loads::

            @register("smoothed")
            class Smoothed(SequenceClassification):
                def loss(self, outputs, batch):
                    return torch.nn.functional.cross_entropy(
                        logits_of(outputs).float(), batch["labels"], label_smoothing=0.1
                    )

                def score(self, outputs, batch):
                    scored = super().score(outputs, batch)
                    losses = torch.nn.functional.cross_entropy(
                        logits_of(outputs).float(), batch["labels"],
                        reduction="none", label_smoothing=0.1,
                    )
                    return replace(scored, loss=losses)
    """

    #: Kind of rows that the task reads: images, texts or questions.
    reads: ClassVar[Kind]
    #: Supported families of backbones.
    families: ClassVar[tuple[ModelKind, ...]]
    #: Fields of the section ``task`` that the task reads, in addition to ``kind``.
    fields_read: ClassVar[frozenset[str]] = frozenset(
        {"max_length", "target_length", "template", "verbalizers"}
    )
    #: Whether the labels may be any values, such as scores, instead of classes with several rows.
    any_labels: ClassVar[bool] = False
    #: Overrides that select a small dataset for the contract checks of all tasks, such as
    #: ``("dataset=table", "data.path=tests/ratings.csv")``; empty to use a dataset of the package.
    sample: ClassVar[tuple[str, ...]] = ()
    #: Kind of model that the task trains.
    model_kind: ModelKind
    #: Names of the scores of a row, whose means are metrics. The first is the primary metric: in
    #: [0, 1], higher is better.
    row_metrics: tuple[str, ...] = ("accuracy",)
    #: Names of the metrics of all rows together that :attr:`metrics` adds to those of rows.
    joint_metrics: ClassVar[tuple[str, ...]] = ()
    #: Keys of a prepared batch that are not inputs of the model.
    targets: tuple[str, ...] = ("labels",)
    #: Number of outputs of the classification head; None for a model without a head.
    num_classes: int | None = None
    #: Names of groups of test rows, indexed by the ``group`` column. Each has a separate primary
    #: metric.
    groups: tuple[str, ...] = ()
    #: The tokenizer; None if the rows have no text.
    tokens: TokenizerRef | None = None

    @classmethod
    def build(cls, config: TaskConfig, info: DatasetInfo, backbone: Backbone) -> Task:
        """Create the task for rows that it reads and a backbone of its families.

        Args:
            config: The section ``task``.
            info: Description of the dataset.
            backbone: The backbone; its weights are not read.

        Returns:
            The task.

        Raises:
            InputError: The settings are not compatible with the dataset or the backbone.
        """
        raise NotImplementedError(f"{cls.__name__} must define build()")

    @property
    def primary_metric(self) -> str:
        """The primary metric."""
        return self.row_metrics[0]

    @property
    def classes(self) -> int | None:
        """Number of classes that :meth:`score` predicts; None for a task without classes."""
        return None

    @property
    def metrics(self) -> Metrics:
        """The metrics, for a process without a model, such as the coordinator."""
        return Metrics(self.row_metrics, self.groups, self.classes)

    @property
    def encoder(self) -> Encoder | None:
        """Encoder of the dataset's texts: the task itself, or None if the rows have no text."""
        return None if self.tokens is None else self

    @property
    def key(self) -> str:
        """Text that identifies everything that determines the columns of :meth:`encode`."""
        raise NotImplementedError(f"{type(self).__name__} must define key")

    def encode(self, split: Split, progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Encode the texts of all rows as token ids.

        Args:
            split: The split, with raw texts.
            progress: Called with the completed fraction.

        Returns:
            Columns [N, ...], keyed by name.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode()")

    @abstractmethod
    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Convert stored rows to the model's inputs and targets.

        Args:
            batch: Columns [b, ...] of the stored rows, keyed by name.
            device: Device of the result.
            dtype: Dtype of floating-point inputs.

        Returns:
            The inputs, and the keys in :attr:`targets`.
        """

    def losses(self, model: AdaptedModel, batch: Mapping[str, Tensor], clients: int) -> Tensor:
        """Compute the mean loss of each client's rows for a training step.

        Args:
            model: The model, with the clients' parameters bound.
            batch: Prepared mini-batches of all clients, one after the other, of equal size.
            clients: Number of clients.

        Returns:
            [clients], differentiable.
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
        """Compute the mean loss of a prepared batch.

        Args:
            outputs: The model's logits, or its output object with an attribute ``logits``.
            batch: The prepared batch.

        Returns:
            A differentiable scalar in float32 or wider.
        """

    @abstractmethod
    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        """Score every row of a prepared batch.

        Args:
            outputs: Result of :meth:`predict`.
            batch: The prepared batch.

        Returns:
            The loss of every row, and each of :attr:`row_metrics`.
        """

    def evaluate(self, outputs: Any, batch: Mapping[str, Tensor]) -> EvalSums:
        """Compute the sums over a prepared batch that determine :attr:`metrics`.

        Args:
            outputs: Result of :meth:`predict`.
            batch: The prepared batch.
        """
        return EvalSums.of(self.score(outputs, batch), self.metrics, batch)

    def predict(self, model: AdaptedModel, batch: Mapping[str, Tensor]) -> Any:
        """Compute the outputs that :meth:`score` reads: of the model, or generated text.

        Args:
            model: The model, with parameters bound.
            batch: The prepared batch.
        """
        return model.forward(**self.inputs(batch))

    def inputs(self, batch: Mapping[str, Tensor]) -> ModelInputs:
        """Return the keyword arguments of the model for a prepared batch.

        Args:
            batch: The prepared batch.
        """
        return {name: value for name, value in batch.items() if name not in self.targets}

    def answers(self, outputs: Any, classes: Sequence[str]) -> list[str]:
        """Convert the outputs of every row to the name of a class, or to a text.

        Args:
            outputs: Result of :meth:`predict`.
            classes: Names of the dataset's classes.

        Returns:
            One text per row.
        """
        raise NotImplementedError(f"{type(self).__name__} must define answers()")

    def respond(
        self, model: AdaptedModel, batch: Mapping[str, Tensor], classes: Sequence[str]
    ) -> list[str]:
        """Predict every row for users, as the name of a class or a text.

        By default, this is :meth:`answers` of :meth:`predict`. Override it if texts cost more to
        compute than scores.

        Args:
            model: The model, with parameters bound.
            batch: The prepared batch.
            classes: Names of the dataset's classes.

        Returns:
            One text per row.
        """
        return self.answers(self.predict(model, batch), classes)

    @property
    def means_rows(self) -> bool:
        """Whether the loss of a batch is the mean of the losses of its rows."""
        return True

    def count_labels(self, split: Split) -> np.ndarray | None:
        """Count the tokens of each encoded row that the loss includes.

        Args:
            split: The encoded split.

        Returns:
            [N]; None (the default) if the loss is not over tokens.
        """
        return None

    def remarks(self, split: Split) -> list[str]:
        """Describe the changes by the encoding in the rows of a split.

        Args:
            split: The encoded split.

        Returns:
            One text per kind of change, with its count.
        """
        return []

    def settings(self) -> Json:
        """Return the settings of inputs and outputs, as JSON values for ``task.json``."""
        return {}


#: Tasks, keyed by kind and the rows that they read, such as ``classification:text``.
TASKS = Registry[type[Task]]("task.kind", "task", "trishul_ray.tasks")

_T = TypeVar("_T", bound=type[Task])


def register(kind: str) -> Callable[[_T], _T]:
    """Register a task as ``task.kind=<kind>``.

    Tasks that read other rows may have the same kind.

    Args:
        kind: Name of the kind.

    Returns:
        A class decorator.
    """

    def add(cls: _T) -> _T:
        TASKS.add(f"{kind}:{cls.reads}", cls)
        return cls

    return add


def task_classes() -> Mapping[tuple[str, Kind], type[Task]]:
    """Return all registered tasks, keyed by kind and rows."""
    return {(name.partition(":")[0], cls.reads): cls for name, cls in TASKS.all().items()}


def metric_names() -> tuple[str, ...]:
    """Return the names of the metrics of all tasks, except for groups of rows."""
    found = [(*task.row_metrics, *task.joint_metrics) for task in task_classes().values()]
    of_classes = ("macro_f1", "positive_f1", "matthews")
    names = itertools.chain(*found, ("loss", *of_classes), client_metric_names())
    return tuple(dict.fromkeys(names))


def is_metric(name: str) -> bool:
    """Return whether any task can have a metric, also for a group of rows.

    Args:
        name: Name of a metric, such as ``f1`` or ``f1_squad``.
    """
    heads = {task.row_metrics[0] for task in task_classes().values()}
    return name in metric_names() or any(name.startswith(f"{head}_") for head in heads)


def task_kinds() -> tuple[str, ...]:
    """Return the allowed values of ``task.kind``: ``auto``, and all registered kinds."""
    return ("auto", *sorted({kind for kind, _ in task_classes()}))


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's output.

    Args:
        outputs: A tensor, or an object with an attribute ``logits``.

    Raises:
        TypeError: The logits are not a tensor.
    """
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"expected logits as a tensor, got {type(logits).__name__}")
    return logits


def to_device(batch: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Copy a batch to a device, without waiting for the device.

    A copy to a GPU starts from page-locked memory; from other memory, the host would have to wait
    until the GPU has completed all earlier work.

    Args:
        batch: Tensors, keyed by name.
        device: The device.

    Returns:
        The tensors on ``device``, keyed by name.
    """
    if torch.device(device).type == "cpu":
        return dict(batch)
    return {name: value.pin_memory().to(device, non_blocking=True) for name, value in batch.items()}


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a cached tensor, which is copied to its device only once; do not write to it.

    Args:
        values: The entries.
        dtype: Dtype of the tensor.
        device: Device of the tensor.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def group_column(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the stored columns ``group`` and ``client`` [b], if present; they stay on the CPU.

    Args:
        batch: The stored rows.
    """
    return {name: batch[name] for name in ("group", "client") if name in batch}


def predict_class(logits: Tensor) -> Tensor:
    """Return the predicted class of every row.

    Args:
        logits: [b, K].

    Returns:
        int64 [b]; -1 for rows whose logits are not finite.
    """
    return logits.argmax(dim=-1).where(logits.isfinite().all(dim=-1), -1)


class Classification(Task):
    """Base class of tasks that predict one of K classes from logits [b, K]."""

    targets = ("labels", "group", "client")

    @property
    def classes(self) -> int | None:
        """Number of classes, K."""
        return self.num_classes

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean cross-entropy of logits [b, K], in float32."""
        return torch.nn.functional.cross_entropy(logits_of(outputs).float(), batch["labels"])

    def class_logits(self, outputs: Any) -> Tensor:
        """Return the logits of the classes [b, K]; the largest is the prediction.

        Args:
            outputs: Result of :meth:`predict`.
        """
        return logits_of(outputs)

    def answers(self, outputs: Any, classes: Sequence[str]) -> list[str]:
        """Return the name of the predicted class of every row."""
        return [classes[k] for k in self.class_logits(outputs).argmax(dim=1).tolist()]

    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        """Compute cross-entropy and accuracy of every row; see :func:`score_classes`."""
        return score_classes(logits_of(outputs), batch["labels"])


def score_classes(logits: Tensor, labels: Tensor, class_columns: Tensor | None = None) -> RowScores:
    """Compute cross-entropy, ``accuracy`` and class of every row.

    A row whose logits are not finite counts as wrong, because argmax would predict class 0 for NaN.

    Args:
        logits: [b, K] of any float dtype; the loss is computed in float32.
        labels: int64 [b].
        class_columns: int64 [classes], the column of each class if K is a vocabulary. The loss is
            over all K columns, the prediction only among these columns. None means that column k is
            class k.

    Returns:
        The scores of every row.
    """
    logits = logits.float()
    choices = logits if class_columns is None else logits[:, class_columns]
    columns = labels if class_columns is None else class_columns[labels]
    losses = torch.nn.functional.cross_entropy(logits, columns, reduction="none")
    predicted = predict_class(choices)
    scores = {"accuracy": predicted == labels}
    return RowScores(losses, scores, predicted=predicted, labels=labels)
