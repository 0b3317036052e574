"""Devices and windows of time: drawn ones do not depend on N, files are read as documented."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trishul_ray.errors import InputError
from trishul_ray.lab.clock.availability import DAY, Always, Diurnal, FromFile, Windows, next_time
from trishul_ray.lab.clock.devices import Devices, DevicesConfig, read_devices

LOGNORMAL = DevicesConfig(kind="lognormal")


@given(seed=st.integers(0, 99), few=st.integers(1, 40), more=st.integers(0, 40))
@settings(max_examples=20)
def test_what_is_drawn_for_a_client_does_not_depend_on_how_many_there_are(seed, few, more):
    small, large = (Devices.of(LOGNORMAL, seed, n) for n in (few, few + more))
    for name in ("speed", "down", "up", "power"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:few])
    one, other = (Diurnal(seed, n).between(0.0, 2 * DAY) for n in (few, few + more))
    mine = other.client < few
    for name in ("client", "start", "end"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name)[mine])


def test_medians_and_spreads_are_those_of_the_configuration():
    found = Devices.of(DevicesConfig(kind="lognormal", network_spread=0.5), 3, 40_000)
    for values, median, spread in (
        (found.speed, 1e12, 1),
        (found.up, 5, 0.5),
        (found.down, 20, 0.5),
    ):
        log = np.log(values / median)
        # Standard errors of 40,000 draws: 0.005 and 0.0035 spreads.
        assert abs(np.median(log)) < 0.03 * spread
        assert abs(log.std() - spread) < 0.02 * spread
    assert (np.bincount(found.deciles) == 4000).all()
    means = [found.speed[found.deciles == d].mean() for d in range(10)]
    assert means == sorted(means)


def test_nights_are_where_they_should_be():
    source = Diurnal(1, 20_000)
    share = [source.between(t, t).at(t, 20_000).mean() for t in np.arange(0, DAY, DAY / 8) + 1]
    # 0.8 nights of 6 exp(1/8) h and 2 windows of 1/4 h a day; time zones are uniform.
    expected = (0.8 * 6 * math.exp(1 / 8) + 2 / 4) / 24
    assert np.allclose(share, expected, atol=0.015)
    nights = source.between(0.0, 10 * DAY)
    assert ((nights.end > 0) & (nights.start <= 10 * DAY)).all()


@given(seed=st.integers(0, 50), at=st.floats(0, 1e7), width=st.floats(0, 1e5))
@settings(max_examples=25)
def test_a_window_is_found_whatever_interval_is_asked(seed, at, width):
    """The windows that cover a moment do not depend on the interval they are asked for."""
    source = Diurnal(seed, 30)
    near, wide = source.between(at, at), source.between(at - width, at + width)
    np.testing.assert_array_equal(near.at(at, 30), wide.at(at, 30))
    assert (np.diff(wide.client) >= 0).all()
    same = np.diff(wide.client) == 0
    assert (wide.start[1:][same] > wide.end[:-1][same]).all()  # merged


@given(
    seed=st.integers(0, 50),
    now=st.floats(0, 1e6),
    needed=st.integers(1, 5),
    members=st.lists(st.integers(0, 29), min_size=15, unique=True).map(np.array),
)
@settings(max_examples=25)
def test_the_clock_jumps_to_the_first_moment_with_enough_members(seed, now, needed, members):
    source = Diurnal(seed, 30)
    found = next_time(source, members, now, needed, now + 366 * DAY)
    assert found >= now
    if found > now:
        assert next_time(source, members, now, needed, np.nextafter(found, now)) is None
    windows = source.between(now, found).of(members)
    assert windows.at(found, 30).sum() >= needed
    moments = [now, *windows.start[(windows.start > now) & (windows.start < found)]]
    assert all(windows.at(t, 30).sum() < needed for t in moments if t < found)


def test_enough_clients_may_never_be_there(tmp_path):
    path = tmp_path / "w.parquet"
    pq.write_table(pa.table({"client": [0, 1], "start": [0, 20], "end": [10, 30]}), path)
    both = np.arange(2)
    assert next_time(FromFile(str(path), 2), both, 5.0, 2, 366 * DAY) is None
    assert next_time(Always(3), np.arange(3), 7.0, 3, 366 * DAY) == 7.0


def test_windows_of_a_file_repeat_after_their_last_day(tmp_path):
    path = tmp_path / "w.parquet"
    rows = {
        "client": [1, 0, 1, 7],
        "start": [50.0, 100.0, 60.0, 0.0],
        "end": [70.0, DAY + 1, 90, 5],
    }
    pq.write_table(pa.table(rows), path)
    source = FromFile(str(path), 3)
    assert source.period == 2 * DAY
    for time, there in ((0, []), (55, [1]), (89, [1]), (100, [0]), (DAY, [0]), (DAY + 1, [])):
        for shift in (0, 2 * DAY, 8 * DAY):
            t = time + shift
            assert np.flatnonzero(source.between(t, t).at(t, 3)).tolist() == there, time
    assert source.between(0, 4 * DAY).seconds(0, 4 * DAY, 3).tolist() == [2 * (DAY - 99), 80, 0]


@given(data=st.data())
def test_seconds_and_moments_of_windows_agree(data):
    starts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True))
    edges = np.sort(np.array(starts, dtype=float))
    edges = edges[: len(edges) // 2 * 2].reshape(-1, 2)
    windows = Windows(np.zeros(len(edges), dtype=int), edges[:, 0], edges[:, 1])
    first, last = sorted(data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))
    there = sum(windows.at(t + 0.5, 1)[0] for t in range(first, last))
    assert windows.seconds(first, last, 1).tolist() == [there]


GOOD = {
    "client": [2, 0, 1, 9],
    "speed": [3e9, 1e9, 2e9, 1.0],
    "up": [3, 1, 2, 1],
    "down": [6, 2, 4, 1],
}


def written(tmp_path, table):
    path = tmp_path / "devices.parquet"
    pq.write_table(pa.table(table), path)
    return str(path)


def test_a_file_of_devices_is_read_by_client(tmp_path):
    found = read_devices(written(tmp_path, GOOD), 3, 4.0)
    assert found.speed.tolist() == [1e9, 2e9, 3e9]
    assert (found.up.tolist(), found.down.tolist()) == ([1, 2, 3], [2, 4, 6])
    assert found.power.tolist() == [4, 4, 4]
    own = read_devices(written(tmp_path, GOOD | {"power": [7, 5, 6, 1]}), 3, 4.0)
    assert own.power.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({k: v for k, v in GOOD.items() if k != "up"}, "lacks the column up; it has client, speed"),
        (
            GOOD | {"client": [2, 0, 7, 9]},
            "has devices of 2 of federation.clients=3 .* client 1 is",
        ),
        (GOOD | {"client": [2, 0, 0, 9]}, "client 0 is listed twice"),
        (
            GOOD | {"client": [2, 0, -1, 9]},
            "client -1 in row 2; clients are whole numbers from 0 to",
        ),
        (
            GOOD | {"client": pa.array([2, 0, 1, 2**63], pa.uint64())},
            "client 9223372036854775808 in row 3",
        ),
        (GOOD | {"client": [2, 0, 1, 2**53]}, "client 9007199254740992 in row 3"),
        (GOOD | {"client": [2, 0, 1, None]}, "client None in row 3"),
        (GOOD | {"client": [2, 0, 1.5, 9]}, "client 1.5 in row 2"),
        (GOOD | {"speed": [3.0, 0.0, 2.0, 1]}, "speed of client 0 is 0; it must be above 0"),
        (GOOD | {"speed": [3.0, None, 2.0, 1]}, "speed of client 0 is nan; it must be above 0"),
        (GOOD | {"speed": list("abcd")}, "speed is of type string, not of numbers"),
        (GOOD | {"speed": [3.0, math.inf, 2.0, 1]}, "speed holds an infinite value"),
    ],
)
def test_a_faulty_file_of_devices_is_named(tmp_path, table, said):
    with pytest.raises(InputError, match=f"devices.path='.*devices.parquet'.*{said}"):
        read_devices(written(tmp_path, table), 3, 4.0)


def test_what_is_no_parquet_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"devices\.path='nowhere' is no file here"):
        read_devices("nowhere", 3, 4.0)
    (tmp_path / "x").write_text("client,speed\n")
    with pytest.raises(InputError, match=r"devices\.path='.*x' is no Parquet file: "):
        read_devices(str(tmp_path / "x"), 3, 4.0)
    pq.write_table(pa.table({"client": [0], "start": [5], "end": [5]}), tmp_path / "w")
    with pytest.raises(InputError, match=r"devices\.windows=.*a window of client 0 is 5 to 5"):
        FromFile(str(tmp_path / "w"), 3)
    pq.write_table(pa.table({"client": [3], "start": [5], "end": [6]}), tmp_path / "w")
    with pytest.raises(InputError, match=r"has no window of clients 0\.\.2"):
        FromFile(str(tmp_path / "w"), 3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"speed": 2e12}, "speed=2000000000000.0 has no effect with kind='none'"),
        ({"kind": "file"}, "devices.kind=file needs devices.path"),
        (
            {"kind": "lognormal", "path": "x"},
            "path='x' has .*, but with kind='file'",
        ),
        (
            {"kind": "file", "path": "x", "up": 7},
            "up=7.0 has no effect with kind='file', but with kind='lognormal'",
        ),
        ({"kind": "lognormal", "availability": "file"}, "availability=file needs devices.windows"),
        ({"kind": "lognormal", "windows": "x"}, "windows='x' has no .* availability='file'"),
        ({"kind": "lognormal", "charging": 1}, "charging=1.0 .* without devices.battery"),
    ],
)
def test_fields_without_effect_are_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        DevicesConfig(**fields)
