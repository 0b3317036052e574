"""Epsilon against closed forms, an accountant of its own, and the rules that any epsilon obeys."""

import math
from functools import cache

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from trishul_ray.errors import InputError
from trishul_ray.lab.privacy.accounting import (
    ORDERS,
    Guarantee,
    affordable,
    guarantee,
    smallest_noise,
)
from trishul_ray.lab.privacy.config import PrivacyConfig
from trishul_ray.lab.privacy.stage import poisson_cohort


def gaussian_epsilon(sigma, delta):
    """ε of one Gaussian: δ(ε) = Φ(1/(2σ) - εσ) - e^ε Φ(-1/(2σ) - εσ), solved for ε."""

    def gap(epsilon):
        first = norm.cdf(0.5 / sigma - epsilon * sigma)
        return first - math.exp(epsilon + norm.logcdf(-0.5 / sigma - epsilon * sigma)) - delta

    return brentq(gap, 0, 600)


def renyi_epsilon(z, q, rounds, delta):
    """ε of Poisson sampling by Rényi divergences of integer orders, from their binomial sum."""
    best = math.inf
    for order in range(2, 300):
        k = np.arange(order + 1)
        choose = [
            math.lgamma(order + 1) - math.lgamma(i + 1) - math.lgamma(order - i + 1) for i in k
        ]
        terms = np.array(choose) + k * math.log(q) + (order - k) * math.log1p(-q)
        divergence = np.logaddexp.reduce(terms + k * (k - 1) / (2 * z * z)) / (order - 1)
        found = rounds * divergence + math.log1p(-1 / order)
        best = min(best, found - (math.log(delta) + math.log(order)) / (order - 1))
    return best


def fixed_epsilon(z, population, cohort, rounds, delta):
    """ε of cohorts without replacement, by the bound of Wang, Balle and Kasiviswanathan.

    "Subsampled Rényi Differential Privacy and Analytical Moments Accountant", AISTATS 2019, arXiv
    1808.00087, Theorem 27. One client replaces another, so the Gaussian has multiplier z / 2. B(l)
    is E[(L - 1)^l] of its likelihood ratio L, whose i-th moment is exp(i (i - 1) / (2 (z / 2)^2)).
    """
    q, half = mpmath.mpf(cohort) / population, (mpmath.mpf(z) / 2) ** 2
    with mpmath.workdps(300):
        moments = [mpmath.exp(i * (i - 1) / (2 * half)) for i in range(max(ORDERS) + 1)]

        @cache
        def central(order):
            terms = (mpmath.binomial(order, i) * (-1) ** i * moments[i] for i in range(order + 1))
            return abs(mpmath.fsum(terms))

        def term(j):
            if j == 2:
                return min(4 * (moments[2] - 1), 2 * moments[2])
            return min(4 * mpmath.sqrt(central(j - j % 2) * central(j + j % 2)), 2 * moments[j])

        terms = [None, None, *(q**j * term(j) for j in range(2, max(ORDERS) + 1))]
        best = math.inf
        for order in ORDERS:
            total = mpmath.fsum(mpmath.binomial(order, j) * terms[j] for j in range(2, order + 1))
            divergence = mpmath.log1p(total) / (order - 1)
            tail = math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
            best = min(best, float(rounds * divergence) + tail)
    return best


def poisson(z, population=1000, cohort=50, rounds=100, delta=1e-5):
    return Guarantee("poisson", z, population, cohort, delta, rounds)


@pytest.mark.parametrize("rounds", [1, 7, 100])
@pytest.mark.parametrize("z", [1.0, 4.0, 20.0])
def test_when_everyone_takes_part_rounds_are_one_gaussian(z, rounds):
    expected = gaussian_epsilon(z / math.sqrt(rounds), 1e-5)
    found = poisson(z, 50, 50).epsilon(rounds)
    assert expected <= found * (1 + 1e-6) and found <= expected * 1.002 + 1e-3


