"""What the numbers of a page decide: means, intervals, and which rows are worse than the best.

Arrays of a group of rows are [rows, seeds, columns], oriented so that larger is better, NaN where a
run is not finished. Everything here is a pure function of its numbers: the same page gives the same
decisions.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

#: Chance that a page without any true difference shows one as decided.
ALPHA = 0.05
#: :func:`seeds_needed` looks no further.
MAX_SEEDS = 100
#: Differences below this, in the unit of the table, are rounding errors of the subtraction.
_DECIMALS = 9

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds.

    Attributes:
        mean: Mean.
        deviation: Standard deviation between seeds; None for one seed.
        count: Number of seeds.
    """

    mean: float
    deviation: float | None
    count: int

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Return Student's interval of the mean; None for one seed."""
        if self.deviation is None:
            return None
        quantile = float(special.stdtrit(self.count - 1, (1 + level) / 2))
        half = quantile * self.deviation / math.sqrt(self.count)
        return self.mean - half, self.mean + half


def estimate(values: ArrayLike) -> Estimate | None:
    """Return mean and spread over seeds [seeds], NaN left out; None if nothing is left."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return None
    deviation = float(numbers.std(ddof=1)) if numbers.size > 1 else None
    return Estimate(float(numbers.mean()), deviation, int(numbers.size))


@dataclass(frozen=True)
class Comparison:
    """How a row compares with the best row of its group.

    Attributes:
        difference: Mean of the row minus that of the best, over the runs that both have.
        seeds: Number of seeds that the comparison rests on.
        columns: Number of columns that it rests on.
        p_value: Adjusted for all pairs of the page; None if nothing is decided.
        seeds_needed: For an undecided row, about how many seeds would decide it; None if there are
            more than :data:`MAX_SEEDS`, or the spread is not known because there is one seed.
    """

    difference: float
    seeds: int
    columns: int
    p_value: float | None
    seeds_needed: int | None

    @property
    def decided(self) -> bool:
        """Whether the row is worse than the best."""
        return self.p_value is not None


@dataclass(frozen=True)
class GroupComparison:
    """A group of rows compared with its best.

    Attributes:
        best: Index of the row with the best mean; None if fewer than two rows have numbers.
        rows: A comparison for each row; None for the best, and for rows that share no seed and
            column with it.
    """

    best: int | None
    rows: tuple[Comparison | None, ...]


def compare_rows(groups: Sequence[Array], alpha: float = ALPHA) -> tuple[GroupComparison, ...]:
    """Compare each row of a page with the best row of its group.

    A row is *decided* to be worse if two paired tests of its differences from the best agree: a
    sign-flip test over all seeds and columns, which assumes no distribution, and Student's test of
    the means of the seeds. The first takes the columns of a seed to be independent. They are not
    quite, because runs of one seed share their frozen bases and draws: where a seed favours one row
    in every column, the sign-flip test alone is wrong on most pages. Student's test is not affected
    by what columns share, but is easily misled by few seeds in one column.

    The level holds for the page: the chance that *any* row is wrongly called worse is at most
    ``alpha``, by Holm's correction over *all* pairs of rows of all groups. A false discovery rate
    (Benjamini-Hochberg) would bound the expected share of wrong decisions instead, so that a page
    with many right ones could hold some wrong ones; and it would need the pairs to be chosen before
    the numbers are seen, while the best row is chosen by looking. With all pairs in the family,
    every possible choice of the best is accounted for. Pairs that have too few runs to be decided
    whatever their numbers are (:func:`smallest_p_value`) are not part of it (Tarone 1990).

    Args:
        groups: Values [rows, seeds, columns] of each group.
        alpha: Chance of a wrong decision on the page.
    """
    pairs = [
        (group, first, second)
        for group, values in enumerate(groups)
        for first, second in itertools.combinations(range(len(values)), 2)
    ]
    blocks = [complete_block(groups[g][first] - groups[g][second]) for g, first, second in pairs]
    adjusted, level = _adjusted_p_values(blocks, alpha)
    by_pair = dict(zip(pairs, zip(blocks, adjusted, strict=True), strict=True))

    def compare(group: int, row: int, best: int) -> Comparison | None:
        block, p_value = by_pair[group, min(row, best), max(row, best)]
        if not block.size:
            return None
        mean = round(float(block.mean()), _DECIMALS) + 0.0
        difference = mean if row < best else 0.0 - mean
        # Where runs are missing, a row may be ahead of the best in what both have.
        decided = p_value <= alpha and difference < 0
        return Comparison(
            difference=difference,
            seeds=block.shape[0],
            columns=block.shape[1],
            p_value=p_value if decided else None,
            seeds_needed=None if decided else seeds_needed(block, level),
        )

    result = []
    for index, values in enumerate(groups):
        best = best_row(values)
        rows = (
            None if best is None or row == best else compare(index, row, best)
            for row in range(len(values))
        )
        result.append(GroupComparison(best, tuple(rows)))
    return tuple(result)


def best_row(values: Array) -> int | None:
    """Return the row with the best mean; None if fewer than two have numbers.

    Where runs are missing, rows are compared by their effects in an additive fit of rows and pairs
    of seed and column: a row that lacks the difficult columns or seeds is not better for it.

    Args:
        values: [rows, seeds, columns].
    """
    runs = values.reshape(len(values), -1)
    rows, pairs = np.nonzero(np.isfinite(runs))
    if len(np.unique(rows)) < 2:
        return None
    design = np.hstack([np.eye(runs.shape[0])[rows], np.eye(runs.shape[1])[pairs]])
    effects = np.linalg.lstsq(design, runs[rows, pairs])[0][: runs.shape[0]]
    known = np.isin(np.arange(runs.shape[0]), rows)
    return int(np.argmax(np.where(known, np.round(effects, _DECIMALS), -np.inf)))


def complete_block(differences: Array) -> Array:
    """Return the largest part of [seeds, columns] without NaN: some seeds in some columns.

    With every column for every seed, what is easy or difficult about a column does not mix with
    the spread over seeds. Among equal parts, the one with most seeds is returned.
    """
    known = np.isfinite(differences)
    if known.all():
        return differences
    best = differences[:0, :0]
    order = np.argsort(-known.sum(axis=1), kind="stable")
    for count in range(1, len(order) + 1):
        seeds = np.sort(order[:count])
        part = differences[np.ix_(seeds, known[seeds].all(axis=0))]
        if part.size and part.size >= best.size:
            best = part
    return best


def smallest_p_value(seeds: int, columns: int) -> float:
    """Return the smallest p-value that a comparison of this size can have: 2 / 2^(runs).

    Of all flips of signs, at least the observed one and its opposite are as extreme. One seed shows
    no spread, and decides nothing.
    """
    return 2.0 ** (1 - seeds * columns) if seeds > 1 and columns > 0 else 1.0


def seeds_needed(differences: Array, alpha: float) -> int | None:
    """Return about how many seeds would decide a row that these do not.

    It is the smallest number at which both tests of :func:`compare_rows` reach ``alpha`` if mean
    and spread of the differences stay as they are.

    Args:
        differences: Paired differences [seeds, columns], without NaN.
        alpha: Level of the one comparison, corrected for all others.

    Returns:
        The number; None if it exceeds :data:`MAX_SEEDS`, or if there is one seed.
    """
    done, columns = differences.shape
    if done < 2:
        return None
    numbers = np.arange(done + 1, MAX_SEEDS + 1)
    if not numbers.size:
        return None
    means = np.round(differences, _DECIMALS).mean(axis=1)
    size, spread = abs(float(means.mean())), float(means.std(ddof=1))
    total = math.sqrt(float(np.mean(differences**2)))
    if size == 0:
        return None
    with np.errstate(divide="ignore"):
        student = 2 * special.stdtr(numbers - 1, -size * np.sqrt(numbers) / np.float64(spread))
    # The sign-flip test's mean is nearly normal, and never below its floor.
    flips = 2 * special.ndtr(-size * np.sqrt(numbers * columns) / total)
    floor = 2.0 ** (1 - numbers * columns)
    enough = numbers[np.maximum(np.maximum(student, flips), floor) <= alpha]
    return int(enough[0]) if enough.size else None


def _adjusted_p_values(blocks: Sequence[Array], alpha: float) -> tuple[list[float], float]:
    """Return the adjusted p-value of each block [seeds, columns], and the level of one comparison.

    Adjusted values are exact where they are at most ``alpha``, and otherwise above it. The level is
    what the first pair that is not decided would have to reach, if all pairs could be tested.
    """
    floors = np.array([smallest_p_value(*block.shape) for block in blocks])
    # Tarone: test only the k pairs that could be decided at alpha / k.
    size = 1
    while (floors <= alpha / size).sum() > size:
        size += 1
    testable = np.flatnonzero(floors <= alpha / size).tolist()
    p_values = np.array([_student_p_value(blocks[i]) for i in testable])
    # The second test can only raise a p-value: what the first leaves undecided needs none.
    for position in np.flatnonzero(_holm(p_values) <= alpha).tolist():
        block = np.ascontiguousarray(np.round(blocks[testable[position]], _DECIMALS))
        # Enough flips for p-values of half the strictest level.
        flips = math.ceil(4 * len(testable) / alpha)
        p_values[position] = max(p_values[position], _sign_flip_p_value(block.tobytes(), flips))
    adjusted = np.ones(len(blocks))
    adjusted[testable] = _holm(p_values)
    undecided = sum(block.size > 0 for block in blocks) - int((adjusted <= alpha).sum())
    return adjusted.tolist(), alpha / max(undecided, 1)


def _holm(p_values: Array) -> Array:
    """Return Holm's adjusted p-values: at most α for a family-wise error of at most α."""
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def _student_p_value(differences: Array) -> float:
    """Return the two-sided p-value of Student's test of the means of the seeds."""
    means = np.round(differences, _DECIMALS).mean(axis=1)
    mean, count = abs(float(means.mean())), len(means)
    error = float(means.std(ddof=1)) / math.sqrt(count)
    if mean == 0 or error == 0:
        return float(mean == 0)
    return 2 * float(special.stdtr(count - 1, -mean / error))


@functools.lru_cache(maxsize=4096)
def _sign_flip_p_value(differences: bytes, flips: int) -> float:
    """Return the two-sided p-value of the mean if each sign could as well be the opposite.

    All flips are tried if they are at most ``flips``, otherwise as many random ones, always the
    same.
    """
    result = stats.permutation_test(
        (np.frombuffer(differences),),
        lambda sample, axis: np.mean(sample, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=flips,
        batch=4096,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)
