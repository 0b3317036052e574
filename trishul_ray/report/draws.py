"""Variance between draws of partitions and cohorts, and its effect on the ranking of methods.

A value is modeled as y = μ + row + draw + seed + draw × row + seed × row, with seeds nested in
draws (a split-plot layout). The effects of draw and seed are the same in all rows and cancel in
paired comparisons. Their interactions with rows do not.
"""

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from trishul_ray.report.statistics import ALPHA
from trishul_ray.runtime.random_streams import numpy_rng

if TYPE_CHECKING:
    from pandas import DataFrame

#: Power of the t-test that :attr:`DrawEvidence.needed` is computed for.
POWER = 0.8
#: Maximum number of subsets of draws to compare; if there are more, they are sampled.
SUBSETS = 10_000
#: Maximum number of draws to consider for a t-test.
MOST_DRAWS = 1000
#: Decimals to round differences to; smaller differences are rounding errors.
_DECIMALS = 9


@dataclass(frozen=True)
class DrawEvidence:
    """Variance between the draws of a group of rows, and its effect on their ranking.

    Attributes:
        rows: Labels of the rows.
        draws: Number of complete draws, in which all rows have all values.
        left_out: Number of incomplete draws.
        seeds: Number of seeds per draw.
        shares: Fractions of the variance within rows due to draw, seed, draw × row, and seed × row.
            With one seed per draw, the fractions of draws include those of seeds, which are NaN.
            All are NaN if the variance is zero.
        flips: Probability that n draws select a different best row than all draws, keyed by n.
        best: The two rows with the best means.
        needed: Number of draws for a two-sided paired t-test of these two rows with power
            :data:`POWER`, or None if more than :data:`MOST_DRAWS`.
    """

    rows: tuple[str, ...]
    draws: int
    left_out: int
    seeds: int
    shares: tuple[float, float, float, float]
    flips: dict[int, float]
    best: tuple[str, str]
    needed: int | None

    @property
    def sentences(self) -> list[str]:
        each = f"{self.seeds} seeds in each" if self.seeds > 1 else "one seed in each"
        out = f"; excluded incomplete draws: {self.left_out}" if self.left_out else ""
        found = [f"{self.draws} draws, {each}, {len(self.rows)} rows{out}."]
        draw, seed, by_draw, by_seed = (f"{share:.0%}" for share in self.shares)
        if math.isnan(self.shares[0]):
            found.append("All draws and seeds of a row have equal values.")
        elif self.seeds > 1:
            found.append(
                f"Shares of the variance within rows: draw {draw}, seed {seed}, "
                f"draw × row {by_draw}, seed × row {by_seed}."
            )
        else:
            found.append(
                f"Shares of the variance within rows: draw and seed {draw}, their interactions "
                f"with rows {by_draw}. One seed per draw cannot separate draw and seed."
            )
        if self.flips:
            rates = (f"{rate:.2f} with {n}" for n, rate in self.flips.items())
            found.append(
                f"Probability that fewer draws have a different best row: {', '.join(rates)}."
            )
        number = f"more than {MOST_DRAWS:,}" if self.needed is None else f"{self.needed:,}"
        found.append(
            f"Draws needed to separate {self.best[0]} from {self.best[1]} with a power of "
            f"{POWER:.0%} (paired t-test, α = {ALPHA:g}): {number}."
        )
        return found


def draw_evidence(values: "DataFrame") -> DrawEvidence | None:
    """Estimate the variance between draws by the method of moments.

    Negative estimates become 0.

    Args:
        values: Values [rows of a table, (draw, seed)]. Larger is better; NaN marks missing values.

    Returns:
        The estimate, or None with fewer than two rows or complete draws.
    """
    by_draw = values.T.groupby(level=0, sort=False)
    seeds = by_draw.size().max()
    complete = [d for d, part in by_draw if part.notna().all(axis=None) and len(part) == seeds]
    if len(values) < 2 or len(complete) < 2:
        return None
    y = np.array([values[draw].to_numpy(dtype=np.float64) for draw in complete])
    y = y.transpose(1, 0, 2)  # [rows, draws, seeds]
    means = y.mean(axis=2)
    order = means.mean(axis=1).round(_DECIMALS).argsort(kind="stable")[::-1]
    first, second = int(order[0]), int(order[1])
    return DrawEvidence(
        rows=tuple(map(str, values.index)),
        draws=len(complete),
        left_out=by_draw.ngroups - len(complete),
        seeds=int(seeds),
        shares=variance_shares(y),
        flips={n: flip_probability(means, n) for n in _subset_sizes(len(complete))},
        best=(str(values.index[first]), str(values.index[second])),
        needed=draws_needed(means[first] - means[second]),
    )


