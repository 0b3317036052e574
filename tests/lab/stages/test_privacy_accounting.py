"""Epsilon compared with closed forms and with other accountants."""

import math
from dataclasses import replace
from functools import cache

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from trishul_ray.lab.privacy.accounting import (
    ORDERS,
    Guarantee,
    smallest_noise,
    with_noise_for,
)
from trishul_ray.lab.privacy.config import PrivacyConfig
from trishul_ray.lab.privacy.stage import poisson_cohort


def gaussian_epsilon(sigma, delta):
    """Compute ε of one Gaussian: δ(ε) = Φ(1/(2σ) - εσ) - e^ε Φ(-1/(2σ) - εσ), solved for ε."""

    def gap(epsilon):
        first = norm.cdf(0.5 / sigma - epsilon * sigma)
        return first - math.exp(epsilon + norm.logcdf(-0.5 / sigma - epsilon * sigma)) - delta

    return brentq(gap, 0, 600)


def fixed_epsilon(z, population, cohort, rounds, delta):
    """Compute ε of cohorts without replacement (Wang, Balle and Kasiviswanathan).

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
    "population, cohort, rounds, z",
    [
        (20, 3, 50, 2.4),
        (1000, 50, 100, 1.34),
        (100_000, 1000, 500, 0.88),
        (100_000, 1000, 12, 0.41),
    ],
)
def test_poisson_epsilon_agrees_with_opacus(population, cohort, rounds, z):
    """Its PRV accountant composes with Fourier transforms, and adds a bound on its error, 0.01."""
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
def test_epsilon_of_small_rates_equals_composed_densities(z, q, rounds):
    """Compute the loss of removing a client on a fine grid, composed with an FFT in float64.

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
def test_epsilon_is_monotonic_in_its_arguments(z, cohort, rounds):
    def epsilon_of(z, cohort, rounds):
        return poisson(z, 50, cohort, rounds, 1e-4).epsilon()

    epsilon = epsilon_of(z, cohort, rounds)
    assert 0 < epsilon < epsilon_of(z, cohort, 2 * rounds)
    assert epsilon <= epsilon_of(z, cohort + 10, rounds) * (1 + 1e-3) + 1e-3
    assert epsilon_of(1.5 * z, cohort, rounds) < epsilon


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
def test_noise_for_epsilon_is_the_least(sampling, target):
    start = Guarantee(sampling, 0, 200, 10, 1e-5, 30)
    found = with_noise_for(target, start)
    z = found.noise
    assert float(f"{z:.4g}") == z
    assert 0.99 * target < found.epsilon() <= target
    assert replace(start, noise=0.997 * z).epsilon() > target


@given(target=st.floats(0.07, 250))
def test_search_for_noise_finds_a_known_inverse(target):
    z = smallest_noise(lambda noise: 3 / noise, target)
    assert 3 / target <= z <= 3 / target * (1 + 1e-3) + 1e-9


def test_noise_of_zero_has_no_epsilon():
    assert poisson(0.0).epsilon() == math.inf


def test_poisson_cohorts_have_binomial_sizes():
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
