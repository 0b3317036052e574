"""Privacy accounting: (epsilon, delta) of a run for each client, from the configuration only.

A round adds noise of standard deviation z S to a sum to which each client contributes at most norm
S. Privacy of examples does the same in each local step, with ``poisson``. Two kinds of sampling
give different guarantees:

* ``poisson``: each client joins with probability q, independently. One client is added or removed.
  Composed by privacy-loss distributions (PLD), which are exact up to their grid, whose error is on
  the safe side.
* ``fixed``: exactly m of N clients, without replacement. One client is replaced by another, which
  changes the sum by 2 S. Composed by Rényi divergences (RDP) of integer orders.

The accountants are from Google's ``dp-accounting``, an extra, which is imported when needed.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from trishul_ray.errors import InputError, how_to_install
from trishul_ray.lab.privacy.config import Sampling

#: Orders of Rényi divergences: integers, which have a closed form.
ORDERS = (*range(2, 33), *range(36, 65, 4), 80, 96, 128, 192, 256)
#: Largest width of the grid of privacy losses for a multiplier of about 1.
GRID = 1e-3
#: The number of noise multipliers that are tried: those of four digits from 0.01 to 50.
MULTIPLIERS = 31_001


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
    # Little noise has large losses, and a small rate has small ones: the grid follows them. It
    # rounds up by less than 1% of epsilon; a grid of 1e-3 would give 1.7 times it at rate 1e-4.
    return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=min(
            GRID * max(1.0, 0.5 / noise**2),
            # A quarter of the deviation of a round's loss, about q sqrt(exp(1/z^2) - 1).
            rate * math.sqrt(math.expm1(min(noise**-2, 50.0))) / 4,
        ),
    )


@lru_cache(maxsize=4096)
def spent(noise: float, rate: float, steps: int, delta: float) -> float:
    """Return ε of a number of steps of Poisson sampling; infinite without noise.

    Raises:
        InputError: The library is missing.
    """
    if steps == 0:
        return 0.0
    if noise == 0:
        return math.inf
    return float(_loss(noise, rate).self_compose(steps).get_epsilon_for_delta(delta))


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
        clients: N, the clients that may take part.
        cohort: m, the clients of a round, on average.
        delta: δ.
        rounds: Rounds of the run.
        surveys: Releases of the same kind before round 1: 1 with a survey of the clients.
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
        if self.sampling == "poisson":
            return "PLD, Poisson sampling, add or remove one client"
        return "RDP, fixed size without replacement, replace one client"

    @property
    def cohorts(self) -> str:
        """The cohorts that the accountant assumes."""
        which = f"{self.cohort:,} of {self.clients:,} clients"
        if self.sampling == "poisson":
            return f"Poisson cohorts of {which} on average"
        return f"cohorts of exactly {which}"

    def epsilon(self, rounds: int | None = None) -> float:
        """Return ε after some rounds, by default of the whole run; infinite without noise.

        Raises:
            InputError: The library is missing.
        """
        releases = self.surveys + (self.rounds if rounds is None else rounds)
        if self.sampling == "poisson":
            return spent(self.noise, self.cohort / self.clients, releases, self.delta)
        if self.noise == 0:
            return math.inf
        divergences = releases * _divergences(self.noise, self.clients, self.cohort)
        return float(_library().rdp.compute_epsilon(ORDERS, divergences, self.delta)[0])


@lru_cache(maxsize=256)
def with_noise_for(target: float, found: Guarantee) -> Guarantee:
    """Return the guarantee with the smallest noise whose ε is at most ``target``.

    Raises:
        InputError: The library is missing, or no noise that is tried reaches ε.
    """

    def epsilon(noise: float) -> float:
        return replace(found, noise=noise).epsilon()

    largest = multiplier(MULTIPLIERS - 1)
    if (least := epsilon(largest)) > target:
        raise InputError(
            f"privacy.epsilon={target:g} is below the ε of {found.rounds} rounds of {found.cohort} "
            f"of {found.clients} clients at noise multiplier {largest:g}; set at least "
            f"{least:.3g}, fewer rounds, or more clients"
        )
    return replace(found, noise=smallest_noise(epsilon, target))


def multiplier(number: int) -> float:
    """Return the noise multipliers of four digits, ascending from 0.01."""
    return float(f"{1000 + number % 9000}e{number // 9000 - 5}")


def smallest_noise(epsilon: Callable[[float], float], target: float) -> float:
    """Return the smallest :func:`multiplier` whose ε is at most ``target``.

    ``epsilon`` decreases, and is at most ``target`` at the largest multiplier.
    """

    def is_enough(number: int) -> bool:
        return epsilon(multiplier(number)) <= target

    # Downwards in steps: multipliers whose losses would fill the memory are never tried.
    high = MULTIPLIERS - 1
    while high > 0 and is_enough(low := max(high - 2700, 0)):
        high = low
    return multiplier(bisect_left(range(high), True, max(high - 2700, 0), key=is_enough))
