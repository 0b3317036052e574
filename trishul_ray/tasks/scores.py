"""Sums over the rows of a batch, whole and by group, and the metrics they merge to.

Legend of shapes: b rows, K classes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from trishul_ray.tasks.base import group_metric, total


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
