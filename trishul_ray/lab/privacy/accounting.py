"""Privacy accounting: (epsilon, delta) of a run, for each client, from the configuration alone.

A round adds noise of standard deviation z S to a sum in which each client has at most norm S. Three
ways to draw its clients differ in what they hide:

* ``poisson``: each client with probability q, by itself. Adding or removing one client. Composed
  by privacy-loss distributions (PLD), which are exact up to their grid, whose error is on the safe
  side.
* ``fixed``: exactly m of N without replacement. The adversary replaces one client by another, which
  moves the sum by 2 S. Composed by Rényi divergences (RDP) of integer orders.
* ``none``: nothing is hidden by the draw. A client that takes part k times sees one Gaussian of
  multiplier z / sqrt k; k is the largest count of the run's own draws. Cohorts have exactly m of N
  clients, so adding or removing one would move others into them: what is compared is a run in
  which the client sends zeros in its rounds (zero-out adjacency), which moves the sum by S.

The distributions are those of Google's ``dp-accounting``, an extra, imported where it is used.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from trishul_ray.data.sampling import uniform_cohort
from trishul_ray.errors import InputError, how_to_install
from trishul_ray.lab.privacy.config import SMALLEST_NOISE, PrivacyConfig, Sampling
from trishul_ray.runtime.lazy import scipy

#: Orders of Rényi divergences: integers, for which there is a closed form.
ORDERS = (*range(2, 33), *range(36, 65, 4), 80, 96, 128, 192, 256)
#: Largest width of the grid of privacy losses for a multiplier of about 1.
GRID = 1e-3
#: The largest noise multiplier that is tried.
LARGEST_NOISE = 50.0
#: Significant digits of a multiplier that follows from epsilon: the same on any machine.
DIGITS = 4


def _library() -> Any:
    try:
        for part in ("pld", "rdp"):
            import_module(f"dp_accounting.{part}")
        return import_module("dp_accounting")
    except ImportError:
        raise InputError(
            "the section privacy needs dp-accounting: "
            + how_to_install("privacy", "dp-accounting>=0.6,<0.7")
        ) from None


@lru_cache(maxsize=64)
def _loss(noise: float, rate: float) -> Any:
    """Return the privacy loss of one round of Poisson sampling."""
    # The losses of little noise are large, those of a small rate small: the grid follows them. It
    # rounds up, by less than 1 % of epsilon, where a grid of 1e-3 takes 1.7 times it at rate 1e-4.
    return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=min(
            GRID * max(1.0, 0.5 / noise**2),
            # A quarter of the deviation of a round's loss, about q sqrt(exp(1/z^2) - 1).
            rate * math.sqrt(math.expm1(min(noise**-2, 50.0))) / 4,
        ),
    )


@lru_cache(maxsize=64)
def _divergences(noise: float, population: int, cohort: int) -> Any:
    """Return the Rényi divergences of one round of cohorts of a fixed size, one for each order."""
    dp = _library()
    # One client replaces another: the sensitivity is 2 S.
    event = dp.SampledWithoutReplacementDpEvent(population, cohort, dp.GaussianDpEvent(noise / 2))
    return dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE).compose(event).rdp


@dataclass(frozen=True)
class Guarantee:
    """Guarantee of a run to each client, known before its first round.

    Attributes:
        sampling: How clients are drawn.
        noise: z, the standard deviation of all noise of a round over the sensitivity S.
        population: N, the clients among whom one hides.
        cohort: m, the clients of a round, on average.
        delta: δ.
        rounds: Rounds of the run.
        participations: With sampling "none", how often the most frequent client has taken part
            after each release.
        surveys: Releases of the same kind before round 1: 1 if clients answer a survey.
    """

    sampling: Sampling
    noise: float
    population: int
    cohort: int
    delta: float
    rounds: int
    participations: tuple[int, ...] = ()
    surveys: int = 0

    @property
    def accountant(self) -> str:
        """Name of the accounting method, as a reader may look it up."""
        return {
            "poisson": "PLD, Poisson sampling, add or remove one client",
            "fixed": "RDP, fixed size without replacement, replace one client",
            "none": "Gaussian composition, participations counted, replace one client by zeros",
        }[self.sampling]

    @property
    def cohorts(self) -> str:
        """The cohorts assumed by the accountant."""
        which = f"{self.cohort:,} of {self.population:,} clients"
        return {
            "poisson": f"Poisson cohorts of {which} on average",
            "fixed": f"cohorts of exactly {which}",
            "none": f"cohorts of {which}, whose draw hides nothing",
        }[self.sampling]

    def epsilon(self, rounds: int | None = None) -> float:
        """Return ε after some rounds, by default all of the run; infinite without noise.

        Raises:
            InputError: The library is missing.
        """
        releases = self.surveys + (self.rounds if rounds is None else rounds)
        if releases == 0:
            return 0.0
        if self.noise == 0:
            return math.inf
        if self.sampling == "none":
            multiplier = self.noise / math.sqrt(self.participations[releases - 1])
            return float(_library().get_epsilon_gaussian(multiplier, self.delta))
        if self.sampling == "poisson":
            loss = _loss(self.noise, self.cohort / self.population)
            return float(loss.self_compose(releases).get_epsilon_for_delta(self.delta))
        divergences = releases * _divergences(self.noise, self.population, self.cohort)
        return float(_library().rdp.compute_epsilon(ORDERS, divergences, self.delta)[0])


@lru_cache(maxsize=256)
def guarantee(
    options: PrivacyConfig, seed: int, clients: int, cohort: int, rounds: int, surveys: int = 0
) -> Guarantee:
    """Return what a run promises, with the noise that follows from its ε if that is set.

    Args:
        options: The section ``privacy``, which is on.
        seed: Seed of the run, from which the participations are counted.
        clients: ``federation.clients``.
        cohort: ``federation.clients_per_round``.
        rounds: ``federation.rounds``.
        surveys: Releases before round 1.

    Raises:
        InputError: The library is missing, or no noise that is tried reaches ε.
    """
    population, expected = options.population or clients, options.cohort or cohort
    delta = options.delta_for(population)
    participations: tuple[int, ...] = ()
    if options.sampling == "none":
        participations = most_participations(
            uniform_cohort(seed, number, clients, cohort)
            for number in range(1 - surveys, rounds + 1)
        )

    def of(noise: float) -> Guarantee:
        return Guarantee(
            options.sampling, noise, population, expected, delta, rounds, participations, surveys
        )

    if options.noise is not None:
        return of(options.noise)
    assert options.epsilon is not None
    if (least := of(LARGEST_NOISE).epsilon()) > options.epsilon:
        raise InputError(
            f"privacy.epsilon={options.epsilon:g} is below what {rounds} rounds of {expected} of "
            f"{population} clients reach at noise multiplier {LARGEST_NOISE:g}: allowed: at least "
            f"{least:.3g}, fewer rounds, or a larger population"
        )
    return of(smallest_noise(lambda noise: of(noise).epsilon(), options.epsilon))


def affordable(
    options: PrivacyConfig, seed: int, clients: int, cohort: int, rounds: int, surveys: int = 0
) -> int:
    """Return how many rounds a run's budget pays; all if it has none. Arguments as above.

    Raises:
        InputError: Not even one, or the library is missing.
    """
    if options.budget is None:
        return rounds
    promised = guarantee(options, seed, clients, cohort, rounds, surveys)
    if (paid := rounds_within(promised, options.budget)) > 0:
        return paid
    raise InputError(
        f"privacy.budget={options.budget:g} does not pay one round, which costs "
        f"{promised.epsilon(1):.3g} at privacy.noise={options.noise:g}: allowed: a larger budget "
        "or more noise"
    )


def smallest_noise(epsilon: Callable[[float], float], target: float) -> float:
    """Return the smallest multiplier of four digits whose ε is at most ``target``.

    ``epsilon`` decreases, and is at most ``target`` at :data:`LARGEST_NOISE`.
    """
    high = LARGEST_NOISE
    # By halves: so little noise that its losses fill the memory is never tried.
    while epsilon(high / 2) <= target:
        high /= 2
        if high < SMALLEST_NOISE:
            return high

    def excess(logarithm: float) -> float:
        return math.log(epsilon(math.exp(logarithm)) / target)

    bracket, precision = (math.log(high / 2), math.log(high)), 10.0 ** -(DIGITS + 1)
    root = math.exp(scipy.optimize.brentq(excess, *bracket, xtol=precision))
    scale = 10.0 ** (DIGITS - 1 - math.floor(math.log10(root)))
    rounded = math.floor(root * scale)
    while epsilon(rounded / scale) > target:
        rounded += 1
    return rounded / scale


def rounds_within(promised: Guarantee, budget: float) -> int:
    """Return how many rounds, of those of the run, a budget of ε pays; 0 if not even one."""
    return bisect_right(range(1, promised.rounds + 1), budget, key=promised.epsilon)


def most_participations(cohorts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return how often the most frequent client has taken part after each cohort."""
    counts: Counter[int] = Counter()
    found = []
    for cohort in cohorts:
        counts.update(cohort)
        found.append(max(counts.values(), default=0))
    return tuple(found)


def bit_deviation(options: PrivacyConfig, cohort: int) -> float:
    """Return sigma_b, the standard deviation of the noise on the count of unclipped clients."""
    return cohort / 20 if options.bit_noise == "auto" else options.bit_noise


def change_noise(options: PrivacyConfig, promised: Guarantee) -> float:
    """Return z_Δ, the multiplier of the noise on changes, which pays for the private count too.

    ``z_Δ = (z^-2 - (2 sigma_b)^-2)^(-1/2)`` (Andrew et al., 2021, arXiv 1905.03871, Theorem 1): the
    pair costs exactly one Gaussian of multiplier z, as a client moves the count by 1/2 at most.

    Raises:
        InputError: The count alone costs more than z allows.
    """
    if not options.adaptive or promised.noise == 0:
        return promised.noise
    deviation = bit_deviation(options, promised.cohort)
    if promised.noise >= 2 * deviation:
        raise InputError(
            f"privacy.bit_noise={deviation:g} (a twentieth of the cohort if auto) must exceed half "
            f"the noise multiplier, {promised.noise / 2:.4g}: set it, take larger cohorts, or "
            "privacy.adaptive=false"
        )
    return float((promised.noise**-2 - (2 * deviation) ** -2) ** -0.5)
