"""Scores by class and by client, from sums over batches of test rows.

Shapes: b rows of a batch, K classes, C clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trishul_ray.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Sums of one batch, by name.
Sums = Mapping[str, float]


def class_counts(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Count the rows of every class that occurs: ``labelled/k``, ``predicted/k`` and ``hit/k``.

    Args:
        predicted: Class of each row, int64 [b]; negative where no class was predicted.
        labels: True class of each row, int64 [b].
    """
    counts: Counter[str] = Counter()
    # One copy to the host for both: on a GPU each is a wait.
    for said, true in torch.stack((predicted, labels), dim=1).cpu().tolist():
        counts[f"labelled/{true}"] += 1
        if said >= 0:
            counts[f"predicted/{said}"] += 1
        if said == true:
            counts[f"hit/{true}"] += 1
    return {name: float(count) for name, count in counts.items()}


def _by_number(sums: Sequence[Sums], prefix: str) -> dict[int, float]:
    """Return the total of the sums ``<prefix>/<number>``, by number, exactly rounded."""
    parts: dict[int, list[float]] = {}
    for part in sums:
        for name, value in part.items():
            kind, _, number = name.rpartition("/")
            if kind == prefix:
                parts.setdefault(int(number), []).append(value)
    return {number: math.fsum(values) for number, values in parts.items()}


def recall_by_class(sums: Sequence[Sums], classes: int) -> list[float | None]:
    """Return the share of every class's rows that is predicted as it; None for one without rows."""
    labelled, hits = _by_number(sums, "labelled"), _by_number(sums, "hit")
    return [hits.get(k, 0.0) / labelled[k] if labelled.get(k) else None for k in range(classes)]


def macro_f1(sums: Sequence[Sums]) -> float:
    """Return the mean F1 of the classes that are labelled or predicted in the rows."""
    labelled, predicted = _by_number(sums, "labelled"), _by_number(sums, "predicted")
    hits = _by_number(sums, "hit")
    scores = [
        2 * hits.get(k, 0.0) / (labelled.get(k, 0.0) + predicted.get(k, 0.0))
        for k in sorted(labelled.keys() | predicted.keys())
    ]
    return math.fsum(scores) / len(scores)


def client_counts(score: Tensor, by: str, clients: Tensor) -> dict[str, float]:
    """Sum a score [b] by client [b], ``<by>/client/<c>``, and count rows, ``count/client/<c>``."""
    sums: dict[str, float] = {}
    score, clients = score.cpu(), clients.cpu()
    for client in sorted(set(clients.tolist())):
        chosen = score[clients == client]
        sums[f"{by}/client/{client}"] = float(chosen.sum())
        sums[f"count/client/{client}"] = float(len(chosen))
    return sums


def score_by_client(sums: Sequence[Sums], by: str) -> dict[int, float]:
    """Return the mean of score ``by`` over the test rows of every client that has any."""
    totals, counts = _by_number(sums, f"{by}/client"), _by_number(sums, "count/client")
    return {client: totals[client] / counts[client] for client in sorted(counts)}


def score_by_mix(recall: Sequence[float | None], mix: np.ndarray) -> dict[int, float]:
    """Return the accuracy that every client has on test rows of its own class mix.

    Args:
        recall: See :func:`recall_by_class`; classes without test rows are left out of the mix.
        mix: Training rows of every client and class, [C, K].
    """
    known = np.array([value is not None for value in recall])
    values = np.array([value or 0.0 for value in recall])
    weights = mix * known
    totals = weights.sum(axis=1)
    means = weights @ values / np.maximum(totals, 1)
    return {c: float(means[c]) for c in range(len(mix)) if totals[c]}


def summarize_clients(name: str, scores: Mapping[int, float]) -> dict[str, float]:
    """Return the mean over the clients, and over the tenth of them with the lowest scores.

    They are ``<name>_mean`` and ``<name>_worst_decile``.
    """
    ordered = sorted(scores.values())
    worst = ordered[: max(1, math.ceil(len(ordered) / 10))]
    return {
        f"{name}_mean": math.fsum(ordered) / len(ordered),
        f"{name}_worst_decile": math.fsum(worst) / len(worst),
    }
