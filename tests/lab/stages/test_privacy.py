"""Clipping, noise and the audit: the identities that make a run private."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import binom, chi2

from trishul_ray.adapters.layout import Layout
from trishul_ray.lab.privacy.accounting import Guarantee
from trishul_ray.lab.privacy.audit import ERROR, canaries, shift_interval, threshold_epsilon
from trishul_ray.lab.privacy.clipping import CLIPPED, clip, clip_change, next_norm
from trishul_ray.lab.privacy.config import PrivacyConfig
from trishul_ray.lab.privacy.mechanism import Mechanism
from trishul_ray.stages import Change, norm_of

floats = st.floats(-1e6, 1e6, width=32)
vectors = arrays(np.float32, st.integers(1, 40), elements=floats)
LAYOUT = Layout.of([("a.core", (3, 4, 4)), ("b.core", (2, 6, 6)), ("head:w", (5, 2))])
UNITS = tuple(LAYOUT.units(["a.core", "b.core", "head:w"]))


def mechanism(z=1.0, *, shares=None, cohort=4, extra=None, deployed=None, **options):
    return Mechanism(
        options=PrivacyConfig(noise=z, **options),
        seed=5,
        promised=Guarantee("poisson", z, deployed or 20, deployed or cohort, 1e-5, 10),
        clients=20,
        cohort=cohort,
        units=UNITS,
        shares=np.ones(len(UNITS)) if shares is None else shares,
        extra=extra or {},
        first_norm=1.0,
    )


@given(shared=vectors, extra=vectors, bound=st.floats(1e-3, 1e3))
def test_a_clipped_change_has_at_most_the_norm_and_the_same_direction(shared, extra, bound):
    first, rest, before = clip(shared, {"x": extra}, bound)
    assert norm_of([first, rest["x"]]) <= bound or before <= bound
    if before <= bound:
        assert first is shared and rest["x"] is extra
        return
    factor = bound / before
    for found, given_ in ((first, shared), (rest["x"], extra)):
        expected = given_.astype(np.float64) * factor
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-40)


def test_a_change_of_zero_or_without_finite_norm_stays():
    zero = np.zeros(3, dtype=np.float32)
    assert clip(zero, {}, 0.1)[0] is zero
    broken = np.array([np.inf, 1], dtype=np.float32)  # it is refused later
    assert clip(broken, {}, 0.1)[0] is broken


@given(uploads=arrays(np.float32, (5, 7), elements=floats), bound=st.floats(0.1, 10))
def test_the_sums_of_neighbouring_cohorts_differ_by_at_most_the_norm(uploads, bound):
    """Units that a client leaves out are zeros, which only shrink its norm."""
    clipped = [clip(upload, {}, bound)[0].astype(np.float64) for upload in uploads]
    for left_out in range(5):
        rest = [c for i, c in enumerate(clipped) if i != left_out]
        assert np.linalg.norm(np.sum(clipped, 0) - np.sum(rest, 0)) <= bound * (1 + 1e-9)


def test_the_filter_reports_who_was_clipped():
    def sent(norm, of):
        return clip_change(Change(np.full(4, of, dtype=np.float32), {}), norm)

    assert sent(1.0, 1.0).metrics[CLIPPED] == 1.0 and sent(2.0, 1.0).metrics[CLIPPED] == 0.0
    assert norm_of([sent(1.0, 1.0).shared]) == pytest.approx(1.0)


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.9])
def test_the_clip_norm_finds_the_quantile_of_fixed_norms(quantile):
    norms, bound = np.exp(np.random.default_rng(0).normal(1.0, 1.0, 1001)), 0.1
    for _ in range(600):
        bound = next_norm(bound, float((norms <= bound).mean()), quantile, 0.2)
    assert bound == pytest.approx(np.quantile(norms, quantile), rel=0.05)


def test_the_norm_moves_by_the_noisy_share_of_all_expected_clients():
    still = mechanism(z=0.0, adaptive=True, cohort=4)
    assert still.next_norm(1, 2.0, balance=2) == pytest.approx(2.0 * math.exp(-0.2 * 0.5))
    assert still.next_norm(1, 2.0, balance=-2) == pytest.approx(2.0 * math.exp(0.2 * 0.5))
    assert mechanism(z=0.0).next_norm(1, 2.0, balance=-2) == 2.0
    noisy = mechanism(z=1.0, adaptive=True, bit_noise=3.0)
    logs = [math.log(noisy.next_norm(t, 1.0, 0)) / 0.2 for t in range(2000)]  # noise / cohort
    assert np.std(logs) == pytest.approx(3.0 / 4, rel=0.1) and abs(np.mean(logs)) < 0.1


def test_without_noise_the_mean_is_the_sum_over_the_expected_cohort():
    sums = np.arange(LAYOUT.size, dtype=np.float64)
    shares = np.array([0.5, 0.5, 0.5, 1.0, 1.0, 1.0])
    change, extra = mechanism(0.0, shares=shares, extra={"c": 3}).mean(
        1, sums, {"c": np.ones(3)}, 1.0
    )
    np.testing.assert_allclose(change[:48], sums[:48] / 2)
    np.testing.assert_allclose(change[48:], sums[48:] / 4)
    np.testing.assert_allclose(extra["c"], 0.25)


def test_noise_has_its_variance_in_every_unit_and_in_what_the_method_adds():
    """Sums of squares are chi-square; limits at 1e-6, for units trained by a half or by all."""
    shares, norm, z, draws = np.array([0.5, 0.25, 1, 1, 0.5, 1.0]), 3.0, 1.7, 50
    private = mechanism(z, shares=shares, extra={"c": 40}, deployed=10)
    found = [
        private.mean(t, np.zeros(LAYOUT.size), {"c": np.zeros(40)}, norm) for t in range(draws)
    ]
    for unit, share in zip(UNITS, shares, strict=True):
        values = np.concatenate([change[unit.wire] for change, _ in found])
        statistic = float(np.square(values * 10 * share / (z * norm)).sum())
        assert chi2.ppf(1e-6, values.size) < statistic < chi2.isf(1e-6, values.size)
    extra = np.concatenate([each["c"] for _, each in found]) * 10 / (z * norm)
    assert chi2.ppf(1e-6, extra.size) < np.square(extra).sum() < chi2.isf(1e-6, extra.size)
    again = private.mean(3, np.zeros(LAYOUT.size), {"c": np.zeros(40)}, norm)
    np.testing.assert_array_equal(again[0], found[3][0])


def test_units_outside_a_round_stay_and_those_that_nobody_trained_are_noised():
    sent = np.array([True, False, True, True, True, False])
    change, _ = mechanism().mean(1, np.zeros(LAYOUT.size), {}, 1.0, sent)
    for unit, moves in zip(UNITS, sent, strict=True):
        assert (change[unit.wire] != 0).all() == moves


def test_the_ratio_printed_is_that_of_equal_changes_to_their_noise():
    private = mechanism(2.0, cohort=8)
    direction = np.ones(LAYOUT.size) / math.sqrt(LAYOUT.size)
    noises = [private.mean(t, np.zeros(LAYOUT.size), {}, 1.0)[0] for t in range(200)]
    measured = np.linalg.norm(8 * direction / 8) / np.mean([np.linalg.norm(n) for n in noises])
    assert private.signal_to_noise(private.numbers) == pytest.approx(measured, rel=0.02)


def test_canaries_are_unit_directions_that_hardly_overlap():
    directions = np.array(list(canaries(0, 20, 4000)))
    np.testing.assert_allclose(np.linalg.norm(directions, axis=1), 1.0)
    overlaps = directions @ directions.T - np.eye(20)
    assert np.abs(overlaps).max() < 6 / math.sqrt(4000)
    np.testing.assert_array_equal(list(canaries(0, 8, 4000)), directions[:8])


def canary_law(rng, z, rate=1.0, rounds=1, clients=0.0, count=40, size=300):
    """A movement [P] and what canaries sent [P]: Poisson cohorts, noise z a round, beside clients.

    Together the clients move the model by a vector of this norm that does not depend on canaries.
    """
    directions = rng.standard_normal((count, size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    sent = rng.binomial(rounds, rate, count) @ directions
    others = np.zeros(size)
    others[0] = clients
    return sent + others + z * math.sqrt(rounds) * rng.standard_normal(size), sent


@pytest.mark.parametrize(
    "z, rate, rounds, clients",
    [(0.5, 1, 1, 0), (5, 1, 1, 0), (100, 1, 1, 0), (2, 1, 1, 50), (1, 0.3, 5, 0), (3, 0.5, 20, 9)],
)
def test_the_ends_of_an_audit_are_wrong_as_seldom_as_is_said(z, rate, rounds, clients):
    """By the exact law: the shift is 1 / (z sqrt T), or less where clients move the model too."""
    rng, repetitions = np.random.default_rng(0), 2000
    true = 1 / math.sqrt(z**2 * rounds + clients**2 / 300)
    most = binom.isf(1e-4, repetitions, ERROR)
    ends = [shift_interval(*canary_law(rng, z, rate, rounds, clients)) for _ in range(repetitions)]
    low, high = np.array(ends).T
    assert (low > true).sum() <= most and (high < true).sum() <= most
    # Not for want of a bound: it is wrong nearly as often as it may be.
    assert (low > true).sum() >= binom.ppf(1e-4, repetitions, ERROR)


@pytest.mark.parametrize("z", [0.5, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("rate, rounds", [(1.0, 1), (0.1, 1), (0.2, 10), (0.5, 30)])
def test_what_an_audit_can_show_at_best_is_within_what_is_accounted_for(z, rate, rounds):
    delta = 1e-5
    found = threshold_epsilon(1 / (z * math.sqrt(rounds)), rate, rounds, delta)
    accounted = Guarantee("poisson", z, 1000, round(1000 * rate), delta, rounds).epsilon()
    assert 0 < found < accounted * (1 + 1e-4)
    if rounds == 1:  # then the final model is all that is released; PLD rounds up by up to 1 %
        assert found == pytest.approx(accounted, rel=1e-2)


def test_an_audit_shows_less_the_more_noise_there_is():
    rng, found = np.random.default_rng(1), []
    for z in (0.0, 0.5, 2.0, 10.0, 1000.0):
        moved, sent = canary_law(rng, z, count=400, size=20_000)
        ends = shift_interval(moved, sent)
        found.append([threshold_epsilon(end, 1.0, 1, 1e-5) for end in ends])
    lows, highs = zip(*found, strict=True)
    assert sorted(lows, reverse=True) == list(lows) and sorted(highs, reverse=True) == list(highs)
    assert lows[0] > 1000 and lows[-1] == 0 and highs[-1] < 0.5
    assert shift_interval(moved, 0 * sent) is None
