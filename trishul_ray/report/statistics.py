"""Statistics of a table: means, intervals, and rows that are worse than the best.

Arrays of a group of rows are [rows, seeds, columns], oriented so that larger is better, NaN where a
run is not finished. Everything here is a pure function of its numbers: the same table gives the
same decisions.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special
from scipy.sparse import csgraph

#: Chance that a table without any true difference shows one as decided.
ALPHA = 0.05
#: Chance with which :attr:`Comparison.seeds_needed` decide a row.
POWER = 0.8
#: :attr:`Comparison.seeds_needed` looks no further.
MAX_SEEDS = 100
#: Differences below this, in the unit of the table, are rounding errors of the subtraction.
_DECIMALS = 9

Array = NDArray[np.float64]
#: Indices of seeds and columns.
Block = tuple[NDArray[np.intp], NDArray[np.intp]]


@dataclass(frozen=True)
class Estimate:
    """Mean over ``count`` seeds, and their standard deviation; None for one seed."""

    mean: float
    deviation: float | None
    count: int

    def interval(self, of: int = 1) -> tuple[float, float] | None:
        """Return Student's 95 % interval of the mean; None for one seed.

        As one ``of`` several, each is so wide that all hold together in 95 % (Bonferroni).
        """
        if self.deviation is None:
            return None
        half = (
            float(special.stdtrit(self.count - 1, 1 - ALPHA / (2 * of)))
            * self.deviation
            / self.count**0.5
        )
        return self.mean - half, self.mean + half


def decimals_for(values: Iterable[float], least: int) -> int:
    """Return how many decimals show two digits of the largest of some values, at least ``least``.

    A value below 1e-9 is a rounding error.
    """
    largest = max(map(abs, values), default=0.0)
    return max(least, 1 - math.floor(math.log10(largest))) if largest >= 1e-9 else least


def with_sign(value: float, decimals: int) -> str:
    """Return a difference as text, with its sign; one that is displayed as 0 has none."""
    size = f"{abs(value):.{decimals}f}"
    return size if float(size) == 0 else f"{'−' if value < 0 else '+'}{size}"


def estimate(values: ArrayLike) -> Estimate | None:
    """Return mean and spread over seeds [seeds], NaN left out; None if nothing is left."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return None
    if not np.ptp(numbers):  # else rounding of the mean gives equal values a spread
        return Estimate(float(numbers[0]), 0.0 if numbers.size > 1 else None, int(numbers.size))
    return Estimate(float(numbers.mean()), float(numbers.std(ddof=1)), int(numbers.size))


@dataclass(frozen=True)
class ScoreComparison:
    """Comparison of two runs on the same test rows.

    Attributes:
        difference: Mean score of the first minus that of the second.
        interval: 95 % interval of the difference over rows: what other rows could have shown of
            these two models. The spread between seeds is not in it.
        p_value: Two-sided: McNemar's exact test of rows that one of the two got right, or
            Student's test of the paired differences where scores are not only 0 and 1.
        first_better: Number of rows on which the first has the higher score.
    """

    rows: int
    difference: float
    interval: tuple[float, float]
    p_value: float
    first_better: int
    second_better: int


def compare_scores(first: ArrayLike, second: ArrayLike) -> ScoreComparison:
    """Compare the scores in [0, 1] of two models on the same rows [rows], at least two."""
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    differences = one - other
    rows, mean = len(differences), float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(rows)
    half = error * float(special.stdtrit(rows - 1, 0.975))
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    low, high = mean - half, mean + half
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        p_value = min(1.0, 2 * float(special.bdtr(min(better, worse), better + worse, 0.5)))
        # If few rows tell the two apart, the deviation of the differences is too small, or 0: count
        # one more row on each side (Bonett and Price 2012, adjusted Wald interval).
        p, q = (better + 1) / (rows + 2), (worse + 1) / (rows + 2)
        half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / (rows + 2))
        low, high = max(-1.0, p - q - half), min(1.0, p - q + half)
    elif error:
        p_value = 2 * float(special.stdtr(rows - 1, -abs(mean) / error))
    else:
        p_value = float(mean == 0)
    return ScoreComparison(rows, mean, (low, high), p_value, better, worse)


@dataclass(frozen=True)
class Comparison:
    """Comparison of a row with the best row of its group, over the runs that both have.

    Attributes:
        difference: Mean of the row minus that of the best.
        p_value: Adjusted for all pairs of the table; None if the seeds show no spread.
        threshold: The smallest difference that would be decided with this spread; None likewise.
        seeds_needed: For an undecided row, from how many to how many seeds decide it with a chance
            of :data:`POWER`, if the difference is truly the one seen: the two numbers are for both
            ends of the 95 % interval of the spread. :data:`MAX_SEEDS` + 1 stands for more than
            :data:`MAX_SEEDS`; None if the row is decided, or no spread or difference is seen.
    """

    difference: float
    seeds: int
    columns: int
    p_value: float | None
    threshold: float | None
    seeds_needed: tuple[int, int] | None

    @property
    def decided(self) -> bool:
        """Whether the row is worse than the best."""
        # With missing runs, a row may be ahead of the best over the runs that both have.
        return self.p_value is not None and self.p_value <= ALPHA and self.difference < 0