def _subset_sizes(draws: int) -> list[int]:
    return [n for n in sorted({1, 3, 5, draws - 1}) if n < draws]


def variance_shares(y: np.ndarray) -> tuple[float, float, float, float]:
    """Compute the variance fractions of draw, seed, draw × row and seed × row.

    Args:
        y: Values [rows, draws, seeds].
    """
    rows, draws, seeds = y.shape
    centered = y - y.mean(axis=(1, 2), keepdims=True)
    repeated = centered.mean(axis=0)  # [draws, seeds], effects that all rows share
    by_draw = repeated.mean(axis=1)
    own = centered - repeated
    own_by_draw = own.mean(axis=2)
    # Mean squares; see the expected mean squares of a split-plot layout.
    draw = rows * seeds * by_draw.var(ddof=1)
    draw_row = seeds * (own_by_draw**2).sum() / ((rows - 1) * (draws - 1))
    seed = seed_row = 0.0
    if seeds > 1:
        freedom = draws * (seeds - 1)
        seed = rows * ((repeated - by_draw[:, None]) ** 2).sum() / freedom
        seed_row = ((own - own_by_draw[:, :, None]) ** 2).sum() / ((rows - 1) * freedom)
    parts = [
        (draw - draw_row - seed + seed_row) / (rows * seeds),
        (seed - seed_row) / rows,
        (draw_row - seed_row) / seeds,
        seed_row,
    ]
    clipped = np.maximum(parts, 0.0)
    total = clipped.sum()
    if total <= 10.0 ** (-2 * _DECIMALS):
        return math.nan, math.nan, math.nan, math.nan
    of_draw, of_seed, of_draw_row, of_seed_row = (clipped / total).tolist()
    if seeds == 1:
        of_seed = of_seed_row = math.nan
    return of_draw, of_seed, of_draw_row, of_seed_row


def flip_probability(means: np.ndarray, n: int) -> float:
    """Compute the probability that ``n`` draws, without replacement, change the best row.

    Args:
        means: Means over seeds [rows, draws]; larger is better.
        n: Number of draws in a subset.
    """
    draws = means.shape[1]
    if math.comb(draws, n) <= SUBSETS:
        subsets = np.array(list(itertools.combinations(range(draws), n)))
    else:
        rng = numpy_rng(0, "draws", n)
        subsets = rng.permuted(np.tile(np.arange(draws), (SUBSETS, 1)), axis=1)[:, :n]
    best = means.mean(axis=1).round(_DECIMALS).argmax()
    found = means[:, subsets].mean(axis=2).round(_DECIMALS).argmax(axis=0)
    return float((found != best).mean())


def draws_needed(differences: np.ndarray) -> int | None:
    """Compute the number of draws that a paired t-test needs to reach :data:`POWER`.

    Args:
        differences: Difference between two rows in each draw [draws].

    Returns:
        The number of draws, or None if more than :data:`MOST_DRAWS`.
    """
    mean, deviation = differences.mean(), differences.std(ddof=1)
    if deviation <= 10.0**-_DECIMALS:
        return 2 if abs(mean) > 10.0**-_DECIMALS else None
    n = np.arange(2, MOST_DRAWS + 1)
    limit = stats.t.ppf(1 - ALPHA / 2, n - 1)
    center = abs(mean) / deviation * np.sqrt(n)
    power = stats.nct.sf(limit, n - 1, center) + stats.nct.cdf(-limit, n - 1, center)
    enough = n[power >= POWER]
    return int(enough[0]) if len(enough) else None