@pytest.mark.parametrize(
    "population, cohort, rounds, z, epsilon",
    [  # computed once with PLD on a grid of 1e-4
        (20, 3, 50, 2.40, 2.00297), (1000, 50, 100, 1.34, 2.01138),
        (10_000, 500, 200, 1.67, 2.00344), (100_000, 1000, 500, 0.88, 2.02074),
    ],
)  # fmt: skip
def test_poisson_epsilon_lies_below_the_renyi_bound_and_is_stable(
    population, cohort, rounds, z, epsilon
):
    delta = PrivacyConfig(noise=z).delta_for(population)
    found = poisson(z, population, cohort, rounds, delta).epsilon()
    assert found == pytest.approx(epsilon, rel=5e-4)
    bound = renyi_epsilon(z, cohort / population, rounds, delta)
    assert 0.75 * bound < found < bound


@pytest.mark.parametrize(
    "population, cohort, rounds, z",
    [
        (20, 3, 50, 2.4),
        (1000, 50, 100, 1.34),
        (100_000, 1000, 500, 0.88),
        (100_000, 1000, 12, 0.41),
    ],
)
def test_poisson_epsilon_agrees_with_opacus(population, cohort, rounds, z):
    """Its PRV accountant composes by Fourier transforms, and adds a bound on its error, 0.01."""
    delta = PrivacyConfig(noise=z).delta_for(population)
    theirs = PRVAccountant()
    theirs.history = [(z, cohort / population, rounds)]
    bound = theirs.get_epsilon(delta, eps_error=0.01)
    assert poisson(z, population, cohort, rounds, delta).epsilon() == pytest.approx(
        bound - 0.01, abs=2e-3 + 2e-4 * bound
    )


@pytest.mark.parametrize(
    "z, q, rounds", [(1.0, 1e-3, 1000), (2.0, 1e-3, 1000), (3.0, 1e-3, 5000), (1.0, 1e-4, 1000)]
)
def test_epsilon_of_small_rates_is_that_of_composed_densities(z, q, rounds):
    """The loss of removing a client, by its density on a fine grid, composed by an FFT in float64.

    L = log(1 - q + q exp((2x - 1) / 2z^2)), with x of the mixture of N(0, z^2) and N(1, z^2).
    """
    delta, width, size = 1e-6, 2e-5, 2**20
    x = np.linspace(-14 * z, 14 * z + 1, 1_000_001)
    density = (1 - q) * norm.pdf(x, 0, z) + q * norm.pdf(x, 1, z)
    loss = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2))
    place = np.round(loss / width).astype(int) % size
    mass = np.bincount(place, weights=density * (x[1] - x[0]), minlength=size)
    composed = np.fft.irfft(np.fft.rfft(mass / mass.sum()) ** rounds, size)
    losses = width * ((np.arange(size) + size // 2) % size - size // 2)

    def excess(epsilon):
        above = losses > epsilon
        return float((composed * -np.expm1(epsilon - losses))[above].sum()) - delta

    expected = brentq(excess, 1e-4, 5.0)
    found = poisson(z, 1_000_000, int(1_000_000 * q), rounds, delta).epsilon()
    assert expected * (1 - 1e-3) < found < 1.02 * expected


@pytest.mark.parametrize("z, q, rounds", [(0.8, 0.2, 10), (1.5, 0.05, 200), (0.6, 0.5, 3)])
def test_poisson_epsilon_agrees_with_sampled_privacy_losses(z, q, rounds):
    """δ(ε) = E[(1 - e^(ε - L))+] over losses L of the run, of both neighbours, by sampling."""
    rng, count, delta = np.random.default_rng(1), 200_000, 0.02

    def loss(x):  # log of (1-q) N(0,z²) + q N(1,z²) over N(0,z²)
        return np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))

    epsilon = poisson(z, 1000, round(1000 * q), rounds, delta).epsilon()
    deltas = []
    for present in (True, False):
        total = np.zeros(count)
        for _ in range(rounds):
            x = rng.standard_normal(count) * z + (present & (rng.random(count) < q))
            total += loss(x) if present else -loss(x)
        over = np.maximum(0, -np.expm1(epsilon - total))
        deltas.append((over.mean(), over.std() / math.sqrt(count)))
    found, deviation = max(deltas)
    assert found == pytest.approx(delta, abs=5 * deviation + 2e-3 * delta)


