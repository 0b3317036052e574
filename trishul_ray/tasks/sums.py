"""Sums over scored rows, and the metrics computed from the sums of all batches.

This module does not need a model: workers compute sums, the coordinator adds them and computes the
means. Addition is exactly rounded, so metrics do not depend on the distribution of rows over
batches and workers.

Legend: b rows of a batch, G groups of rows, K classes, C clients, n of them with rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.names import free_name

if TYPE_CHECKING:
    from torch import Tensor

_C = TypeVar("_C", int, str)

#: Maximum length of the name of a group's metric, without a number; MLflow accepts 250 characters
#: in total.
MAX_NAME = 200


@dataclass(frozen=True)
class RowScores:
    """Scores of every row of a batch.

    Attributes:
        loss: [b], the loss of each row, summed over its terms.
        scores: [b], keyed by name of the metric, which is their mean.
        terms: [b], the number of terms (tokens of the target) of each row's loss; None means one
            per row.
        predicted: int64 [b], the predicted class of each row, negative without a prediction; None
            for a task without classes.
        labels: int64 [b], the true class of each row; set together with ``predicted``.
        kept: [b, m], values of each row that a metric of all rows needs one by one; None for a task
            without such metrics.

    Example:
        >>> rows = RowScores(torch.tensor([0.5, 1.5]), {"accuracy": torch.tensor([1.0, 0.0])})
        >>> sums = EvalSums.of(rows, Metrics(("accuracy",)), {})
        >>> Metrics(("accuracy",)).merge([sums])
        {'loss': 1.0, 'accuracy': 0.5}
    """

    loss: Tensor
    scores: Mapping[str, Tensor]
    terms: Tensor | None = None
    predicted: Tensor | None = None
    labels: Tensor | None = None
    kept: Tensor | None = None


def _no_rows(*shape: int) -> np.ndarray:
    return np.zeros(shape)


@dataclass(frozen=True)
class EvalSums:
    """Sums over rows, in float64.

    Attributes:
        loss: Sum of the losses.
        terms: Number of terms of the loss, of which the loss is the mean.
        count: Number of rows.
        scores: Sum of each score, keyed by name of its metric.
        by_group: [G, 2], sum of the primary metric's scores and number of rows of each group.
        clients: int64 [n], the clients that the rows belong to, ascending.
        by_client: [n, 2], sum of the primary metric's scores and number of rows of each client.
        by_class: [K, 3], number of rows labeled, predicted and correctly predicted as each class.
        kept: [rows, m], :attr:`RowScores.kept` of all rows, sorted; no rows without it.
    """

    loss: float
    terms: float
    count: float
    scores: Mapping[str, float]
    by_group: np.ndarray = field(default_factory=lambda: _no_rows(0, 2))
    clients: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    by_client: np.ndarray = field(default_factory=lambda: _no_rows(0, 2))
    by_class: np.ndarray = field(default_factory=lambda: _no_rows(0, 3))
    kept: np.ndarray = field(default_factory=lambda: _no_rows(0, 0))

    @classmethod
    def of(cls, rows: RowScores, metrics: Metrics, batch: Mapping[str, Tensor]) -> EvalSums:
        """Sum the rows of a batch.

        On a GPU, every copy to the host makes it wait.

        Args:
            rows: Scores of the rows.
            metrics: Metrics of the task.
            batch: The prepared batch. Its optional keys ``group`` and ``client`` [b] assign the
                rows.

        Returns:
            The sums.
        """
        scores = {name: _on_host(values) for name, values in rows.scores.items()}
        primary = scores[metrics.primary_metric]
        count = float(len(primary))
        group = batch["group"].cpu() if "group" in batch else primary.new_full((len(primary),), -1)
        client = batch["client"].cpu() if "client" in batch else primary.new_zeros(0)
        clients = np.unique(client.numpy()).astype(np.int64)
        return cls(
            loss=float(_on_host(rows.loss).sum()),
            terms=count if rows.terms is None else float(_on_host(rows.terms).sum()),
            count=count,
            scores={name: float(values.sum()) for name, values in scores.items()},
            by_group=_sums_where([group == g for g in range(len(metrics.groups))], primary),
            clients=clients,
            by_client=_sums_where([client == int(c) for c in clients], primary),
            by_class=_count_classes(rows, metrics.classes or 0),
            kept=_no_rows(0, 0) if rows.kept is None else _on_host(rows.kept).numpy(),
        )

    @classmethod
    def total(cls, parts: Sequence[EvalSums]) -> EvalSums:
        """Add sums with exact rounding, so that the result does not depend on the order.

        Args:
            parts: Sums of all batches.

        Returns:
            The total.

        Raises:
            ValueError: No rows were evaluated.
        """
        count = math.fsum(part.count for part in parts)
        if count == 0:
            raise ValueError("no rows were evaluated")
        owners = np.concatenate([part.clients for part in parts])
        owned = np.concatenate([part.by_client for part in parts])
        clients = np.unique(owners)
        kept = np.concatenate([part.kept for part in parts])
        return cls(
            loss=math.fsum(part.loss for part in parts),
            terms=math.fsum(part.terms for part in parts),
            count=count,
            scores={
                name: math.fsum(part.scores[name] for part in parts) for name in parts[0].scores
            },
            by_group=_add_exactly([part.by_group for part in parts]),
            clients=clients,
            by_client=np.array([_add_exactly(owned[owners == c]) for c in clients]).reshape(-1, 2),
            by_class=_add_exactly([part.by_class for part in parts]),
            kept=kept[np.lexsort(kept.T)] if kept.size else kept,
        )


def _on_host(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)


def _sums_where(members: Sequence[Tensor], scores: Tensor) -> np.ndarray:
    """Sum the scores [b], and count the rows, of each set of members, [sets, 2]."""
    chosen = [scores[member] for member in members]
    return np.array([(float(part.sum()), float(len(part))) for part in chosen]).reshape(-1, 2)


def _count_classes(rows: RowScores, classes: int) -> np.ndarray:
    if rows.predicted is None or rows.labels is None:
        return _no_rows(0, 3)
    predicted, labels = torch.stack((rows.predicted, rows.labels)).cpu().numpy()
    counted = (labels, predicted[predicted >= 0], labels[predicted == labels])
    counts = [np.bincount(values, minlength=classes) for values in counted]
    return np.stack(counts, axis=1).astype(np.float64)


def _add_exactly(arrays: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Add arrays of one shape, exactly rounded in every cell."""
    cells = np.stack(list(arrays))
    added = [math.fsum(column) for column in cells.reshape(len(cells), -1).T]
    return np.array(added).reshape(cells.shape[1:])


