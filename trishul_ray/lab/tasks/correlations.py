"""Pearson and Spearman correlations as metrics; the process that computes them needs no model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trishul_ray.tasks.sums import EvalSums, Metrics


@dataclass(frozen=True)
class Correlations(Metrics):
    """Row metrics, and the correlations of predictions and labels over all rows.

    :attr:`~trishul_ray.tasks.sums.RowScores.kept` contains the prediction and the label of each
    row.
    """

    correlations: ClassVar[tuple[str, ...]] = ("pearson", "spearman")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all metrics, including correlations that :meth:`merge` omits if undefined."""
        return (*super().names, *self.correlations)

    def merge(self, parts: Sequence[EvalSums]) -> dict[str, float]:
        """Compute the metrics from the sums of all batches.

        Raises:
            ValueError: No rows were evaluated.
        """
        from scipy.stats import pearsonr, spearmanr

        found = super().merge(parts)
        pairs = EvalSums.total(parts).kept
        # A correlation is undefined if all predictions or all labels are equal, or one is infinite
        # or NaN.
        if all(0 < spread < math.inf for spread in np.ptp(pairs, axis=0)):
            for name, correlate in zip(self.correlations, (pearsonr, spearmanr), strict=True):
                found[name] = float(correlate(*pairs.T).statistic)
        return found