def test_a_fixed_cohort_costs_far_more_than_poissons_epsilon_says():
    z = 1.444
    fixed = Guarantee("fixed", z, 1000, 50, 1e-5, 100).epsilon()
    assert 7 * poisson(z).epsilon() < fixed


@pytest.mark.parametrize(
    "z, population, cohort, rounds",
    [(1.444, 1000, 50, 100), (8.0, 20, 3, 50), (0.9, 100_000, 1000, 12), (3.0, 50, 25, 1)],
)
def test_epsilon_of_fixed_cohorts_is_the_published_bound(z, population, cohort, rounds):
    found = Guarantee("fixed", z, population, cohort, 1e-5, rounds).epsilon()
    expected = fixed_epsilon(z, population, cohort, rounds, 1e-5)
    assert found == pytest.approx(expected, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(z=st.floats(0.5, 5), cohort=st.integers(1, 40), rounds=st.integers(1, 50))
def test_epsilon_grows_with_rounds_and_cohorts_and_falls_with_noise(z, cohort, rounds):
    def epsilon_of(z, cohort, rounds):
        return poisson(z, 50, cohort, rounds, 1e-4).epsilon()

    epsilon = epsilon_of(z, cohort, rounds)
    assert 0 < epsilon < epsilon_of(z, cohort, 2 * rounds)
    assert epsilon <= epsilon_of(z, cohort + 10, rounds) * (1 + 1e-3) + 1e-3
    assert epsilon_of(1.5 * z, cohort, rounds) < epsilon


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
def test_the_noise_of_an_epsilon_is_the_least_that_reaches_it(sampling, target):
    options = PrivacyConfig(epsilon=target, sampling=sampling)
    found = guarantee(options, 200, 10, 30)
    z = found.noise
    assert float(f"{z:.4g}") == z
    assert 0.99 * target < found.epsilon() <= target
    less = guarantee(PrivacyConfig(noise=0.997 * z, sampling=sampling), 200, 10, 30)
    assert less.epsilon() > target


@given(target=st.floats(0.07, 90))
def test_the_search_for_noise_finds_a_known_inverse(target):
    z = smallest_noise(lambda noise: 3 / noise, target)
    assert 3 / target <= z <= 3 / target * (1 + 2e-3)


def test_noise_without_a_bound_and_an_epsilon_out_of_reach():
    assert poisson(0.0).epsilon() == math.inf
    with pytest.raises(InputError, match=r"^privacy.epsilon=1e-06 is below the ε of 500 rounds"):
        guarantee(PrivacyConfig(epsilon=1e-6), 20, 10, 500)


def test_a_budget_pays_the_rounds_whose_epsilon_it_covers():
    options = PrivacyConfig(noise=1.0, budget=2.5, delta=1e-5)
    paid, found = affordable(options, 1000, 50, 100), poisson(1.0)
    assert 0 < paid < 100 and found.epsilon(paid) <= 2.5 < found.epsilon(paid + 1)
    assert affordable(options.model_copy(update={"budget": 1e3}), 1000, 50, 100) == 100
    with pytest.raises(InputError, match=r"^privacy.budget=0.001 is below the ε of one round"):
        affordable(options.model_copy(update={"budget": 1e-3}), 1000, 50, 100)


def test_poisson_cohorts_have_binomial_sizes_and_every_client_its_share():
    rounds, clients, expected = 4000, 20, 3
    drawn = [poisson_cohort(0, number, clients, expected) for number in range(rounds)]
    sizes = np.array([len(cohort) for cohort in drawn])
    q = expected / clients
    assert sizes.mean() == pytest.approx(
        expected, abs=5 * math.sqrt(clients * q * (1 - q) / rounds)
    )
    variance = clients * q * (1 - q)
    assert sizes.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / rounds) + 0.02)
    counts = np.bincount(np.concatenate(drawn).astype(int), minlength=clients)
    assert np.abs(counts / rounds - q).max() < 5 * math.sqrt(q * (1 - q) / rounds)
    assert (sizes == 0).any() and all(cohort == sorted(cohort) for cohort in drawn)
