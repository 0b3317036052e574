"""Devices, the duration of a client's round, and the clients that count."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trishul_ray.errors import InputError
from trishul_ray.lab.clock.attempt import plan
from trishul_ray.lab.clock.devices import (
    ClientClock,
    Devices,
    DevicesConfig,
    Moments,
    read_devices,
)
from trishul_ray.lab.clock.stage import CohortConfig, power_of_choice

positive = st.floats(0.01, 1e4)
some = st.integers(1, 12)


@given(seed=st.integers(0, 99), few=st.integers(1, 40), more=st.integers(0, 40))
@settings(max_examples=20)
def test_sampled_device_is_independent_of_client_count(seed, few, more):
    options = DevicesConfig(kind="lognormal")
    small, large = (Devices.of(options, seed, n) for n in (few, few + more))
    for name in ("speed", "down", "up"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:few])


def test_medians_and_spreads_are_configured():
    found = Devices.of(DevicesConfig(kind="lognormal", network_spread=0.5), 3, 40_000)
    for values, median, spread in (
        (found.speed, 1e12, 1),
        (found.up, 5, 0.5),
        (found.down, 20, 0.5),
    ):
        log = np.log(values / median)
        # Standard errors of 40,000 samples: 0.005 and 0.0035 standard deviations.
        assert abs(np.median(log)) < 0.03 * spread
        assert abs(log.std() - spread) < 0.02 * spread


GOOD = {
    "client": [2, 0, 1, 9],
    "speed": [3e9, 1e9, 2e9, 1.0],
    "up": [3, 1, 2, 1],
    "down": [6, 2, 4, 1],
}


def written(tmp_path, table):
    pq.write_table(pa.table(table), tmp_path / "devices.parquet")
    return str(tmp_path / "devices.parquet")


def test_a_file_of_devices_is_read_by_client(tmp_path):
    found = read_devices(written(tmp_path, GOOD), 3)
    assert found.speed.tolist() == [1e9, 2e9, 3e9]
    assert (found.up.tolist(), found.down.tolist()) == ([1, 2, 3], [2, 4, 6])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({k: v for k, v in GOOD.items() if k != "up"}, "is not a table of devices: .*up"),
        (GOOD | {"client": [2, 0, 7, 9]}, "speed of client 1 is nan; each of federation.clients=3"),
        (GOOD | {"client": [2, 0, 0, 9]}, "is not a table of devices: .*duplicate"),
        (GOOD | {"speed": [3.0, 0.0, 2.0, 1]}, "speed of client 0 is 0; each"),
        (GOOD | {"down": [3.0, math.inf, 2.0, 1]}, "down of client 0 is inf; each"),
        (GOOD | {"speed": list("abcd")}, "is not a table of devices: could not convert string"),
    ],
)
def test_a_faulty_file_of_devices_is_named(tmp_path, table, message):
    with pytest.raises(InputError, match=f"devices.path='.*devices.parquet'.*{message}"):
        read_devices(written(tmp_path, table), 3)


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "x").write_text("client,speed\n")
    for name in ("nowhere", str(tmp_path / "x")):
        with pytest.raises(InputError, match=r"devices\.path='.*' is not a table of devices"):
            read_devices(name, 3)


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        (DevicesConfig, {"speed": 2e12}, "speed=2000000000000.0 has no effect with kind='none'"),
        (DevicesConfig, {"latency": 1}, "latency=1.0 has no effect with kind='none'"),
        (DevicesConfig, {"kind": "file"}, "devices.kind=file needs devices.path"),
        (DevicesConfig, {"kind": "lognormal", "path": "x"}, "path='x' has .*devices.kind=file"),
        (DevicesConfig, {"kind": "file", "path": "x", "up": 7}, "up=7.0 has no effect with kind="),
        (CohortConfig, {"select": "ort"}, "Input should be 'uniform' or 'power_of_choice'"),
        (CohortConfig, {"candidates": 3}, "candidates=3.0 has no effect with select='uniform'"),
        (CohortConfig, {"extra": 0.5}, "greater than or equal to 1"),
        (CohortConfig, {"dropout": 1.0}, "less than 1"),
    ],
)
def test_wrong_fields_are_rejected(section, fields, message):
    with pytest.raises(ValidationError, match=message):
        section(**fields)


def test_a_round_of_known_numbers():
    ones = np.ones(2)
    clock = ClientClock(Devices(ones, up=5 * ones, down=20 * ones), 25 * ones, 0.1)
    found = clock.moments(np.array([1]), 5e6, np.array([1.25e6]))
    # 40 Mbit at 20 Mbit/s, 25 seconds of training, 10 Mbit at 5 Mbit/s.
    assert [float(part[0]) for part in found] == pytest.approx([2.1, 27.1, 29.1], rel=1e-15)


@st.composite
def rounds(draw):
    """Draw clients, and the times at which they finish each part."""
    count = draw(some)
    parts = draw(st.lists(st.tuples(positive, positive, positive), min_size=count, max_size=count))
    return np.arange(count) * 3 + 1, Moments(*np.array(parts).T.cumsum(axis=0))


@given(found=rounds(), wanted=some)
def test_the_first_clients_count(found, wanted):
    clients, moments = found
    attempt = plan(clients, moments, wanted=wanted)
    order = sorted(range(len(clients)), key=lambda i: (moments.uploaded[i], clients[i]))
    assert set(np.flatnonzero(attempt.kept)) == set(order[:wanted])
    last = max(moments.uploaded[i] for i in order[:wanted])
    assert attempt.seconds(moments.uploaded[attempt.kept]) == last


@given(found=rounds(), deadline=positive, wanted=some)
def test_clients_after_the_deadline_are_late(found, deadline, wanted):
    clients, moments = found
    attempt = plan(clients, moments, wanted=wanted, deadline=deadline)
    late = np.array([fate == "late" for fate in attempt.fates])
    np.testing.assert_array_equal(late, moments.uploaded > deadline)
    finished = moments.uploaded[attempt.kept]
    expected = finished.max() if len(finished) == wanted else deadline
    assert attempt.seconds(finished) == expected


@given(found=rounds(), data=st.data())
def test_lost_clients_never_count(found, data):
    clients, moments = found
    count = len(clients)
    lost = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    attempt = plan(clients, moments, wanted=count, lost=lost)
    np.testing.assert_array_equal(attempt.kept, lost == 0)
    ends = np.choose(lost, [moments.uploaded, moments.downloaded, moments.trained])
    assert attempt.seconds(moments.uploaded[attempt.kept]) == ends.max()


@given(size=st.integers(1, 10), seed=st.integers(0, 99))
def test_power_of_choice_prefers_high_losses(size, seed):
    rng = np.random.default_rng(seed)
    loss = np.where(rng.random(10) < 0.3, math.nan, rng.random(10))
    chosen = power_of_choice(rng.integers(1, 50, 10), loss, 1000, size, rng)
    assert len(set(chosen.tolist())) == size
    known = np.nan_to_num(loss, nan=math.inf)
    assert sorted(known[chosen]) == sorted(known)[-size:]


def test_candidates_are_sampled_by_their_rows():
    rows, loss, rng = np.array([1, 1, 8]), np.full(3, math.nan), np.random.default_rng(0)
    chosen = [power_of_choice(rows, loss, 1, 1, rng)[0] for _ in range(2000)]
    assert abs(np.mean(np.array(chosen) == 2) - 0.8) < 0.04  # 4 standard errors
