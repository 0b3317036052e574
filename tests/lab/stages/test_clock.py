"""The clock: formulas of a client's round, who counts, and what it costs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trishul_ray.lab.clock.clock import Times, jain, plan

positive = st.floats(0.01, 1e4)
some = st.integers(1, 12)


@st.composite
def many_times(draw, equal=False):
    count = draw(some)

    def column(values=positive):
        return np.array(draw(st.lists(values, min_size=count, max_size=count)))

    return Times(
        latency=draw(st.floats(0, 10)),
        down=column(),
        up=column(),
        down_bytes=column(st.integers(0, 10**9)),
        up_bytes=column(st.integers(0, 10**9)),
        step=column(),
        steps=np.full(count, draw(st.integers(1, 100))),
    )


def clients_of(times):
    return np.arange(len(times.step)) * 3 + 1


def test_a_round_of_known_numbers():
    ones = np.ones(1)
    times = Times(0.1, 20 * ones, 5 * ones, 5e6 * ones, 1.25e6 * ones, 0.5 * ones, np.array([50]))
    # 40 Mbit at 20 Mbit/s, 50 steps of half a second, 10 Mbit at 5 Mbit/s.
    assert times.total[0] == pytest.approx(0.1 + 2 + 25 + 2, rel=1e-15)
    # 4 W while it computes, 1.5 W while it transfers.
    assert times.joules(4 * ones, 1.5, math.inf * ones)[0] == pytest.approx(4 * 25 + 1.5 * 4)


@given(times=many_times(), factor=st.integers(2, 50))
def test_transfer_is_linear_in_bytes_and_computing_in_speed(times, factor):
    more = replace(times, down_bytes=factor * times.down_bytes, up_bytes=factor * times.up_bytes)
    np.testing.assert_allclose(more.download, factor * times.download, rtol=1e-14)
    np.testing.assert_allclose(more.upload, factor * times.upload, rtol=1e-14)
    np.testing.assert_array_equal(more.compute, times.compute)
    np.testing.assert_array_equal(replace(times, step=times.step / 2).compute, times.compute / 2)


@given(times=many_times(), wanted=some)
def test_without_policies_the_first_count_and_the_round_lasts_until_they_are_done(times, wanted):
    clients = clients_of(times)
    found = plan(clients, times, wanted=wanted)
    order = sorted(range(len(clients)), key=lambda i: (times.total[i], clients[i]))
    assert set(np.flatnonzero(found.accepted)) == set(order[:wanted])
    assert found.seconds == max(times.total[i] for i in order[:wanted])


@given(times=many_times(), deadline=positive, wanted=some)
def test_who_comes_after_the_deadline_is_late_and_the_server_waits_until_then(
    times, deadline, wanted
):
    found = plan(clients_of(times), times, wanted=wanted, deadline=deadline)
    late = np.array([fate == "late" for fate in found.fates])
    np.testing.assert_array_equal(late, times.total > deadline)
    full = found.accepted.sum() == wanted
    assert found.seconds == (times.total[found.accepted].max() if full else deadline)


@given(times=many_times(), deadline=positive)
def test_partial_work_ends_in_time_and_one_step_more_would_not(times, deadline):
    count = len(times.step)
    found = plan(clients_of(times), times, wanted=count, deadline=deadline, partial=True)
    accepted, new = found.accepted, found.times
    slack = 1e-9 * deadline
    assert (new.total[accepted] <= deadline + slack).all()
    longer = replace(new, steps=new.steps + 1).total
    assert (longer[accepted & (new.steps < times.steps)] > deadline - slack).all()
    one = replace(times, steps=np.ones_like(times.steps)).total
    assert (one[~accepted] > deadline - slack).all()
    # Nobody who is in time anyway makes fewer steps.
    np.testing.assert_array_equal(new.steps[times.total <= deadline - slack], times.steps[0])


@given(times=many_times(), data=st.data())
def test_lost_clients_never_count_and_cost_what_they_did_until_then(times, data):
    count = len(times.step)
    lost = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    found = plan(clients_of(times), times, wanted=count, lost=lost)
    np.testing.assert_array_equal(found.accepted, lost == 0)
    power = np.full(count, 3.0)
    down, compute, up = 2 * times.download, power * times.compute, 2 * times.upload
    expected = down + np.where(lost != 1, compute, 0) + np.where(lost == 0, up, 0)
    np.testing.assert_allclose(found.joules(power, 2.0), expected, rtol=1e-9, atol=1e-9)


@given(times=many_times(), wanted=some)
def test_nobody_spends_more_than_for_a_whole_round(times, wanted):
    power = np.full(len(times.step), 3.0)
    whole = times.joules(power, 2.0, np.full(len(power), math.inf))
    found = plan(clients_of(times), times, wanted=wanted)
    joules = found.joules(power, 2.0)
    assert (joules <= whole * (1 + 1e-12)).all()
    np.testing.assert_array_equal(joules[found.accepted], whole[found.accepted])


@given(values=st.lists(st.floats(0.001, 1e6), min_size=1, max_size=20), scale=positive)
def test_jains_index_is_one_if_equal_and_has_no_unit(values, scale):
    values = np.array(values)
    assert 1 / len(values) * (1 - 1e-12) <= jain(values) <= 1 + 1e-12
    assert jain(scale * values) == pytest.approx(jain(values), rel=1e-9)
    assert jain(np.full(7, values[0])) == pytest.approx(1)
    assert jain(np.array([values[0], 0, 0, 0])) == pytest.approx(1 / 4)
    assert jain(np.zeros(3)) == 1