@dataclass(frozen=True)
class Metrics:
    """Metrics of a task, computed from sums, for a process without a model.

    Attributes:
        scores: Names of the scores of a row, whose means are metrics; the primary metric first.
        groups: Names of groups of rows. Each has a separate primary metric.
        classes: K; None for a task without classes.
    """

    scores: tuple[str, ...]
    groups: tuple[str, ...] = ()
    classes: int | None = None

    @property
    def primary_metric(self) -> str:
        """The primary metric, in [0, 1]; higher is better."""
        return self.scores[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all metrics, the primary one first; :meth:`merge` omits groups without rows."""
        of_classes: tuple[str, ...] = ()
        if self.classes is not None:
            of_classes = ("macro_f1",)
        if self.classes == 2:
            of_classes = (*of_classes, "positive_f1", "matthews")
        by_group = group_metrics(self.primary_metric, self.groups)
        return (self.primary_metric, "loss", *of_classes, *self.scores[1:], *by_group)

    def merge(self, parts: Sequence[EvalSums]) -> dict[str, float]:
        """Compute the metrics from the sums of all batches.

        Args:
            parts: Sums of all batches.

        Returns:
            The metrics with at least one row, keyed by name.

        Raises:
            ValueError: No rows were evaluated.
        """
        total = EvalSums.total(parts)
        found = {"loss": total.loss / total.terms}
        found |= {name: total.scores[name] / total.count for name in self.scores}
        if self.classes is not None:
            found["macro_f1"] = macro_f1(total)
        if self.classes == 2:
            found |= {"positive_f1": positive_f1(total), "matthews": matthews(total)}
        by_group = group_metrics(self.primary_metric, self.groups)
        for name, (score, count) in zip(by_group, total.by_group.tolist(), strict=True):
            if count:
                found[name] = score / count
        return found

    def recall(self, parts: Sequence[EvalSums]) -> list[float | None]:
        """Compute the recall of every class.

        Args:
            parts: Sums of all batches.

        Returns:
            The recall, or None for a class without rows; empty for a task without classes.
        """
        cells = EvalSums.total(parts).by_class.tolist()
        return [correct / labeled if labeled else None for labeled, _, correct in cells]

    def by_client(self, parts: Sequence[EvalSums]) -> dict[int, float]:
        """Compute the primary metric of every client with rows.

        Args:
            parts: Sums of all batches.

        Returns:
            The metric, keyed by client.
        """
        total = EvalSums.total(parts)
        cells = zip(total.clients.tolist(), total.by_client.tolist(), strict=True)
        return {client: score / count for client, (score, count) in cells}


def group_metrics(primary_metric: str, groups: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the primary metric for groups.

    They contain letters of any script and digits, as MLflow accepts; equal names are numbered.

    Args:
        primary_metric: Name of the primary metric, such as ``f1``.
        groups: Names of the groups, such as ``SQuAD``.

    Returns:
        The names, such as ``f1_squad``.
    """
    found: dict[str, None] = {}
    for group in groups:
        letters = re.sub(r"[\W_]+", "_", group.lower())
        found[free_name(f"{primary_metric}_{letters}"[:MAX_NAME], found)] = None
    return tuple(found)


def macro_f1(sums: EvalSums) -> float:
    """Compute the mean F1 of the classes that are labeled or predicted in the rows.

    Args:
        sums: Sums over the rows.
    """
    cells = [cell for cell in sums.by_class.tolist() if cell[0] or cell[1]]
    scores = [2 * correct / (labeled + predicted) for labeled, predicted, correct in cells]
    return math.fsum(scores) / len(scores)


def positive_f1(sums: EvalSums) -> float:
    """Return the F1 of the second of two classes; 0 if it is neither labeled nor predicted."""
    labeled, predicted, correct = sums.by_class[1].tolist()
    return 2 * correct / (labeled + predicted) if labeled + predicted else 0.0


def matthews(sums: EvalSums) -> float:
    """Return the Matthews correlation of labels and predictions of two classes, in [-1, 1].

    A row without a predicted class counts as predicted in a third class, by the formula for several
    classes: J. Gorodkin, "Comparing two K-category assignments by a K-category correlation
    coefficient", 2004. The correlation is 0 if all rows have one label or one prediction.
    """
    labeled, predicted, correct = sums.by_class.T
    rows = labeled.sum()
    covariance = rows * correct.sum() - labeled @ predicted
    predicted = np.append(predicted, rows - predicted.sum())
    spread = (rows**2 - labeled @ labeled) * (rows**2 - predicted @ predicted)
    return float(covariance / math.sqrt(spread)) if spread else 0.0


def score_by_mix(recall: Sequence[float | None], mix: np.ndarray) -> dict[int, float]:
    """Compute each client's accuracy on test rows with the class mix of the client.

    Args:
        recall: See :meth:`Metrics.recall`; classes without test rows are removed from the mix.
        mix: [C, K], number of training rows per client and class.

    Returns:
        The accuracy, keyed by client.
    """
    known = np.array([value is not None for value in recall])
    values = np.array([value or 0.0 for value in recall])
    weights = mix * known
    totals = weights.sum(axis=1)
    means = weights @ values / np.maximum(totals, 1)
    return {c: float(means[c]) for c in range(len(mix)) if totals[c]}


def summarize_clients(name: str, scores: Mapping[Any, float]) -> dict[str, float]:
    """Summarize the distribution of a score over the clients.

    Args:
        name: Name of the score.
        scores: The score of each client.

    Returns:
        ``<name>_mean``, ``<name>_sd`` (of all clients, not of a sample), ``<name>_worst_decile``
        and ``<name>_best_decile`` (means of the lowest and the highest tenth), ``<name>_min`` and
        ``<name>_gini`` (mean difference of two random clients over twice the mean).

    Example:
        >>> summarize_clients("per_client", {0: 0.5, 1: 1.0})["per_client_mean"]
        0.75
    """
    ordered = sorted(scores.values())
    count, total = len(ordered), math.fsum(ordered)
    mean, tenth = total / count, max(1, math.ceil(count / 10))
    ranks = math.fsum((2 * rank - count + 1) * value for rank, value in enumerate(ordered))
    return {
        f"{name}_mean": mean,
        f"{name}_worst_decile": math.fsum(ordered[:tenth]) / tenth,
        f"{name}_best_decile": math.fsum(ordered[-tenth:]) / tenth,
        f"{name}_min": ordered[0],
        f"{name}_sd": math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / count),
        f"{name}_gini": ranks / (count * total) if total else 0.0,
    }


