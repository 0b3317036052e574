"""Clipping and noise: the identities that make a run private."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chi2

from trishul_ray.adapters.layout import Layout
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.privacy.stage import CLIP_NORM, CLIPPED, Privacy, clip
from trishul_ray.methods.base.messages import State
from trishul_ray.stages import Change, ClientRoundInfo, Partial, norm_of

floats = st.floats(-1e6, 1e6, width=32)
vectors = arrays(np.float32, st.integers(1, 40), elements=floats)
LAYOUT = Layout.of([("a.core", (3, 4, 4)), ("b.core", (2, 6, 6)), ("head:w", (5, 2))])
UNITS = tuple(LAYOUT.units(["a.core", "b.core", "head:w"]))


def private(z=1.0, *, norm=1.0, shares=None, sent=None, extra=0):
    """Create the stage of a run with 4 of 20 clients per round."""
    words = [f"privacy.noise={z}", f"privacy.clip={norm}", "federation.clients_per_round=4"]
    settings = load_experiment(None, ["federation.clients=20", *words])
    stage = Privacy(settings.stages["privacy"], settings)
    stage.plan = SimpleNamespace(
        units=UNITS,
        lengths={"shared": LAYOUT.size} | ({"c": extra} if extra else {}),
        unit_shares=lambda: np.ones(len(UNITS)) if shares is None else shares,
        sent_units=lambda number: sent,
    )
    return stage


def mean_of(stage, number=1, shared=None, extra=None):
    shared = np.zeros(LAYOUT.size) if shared is None else shared
    found = {"c": extra} if extra is not None else {}
    total = Partial(State(shared, found), 4.0, np.zeros(0), np.zeros(0))
    return stage.average(number, total).state


@given(shared=vectors, extra=vectors, bound=st.floats(1e-3, 1e3))
def test_a_clipped_change_has_at_most_the_norm(shared, extra, bound):
    first, rest, before = clip(shared, {"x": extra}, bound)
    assert norm_of([first, rest["x"]]) <= bound or before <= bound
    if before <= bound:
        assert first is shared and rest["x"] is extra
        return
    factor = bound / before
    for found, given_ in ((first, shared), (rest["x"], extra)):
        expected = given_.astype(np.float64) * factor
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-40)


def test_a_change_of_zero_or_infinite_norm_stays():
    zero = np.zeros(3, dtype=np.float32)
    assert clip(zero, {}, 0.1)[0] is zero
    broken = np.array([np.inf, 1], dtype=np.float32)  # The server rejects it.
    assert clip(broken, {}, 0.1)[0] is broken


@given(uploads=arrays(np.float32, (5, 7), elements=floats), bound=st.floats(0.1, 10))
def test_sums_of_neighboring_cohorts_differ_by_the_norm(uploads, bound):
    """Units that a client does not train are zeros, which only reduce its norm."""
    clipped = [clip(upload, {}, bound)[0].astype(np.float64) for upload in uploads]
    for left_out in range(5):
        rest = [c for i, c in enumerate(clipped) if i != left_out]
        assert np.linalg.norm(np.sum(clipped, 0) - np.sum(rest, 0)) <= bound * (1 + 1e-9)


def test_a_client_reports_whether_it_was_clipped():
    def sent(norm):
        sender = ClientRoundInfo(0, 1, 0, 1.0, UNITS, instructions={CLIP_NORM: norm})
        return private().send(Change(np.full(4, 1, dtype=np.float32), {}), sender)

    assert sent(1.0).metrics[CLIPPED] == 1.0 and sent(2.0).metrics[CLIPPED] == 0.0
    assert norm_of([sent(1.0).shared]) == pytest.approx(1.0)


def test_noiseless_mean_divides_by_expected_cohort():
    sums = np.arange(LAYOUT.size, dtype=np.float64)
    shares = np.array([0.5, 0.5, 0.5, 1.0, 1.0, 1.0])
    found = mean_of(private(0, shares=shares, extra=3), 1, sums, np.ones(3))
    np.testing.assert_allclose(found.shared[:48], sums[:48] / 2)
    np.testing.assert_allclose(found.shared[48:], sums[48:] / 4)
    np.testing.assert_allclose(found.extra["c"], 0.25)


def test_noise_has_its_variance_in_every_unit():
    """Sums of squares are chi-square; limits at 1e-6, for units trained by half or all clients."""
    shares, norm, z = np.array([0.5, 0.25, 1, 1, 0.5, 1.0]), 3.0, 1.7
    stage, none = private(z, norm=norm, shares=shares, extra=40), np.zeros(40)
    found = [mean_of(stage, number, extra=none) for number in range(1, 51)]
    for unit, share in zip(UNITS, shares, strict=True):
        values = np.concatenate([each.shared[unit.wire] for each in found])
        statistic = float(np.square(values * 4 * share / (z * norm)).sum())
        assert chi2.ppf(1e-6, values.size) < statistic < chi2.isf(1e-6, values.size)
    extra = np.concatenate([each.extra["c"] for each in found]).astype(float) * 4 / (z * norm)
    assert chi2.ppf(1e-6, extra.size) < np.square(extra).sum() < chi2.isf(1e-6, extra.size)
    np.testing.assert_array_equal(mean_of(stage, 3, extra=none).shared, found[2].shared)


def test_units_outside_a_round_stay():
    sent = np.array([True, False, True, True, True, False])
    change = mean_of(private(sent=sent)).shared
    for unit, moves in zip(UNITS, sent, strict=True):
        assert (change[unit.wire] != 0).all() == moves


def test_printed_ratio_compares_equal_changes_with_noise():
    stage = private(2.0)
    noises = [mean_of(stage, number).shared for number in range(1, 201)]
    measured = 1 / np.mean([np.linalg.norm(noise) for noise in noises])
    (_, line) = stage.begin()
    assert f"signal-to-noise ratio of a round {4 / (2 * math.sqrt(LAYOUT.size)):.2g} at" in line
    assert 4 / (2 * math.sqrt(LAYOUT.size)) == pytest.approx(measured, rel=0.02)
