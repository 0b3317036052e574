"""Pearson's and Spearman's correlation as metrics, for a process without a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trishul_ray.tasks.sums import EvalSums, Metrics


@dataclass(frozen=True)
class Correlations(Metrics):
    """Metrics of rows, and the correlations of predictions and labels over all rows.

    :attr:`~trishul_ray.tasks.sums.RowScores.kept` has both numbers of each row.
    """

    #: Names of the correlations.
    correlations: ClassVar[tuple[str, ...]] = ("pearson", "spearman")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all metrics; :meth:`merge` omits correlations that are not defined."""
        return (*super().names, *self.correlations)

    def merge(self, parts: Sequence[EvalSums]) -> dict[str, float]:
        """Return the metrics from the sums of all batches.

        Raises:
            ValueError: No rows were evaluated.
        """
        from scipy.stats import pearsonr, spearmanr

        found = super().merge(parts)
        pairs = EvalSums.total(parts).kept
        # Not defined if all predictions or all labels are equal, or one is not finite.
        if all(0 < spread < math.inf for spread in np.ptp(pairs, axis=0)):
            for name, correlate in zip(self.correlations, (pearsonr, spearmanr), strict=True):
                found[name] = float(correlate(*pairs.T).statistic)
        return found