@cache
def client_metric_names() -> tuple[str, ...]:
    """Return all names that :func:`client_metrics` may return."""
    scores = {0: 1.0, 1: 0.5, 2: 0.0}
    # The last client is held out, and counted in no round.
    return tuple(client_metrics(scores, scores, {0: 2, 1: 1}))


def client_metrics(
    per_client: Mapping[_C, float], personal: Mapping[_C, float], rounds: Mapping[_C, int]
) -> dict[str, float]:
    """Summarize the scores of clients; undefined numbers are omitted.

    Args:
        per_client: Score of the global model on each client's rows.
        personal: Score of each client's personalized model; empty if clients keep no part of the
            model.
        rounds: Number of rounds in which each client that may take part counted; empty if unknown.

    Returns:
        :func:`summarize_clients` of both, which are equal without personalized models. With
        personalized models, over the clients that took part: ``personal_gain``, the mean of
        personal minus global, and ``personal_hurt``, the fraction of clients with a negative
        difference. ``participation_correlation`` of rounds and the score of the client's model.
        ``never_sampled_mean``: the global model's mean over clients that counted in no round.
        ``participation_gap``: its mean over clients that may take part minus its mean over held-out
        clients.
    """

    def mean(clients: Iterable[_C]) -> float:
        scores = [per_client[client] for client in clients]
        return math.fsum(scores) / len(scores)

    found = summarize_clients("per_client", per_client)
    found |= summarize_clients("personal", personal or per_client)
    gains = [own - per_client[c] for c, own in personal.items() if not rounds or rounds.get(c)]
    if gains:
        found["personal_gain"] = math.fsum(gains) / len(gains)
        found["personal_hurt"] = sum(gain < 0 for gain in gains) / len(gains)
    if not rounds:
        return found
    members = [client for client in per_client if client in rounds]
    pairs = np.array([(rounds[c], (personal or per_client)[c]) for c in members]).reshape(-1, 2)
    if len(pairs) > 1 and (np.ptp(pairs, axis=0) > 0).all():
        found["participation_correlation"] = float(np.corrcoef(pairs.T)[0, 1])
    if never := [client for client in per_client if not rounds.get(client)]:
        found["never_sampled_mean"] = mean(never)
    if members and (out := [client for client in per_client if client not in rounds]):
        found["participation_gap"] = mean(members) - mean(out)
    return found
