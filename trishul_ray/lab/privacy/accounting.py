"""Privacy accounting: the (epsilon, delta) of each client, computed from the configuration.

A round adds noise of standard deviation z S to a sum in which the contribution of each client has
at most norm S. Privacy of examples does the same in each local step, with ``poisson``. Two kinds of
sampling give different guarantees:

* ``poisson``: each client joins with probability q, independently. Neighboring cohorts differ by
  adding or removing one client. Privacy-loss distributions (PLD) compose the rounds. They are exact
  up to their grid, which rounds epsilon up.
* ``fixed``: exactly m of N clients, without replacement. Neighboring cohorts differ by replacing
  one client, which changes the sum by 2 S. Rényi divergences (RDP) of integer orders compose the
  rounds.

The accountants are from Google's ``dp-accounting``, an optional dependency that is imported when
needed.
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
#: Maximum width of the grid of privacy losses, at a multiplier of about 1.
GRID = 1e-3
#: Number of noise multipliers in the search: all numbers of four digits from 0.01 to 50.
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
    """Compute the privacy loss of one round of Poisson sampling."""
    # Losses are large if the noise is small, and small if the rate is small; the grid scales with
    # them. It rounds epsilon up by less than 1%. A grid of 1e-3 gives 1.7 epsilon at rate 1e-4.
    return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=min(
            GRID * max(1.0, 0.5 / noise**2),
            # A quarter of a loss's standard deviation, which is about q sqrt(exp(1/z^2) - 1).
            rate * math.sqrt(math.expm1(min(noise**-2, 50.0))) / 4,
        ),
    )


@lru_cache(maxsize=4096)
def spent(noise: float, rate: float, steps: int, delta: float) -> float:
    """Compute ε after a number of steps of Poisson sampling; it is infinite without noise.

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
    """Compute the Rényi divergences, by order, of one round with cohorts of a fixed size."""
    dp = _library()
    # The sensitivity is 2 S, because one client replaces another.
    event = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(noise / 2))
    return dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE).compose(event).rdp


@dataclass(frozen=True)
class Guarantee:
    """Privacy guarantee of a run for each client, known before the first round.

    Attributes:
        sampling: How clients are sampled.
        noise: z, the standard deviation of the noise of a round divided by the clip norm.
        clients: N, the clients that may take part.
        cohort: m, the average number of clients of a round.
        delta: δ.
        rounds: Number of rounds of the run.
        surveys: Number of releases of the same kind before round 1: 1 with a survey of the clients.
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
        """Description of the cohorts that the accountant assumes."""
        which = f"{self.cohort:,} of {self.clients:,} clients"
        if self.sampling == "poisson":
            return f"Poisson cohorts of {which} on average"
        return f"cohorts of exactly {which}"

    def epsilon(self, rounds: int | None = None) -> float:
        """Compute ε after some rounds, by default after the whole run; infinite without noise.

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
    """Find the guarantee with the smallest noise whose ε is at most ``target``.

    Raises:
        InputError: The library is missing, or ε exceeds ``target`` at the largest multiplier.
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
    """Return a noise multiplier of four digits by its number, ascending from 0.01."""
    return float(f"{1000 + number % 9000}e{number // 9000 - 5}")


def smallest_noise(epsilon: Callable[[float], float], target: float) -> float:
    """Find the smallest :func:`multiplier` whose ε is at most ``target``.

    Args:
        epsilon: ε as a decreasing function of the multiplier, at most ``target`` at the largest
            multiplier.
        target: Maximum ε.
    """

    def is_enough(number: int) -> bool:
        return epsilon(multiplier(number)) <= target

    # Search downward in steps: losses at tiny multipliers would exhaust the memory.
    high = MULTIPLIERS - 1
    while high > 0 and is_enough(low := max(high - 2700, 0)):
        high = low
    return multiplier(bisect_left(range(high), True, max(high - 2700, 0), key=is_enough))
