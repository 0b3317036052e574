"""Privacy accounting: (epsilon, delta) of a run for each client, from the configuration only.

A round adds noise of standard deviation z S to a sum to which each client contributes at most norm
S. Two kinds of sampling give different guarantees:

* ``poisson``: each client joins with probability q, independently. One client is added or removed.
  Composed by privacy-loss distributions (PLD), which are exact up to their grid, whose error is on
  the safe side.
* ``fixed``: exactly m of N clients, without replacement. One client is replaced by another, which
  changes the sum by 2 S. Composed by Rényi divergences (RDP) of integer orders.

The accountants are those of Google's ``dp-accounting``, an extra, which is imported when needed.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from trishul_ray.errors import InputError, how_to_install
from trishul_ray.lab.privacy.config import SMALLEST_NOISE, PrivacyConfig, Sampling
from trishul_ray.runtime.lazy import scipy

#: Orders of Rényi divergences: integers, which have a closed form.
ORDERS = (*range(2, 33), *range(36, 65, 4), 80, 96, 128, 192, 256)
#: Largest width of the grid of privacy losses for a multiplier of about 1.
GRID = 1e-3
#: The largest noise multiplier that is tried.
LARGEST_NOISE = 50.0
#: Significant digits of a multiplier that follows from epsilon: equal on any machine.
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
def _divergences(noise: float, clients: int, cohort: int) -> Any:
    """Return the Rényi divergences of one round of cohorts of a fixed size, by order."""
    dp = _library()
    # One client replaces another: the sensitivity is 2 S.
    event = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(noise / 2))
    return dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE).compose(event).rdp


@dataclass(frozen=True)
class Guarantee:
    """Guarantee of a run to each client, known before its first round.

    Attributes:
        sampling: How clients are sampled.
        noise: z, the standard deviation of the noise of a round over the clip norm.
        clients: N.
        cohort: m, the clients of a round, on average.
        delta: δ.
        rounds: Rounds of the run.
        surveys: Releases of the same kind before round 1: 1 if clients answer a survey.
    """

    sampling: Sampling
    noise: float
    clients: int
    cohort: int
    delta: float
    rounds: int
    surveys: int = 0

    @property
    def accountant(self) -> str:
        """Name of the accounting method."""
        return {
            "poisson": "PLD, Poisson sampling, add or remove one client",
            "fixed": "RDP, fixed size without replacement, replace one client",
        }[self.sampling]

    def epsilon(self, rounds: int | None = None) -> float:
        """Return ε after some rounds, by default of the whole run; infinite without noise.

        Raises:
            InputError: The library is missing.
        """
        releases = self.surveys + (self.rounds if rounds is None else rounds)
        if releases == 0:
            return 0.0
        if self.noise == 0:
            return math.inf
        if self.sampling == "poisson":
            loss = _loss(self.noise, self.cohort / self.clients)
            return float(loss.self_compose(releases).get_epsilon_for_delta(self.delta))
        divergences = releases * _divergences(self.noise, self.clients, self.cohort)
        return float(_library().rdp.compute_epsilon(ORDERS, divergences, self.delta)[0])


@lru_cache(maxsize=256)
def guarantee(
    options: PrivacyConfig, clients: int, cohort: int, rounds: int, surveys: int = 0
) -> Guarantee:
    """Return the guarantee of a run, with the noise that follows from its ε if ε is set.

    Args:
        options: The section ``privacy``, which is on.
        clients: Clients that may take part.
        cohort: ``federation.clients_per_round``.
        rounds: ``federation.rounds``.
        surveys: Releases before round 1.

    Raises:
        InputError: The library is missing, or no noise that is tried reaches ε.
    """

    def of(noise: float) -> Guarantee:
        delta = options.delta_for(clients)
        return Guarantee(options.sampling, noise, clients, cohort, delta, rounds, surveys)

    if options.noise is not None:
        return of(options.noise)
    assert options.epsilon is not None
    if (least := of(LARGEST_NOISE).epsilon()) > options.epsilon:
        raise InputError(
            f"privacy.epsilon={options.epsilon:g} is below the ε of {rounds} rounds of {cohort} of "
            f"{clients} clients at noise multiplier {LARGEST_NOISE:g}; set at least {least:.3g}, "
            "fewer rounds, or more clients"
        )
    return of(smallest_noise(lambda noise: of(noise).epsilon(), options.epsilon))


def affordable(
    options: PrivacyConfig, clients: int, cohort: int, rounds: int, surveys: int = 0
) -> int:
    """Return how many rounds are within a run's budget; all if it has none. Arguments as above.

    Raises:
        InputError: Not even one round, or the library is missing.
    """
    if options.budget is None:
        return rounds
    found = guarantee(options, clients, cohort, rounds, surveys)
    if (paid := bisect_right(range(1, rounds + 1), options.budget, key=found.epsilon)) > 0:
        return paid
    raise InputError(
        f"privacy.budget={options.budget:g} is below the ε of one round, {found.epsilon(1):.3g}, "
        f"at privacy.noise={options.noise:g}; set a larger budget or more noise"
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