@dataclass(frozen=True)
class GroupComparison:
    """A group of rows compared with its best, that with the best mean.

    There is no best if fewer than two rows have numbers, and no comparison for the best and for
    rows that share no seed and column with it.
    """

    best: int | None
    rows: tuple[Comparison | None, ...]


@dataclass(frozen=True)
class TableComparison:
    """The groups of a table, compared; and the number of pairs of rows that the level is for."""

    groups: tuple[GroupComparison, ...]
    pairs: int


@dataclass(frozen=True)
class _Family:
    """Values that a table compares, [rows, seeds, columns], of its distinct groups and rows.

    ``pairs`` counts pairs of rows within groups, ``rivals`` rows beside the best of their group.
    """

    groups: tuple[Array, ...]
    pairs: int
    rivals: int


def compare_rows(groups: Sequence[Array]) -> TableComparison:
    """Compare each row of a table with the best row of its group.

    The means over columns of each seed are compared, by paired differences: what a seed gives all
    rows does not matter, and what a seed gives a row in all columns is part of the spread. A row is
    *decided* to be worse if two tests agree, and its p-value is the larger of theirs:

    1. Student's test with the variance *pooled* over all rows of the table: that of the residuals
       of an additive fit of rows and seeds, which has (rows - 1)(seeds - 1) degrees of freedom
       instead of seeds - 1. It is adjusted for all pairs of rows of the table (Bonferroni), since
       the best row is chosen by looking at the numbers.
    2. The same with the pair's *own* variance, adjusted for the rows that are compared with a best
       one. It guards the first against rows of unequal spread: where one row is noisier than the
       others, the pooled variance is too small for it.

    The level holds for the table: the chance that *any* of its rows is wrongly called worse is at
    most :data:`ALPHA`. A table is judged alone, so that its verdicts do not change with what else
    is on a page. ``benchmarks/decisions.py`` simulates whole pages, with equal and unequal spreads.
    Tukey's studentized range instead of Bonferroni's correction decides one comparison in a
    thousand more.

    Args:
        groups: Values [rows, seeds, columns] of each group; seeds and columns are those of the
            table. Equal groups, and equal rows of a group, are the same runs: they count once.
    """
    best_rows = [best_row(values) for values in groups]
    compared = [v for v, best in zip(groups, best_rows, strict=True) if best is not None]
    known = [values[np.isfinite(values).any(axis=(1, 2))] for values in compared]
    unique = _distinct(np.stack(_distinct(values)) for values in known)
    family = _Family(
        tuple(unique),
        sum(math.comb(len(rows), 2) for rows in unique),
        sum(len(rows) - 1 for rows in unique),
    )
    result = []
    for values, best in zip(groups, best_rows, strict=True):
        rows = (
            None if best is None or row == best else _compare(values[row] - values[best], family)
            for row in range(len(values))
        )
        result.append(GroupComparison(best, tuple(rows)))
    return TableComparison(tuple(result), family.pairs)


def _distinct(arrays: Iterable[Array]) -> list[Array]:
    return list({array.tobytes(): array for array in arrays}.values())


def _compare(differences: Array, family: _Family) -> Comparison | None:
    """Compare a row with the best, given their paired differences [seeds, columns]."""
    place = complete_block(np.isfinite(differences))
    seeds, columns = (len(indices) for indices in place)
    if not seeds:
        return None
    paired = np.round(differences[np.ix_(*place)].mean(axis=1), _DECIMALS)
    difference = round(float(paired.mean()), _DECIMALS) + 0.0
    pooled, freedom = _pooled_deviation(family.groups, place)
    if not pooled:
        return Comparison(difference, seeds, columns, None, None, None)
    # Seeds that agree by rounding show no spread of their own.
    own = _deviation(float(((paired - paired.mean()) ** 2).sum()), seeds - 1) or pooled
    tests = (
        _Test(pooled, freedom / (seeds - 1), family.pairs),
        _Test(own, 1.0, family.rivals),
    )
    p_value = max(test.p_value(abs(difference), seeds) for test in tests)
    needed = None
    if difference and not (p_value <= ALPHA and difference < 0):
        quantiles = special.chdtri(freedom, [0.025, 0.975])
        low, high = (pooled * np.sqrt(freedom / quantiles)).tolist()
        needed = (
            _seeds_needed(abs(difference), low, seeds, tests),
            _seeds_needed(abs(difference), max(high, own), seeds, tests),
        )
    threshold = max(test.threshold(seeds) for test in tests)
    return Comparison(difference, seeds, columns, p_value, threshold, needed)


