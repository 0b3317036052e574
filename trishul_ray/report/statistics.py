"""Significance tests: between the rows of a table, and between two models on the same rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: Family-wise significance level of a table.
ALPHA = 0.05
#: Decimals to round differences to, in the unit of the table; smaller ones are rounding errors.
_DECIMALS = 9


@dataclass(frozen=True)
class Comparison:
    """Comparison of a row with the best row of its group, over repetitions and columns of both.

    Attributes:
        difference: Mean of the row minus the mean of the best row.
        repetitions: Number of seeds or draws that both rows have.
        p_value: Adjusted for all pairs of rows of the table, or None if the deviation is zero.
    """

    difference: float
    repetitions: int
    p_value: float | None

    @property
    def decided(self) -> bool:
        """Whether the row is significantly worse than the best row."""
        return self.p_value is not None and self.p_value <= ALPHA and self.difference < 0


#: Position of the best row of a group, and comparisons keyed by the positions of the other rows.
#: The position is None if fewer than two rows have values in common.
GroupComparison = tuple[int | None, dict[int, Comparison]]


def compare_rows(groups: Sequence["DataFrame"]) -> tuple[list[GroupComparison], int]:
    """Compare each row of a table with the best row of its group.

    Uses Student's paired t-test on the differences per repetition, averaged over columns. Holm's
    method corrects the p-values for all pairs of rows of the table, because the best row is
    selected from the same numbers. The probability that *any* row of a table is wrongly reported as
    worse is at most :data:`ALPHA`. P-values are not corrected across tables.

    Args:
        groups: Values of each group [rows, (column, repetition)]. Larger is better; NaN marks
            missing values.

    Returns:
        The comparisons of each group, and the number of pairs corrected for.
    """
    found = [_compare_group(values) for values in groups]
    counts = [int(values.notna().any(axis=1).sum()) for values in groups]
    pairs = sum(math.comb(n, 2) for n, (_, rows) in zip(counts, found, strict=True) if rows)
    tests = [
        (each.p_value, group, row)
        for group, (_, rows) in enumerate(found)
        for row, each in rows.items()
        if each.p_value is not None
    ]
    adjusted = 0.0
    for rank, (p_value, group, row) in enumerate(sorted(tests)):
        adjusted = max(adjusted, min(1.0, p_value * (pairs - rank)))
        rows = found[group][1]
        rows[row] = replace(rows[row], p_value=adjusted)
    return found, pairs


def _compare_group(values: "DataFrame") -> GroupComparison:
    """Compare the rows of a group, without correcting p-values.

    The best row is the row with the largest mean among the rows with the most values.
    """
    counts = values.notna().sum(axis=1)
    common = values[(counts == counts.max()) & (counts > 0)].dropna(axis=1)
    if (counts > 0).sum() < 2 or common.empty:
        return None, {}
    best = int(common.mean(axis=1).round(_DECIMALS).idxmax())
    compared = {
        int(row): each
        for row in values.index
        if row != best and (each := _compare(values.loc[row] - values.loc[best])) is not None
    }
    return best, compared


def _compare(differences: "Series") -> Comparison | None:
    """Compare a row with the best row, given differences indexed by (column, repetition)."""
    repeated = differences.unstack(0).dropna(axis=1, how="all").dropna(axis=0)
    if repeated.empty:
        return None
    paired = repeated.mean(axis=1).round(_DECIMALS).to_numpy()
    p_value = float(stats.ttest_1samp(paired, 0.0).pvalue) if np.ptp(paired) else None
    return Comparison(float(paired.mean()), len(paired), p_value)


@dataclass(frozen=True)
class ScoreComparison:
    """Comparison of two runs on the same test rows.

    Attributes:
        rows: Number of test rows.
        difference: Mean score of the first run minus the mean score of the second.
        interval: 95% confidence interval of the difference over test rows. It does not include the
            deviation between seeds.
        p_value: Two-sided p-value: McNemar's exact test if all scores are 0 or 1, otherwise
            Student's paired t-test.
        first_better: Number of rows on which the first run has the higher score.
        second_better: Number of rows on which the second run has the higher score.
    """

    rows: int
    difference: float
    interval: tuple[float, float]
    p_value: float
    first_better: int
    second_better: int


def compare_scores(first: ArrayLike, second: ArrayLike) -> ScoreComparison:
    """Compare the scores of two models on the same test rows.

    Args:
        first: Scores of the first model in [0, 1], [rows], with at least two rows.
        second: Scores of the second model in [0, 1], [rows].
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    rows, mean = len(differences), float(differences.mean())
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        different = better + worse
        p_value = float(stats.binomtest(better, different).pvalue) if different else 1.0
        # If the models differ on few rows, the deviation of the differences is too small, or 0.
        # Therefore, count one more row on each side (adjusted Wald interval, Bonett & Price 2012).
        p, q = (better + 1) / (rows + 2), (worse + 1) / (rows + 2)
        half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / (rows + 2))
        low, high = max(-1.0, p - q - half), min(1.0, p - q + half)
    elif np.ptp(differences):
        test = stats.ttest_1samp(differences, 0.0)
        low, high = test.confidence_interval(0.95)
        p_value = float(test.pvalue)
    else:
        low, high, p_value = mean, mean, 0.0
    return ScoreComparison(rows, mean, (float(low), float(high)), p_value, better, worse)