@dataclass(frozen=True)
class _Test:
    """Student's test of a mean of paired differences, two-sided, for ``count`` comparisons.

    ``freedom`` are the degrees of freedom of the deviation, for each seed beyond the first.
    """

    deviation: float
    freedom: float
    count: int

    def p_value(self, difference: float, seeds: int) -> float:
        t = difference * math.sqrt(seeds) / self.deviation
        tail = float(special.stdtr(self.freedom * (seeds - 1), -t))
        return min(1.0, 2 * self.count * tail)

    def quantile(self, seeds: ArrayLike) -> Any:
        freedom = self.freedom * (np.asarray(seeds) - 1)
        return -special.stdtrit(freedom, ALPHA / (2 * self.count))

    def threshold(self, seeds: int) -> float:
        return float(self.quantile(seeds)) * self.deviation / math.sqrt(seeds)

    def power(self, difference: float, deviation: float, seeds: NDArray[np.int64]) -> Array:
        """Return the chance to decide a true difference (Johnson and Welch 1940)."""
        freedom, quantile = self.freedom * (seeds - 1), self.quantile(seeds)
        excess = difference * np.sqrt(seeds) / deviation - quantile * (1 - 1 / (4 * freedom))
        chance: Array = special.ndtr(excess / np.sqrt(1 + quantile**2 / (2 * freedom)))
        return chance


def _seeds_needed(difference: float, deviation: float, seeds: int, tests: tuple[_Test, ...]) -> int:
    """Return how many seeds decide a true difference with a chance of :data:`POWER`."""
    numbers = np.arange(seeds + 1, MAX_SEEDS + 1)
    # The tests share their numerator: both reject nearly as often as the weaker one.
    power = np.min([test.power(difference, deviation, numbers) for test in tests], axis=0)
    enough = numbers[power >= POWER]
    return int(enough[0]) if enough.size else MAX_SEEDS + 1


def _pooled_deviation(groups: Sequence[Array], place: Block) -> tuple[float, int]:
    """Return the deviation of a paired difference, pooled over rows; and its degrees of freedom.

    It is that of the rows that have all seeds and columns of ``place``: a mean over fewer columns
    has another spread.
    """
    squares, freedom = 0.0, 0
    for values in groups:
        part = values[:, place[0]][:, :, place[1]]
        complete = part[np.isfinite(part).all(axis=(1, 2))]
        if len(complete) < 2:
            continue
        means = complete.mean(axis=2)
        rest = means - means.mean(axis=0, keepdims=True)
        rest -= rest.mean(axis=1, keepdims=True)
        squares += float((rest**2).sum())
        freedom += (len(means) - 1) * (means.shape[1] - 1)
    return _deviation(2 * squares, freedom), freedom


def _deviation(squares: float, freedom: int) -> float:
    """Return a standard deviation; 0 for one that is a rounding error or has no freedom."""
    deviation = math.sqrt(squares / freedom) if freedom > 0 else 0.0
    return deviation if deviation > 10.0**-_DECIMALS else 0.0


def best_row(values: Array) -> int | None:
    """Return the row of [rows, seeds, columns] with the best mean; None if no two can be compared.

    Where runs are missing, rows are compared by their effects in an additive fit of rows and pairs
    of seed and column: a row that lacks the difficult columns or seeds is not better for it. If
    rows fall into sets without a common run, only those of the largest set are compared.
    """
    runs = values.reshape(len(values), -1)
    finite = np.isfinite(runs)
    known = finite.any(axis=1)
    # Rows that no chain of common runs links have no common scale: the largest linked set counts.
    linked = csgraph.connected_components(finite.astype(np.intp) @ finite.T)[1]
    known &= linked == np.argmax(np.bincount(linked[known], minlength=1))
    if known.sum() < 2:
        return None
    # Pairs that the same rows have count as one of as much weight: the fit is the same.
    kinds, kind, counts = np.unique(finite, axis=1, return_inverse=True, return_counts=True)
    sums = np.where(finite, runs, 0.0) @ np.eye(len(counts))[kind.ravel()]
    rows, columns = np.nonzero(kinds)
    weights = np.sqrt(counts)[columns]
    design = np.hstack([np.eye(len(runs))[rows] * weights[:, None], np.eye(len(counts))[columns]])
    effects = np.linalg.lstsq(design, sums[rows, columns] / weights)[0][: len(runs)]
    return int(np.argmax(np.where(known, np.round(effects, _DECIMALS), -np.inf)))


def complete_block(known: NDArray[np.bool_]) -> Block:
    """Return seeds and columns of the largest complete part of [seeds, columns].

    With every column for every seed, what is easy or difficult about a column does not mix with
    the spread over seeds. A part with several seeds comes before one with a single seed, which
    shows no spread; among equal parts, that with most seeds is returned.
    """
    best = (np.arange(0), np.arange(0))
    order = np.argsort(-known.sum(axis=1), kind="stable")
    rank = (False, 0)
    for count in range(1, len(order) + 1):
        seeds = np.sort(order[:count])
        columns = np.flatnonzero(known[seeds].all(axis=0))
        if columns.size and (count > 1, count * columns.size) >= rank:
            best, rank = (seeds, columns), (count > 1, count * columns.size)
    return best
