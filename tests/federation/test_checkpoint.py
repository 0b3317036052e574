"""Checkpoints: whole or not at all, newest sound one wins, corrupt ones are named."""

import numpy as np
import pytest

from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore, state_digest
from trishul_ray.storage import Store


def make(round_number, fill=1.0):
    return Checkpoint(
        experiment_id="abc",
        attempt="a1",
        round=round_number,
        state={"shared": np.full(5, fill, np.float32)},
        client_states={3: {"variate": np.arange(4, dtype=np.float32)}},
        records=[{"round": 0, "accuracy": 0.5}, {"round": 1, "refused": {"2": "why"}}],
        spectra={"before": np.ones((2, 3))},
        matrices={"covariance": np.ones((1, 2, 2))},
    )


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(Store.open(str(tmp_path / "checkpoints")), "abc", keep=2)


def test_round_trip(store):
    store.save(make(1))
    found = store.newest()
    original = make(1)
    assert (found.round, found.attempt, found.records) == (1, "a1", original.records)
    np.testing.assert_array_equal(found.state["shared"], original.state["shared"])
    np.testing.assert_array_equal(
        found.client_states[3]["variate"], original.client_states[3]["variate"]
    )
    np.testing.assert_array_equal(found.spectra["before"], original.spectra["before"])
    np.testing.assert_array_equal(found.matrices["covariance"], np.ones((1, 2, 2)))


def test_keeps_the_newest_and_replaces_a_round(store):
    for number in (1, 2, 3):
        store.save(make(number))
    store.save(make(3, fill=2.0))
    names = store.store.names()
    assert [n[:12] for n in names] == ["round-000002", "round-000003"]
    assert store.newest().state["shared"][0] == 2.0


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_corrupt_one_is_named_and_the_one_before_is_used(store, damage, tmp_path):
    store.save(make(1))
    name = store.save(make(2))
    path = tmp_path / "checkpoints" / name
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[-1] ^= 1
    else:
        data = bytearray()
    path.write_bytes(bytes(data))
    assert store.newest().round == 1
    assert len(store.skipped) == 1
    assert name in store.skipped[0]
    assert "corrupt" in store.skipped[0]


def test_another_experiments_checkpoint_is_not_taken(store, tmp_path):
    store.save(make(1))
    other = CheckpointStore(Store.open(str(tmp_path / "checkpoints")), "xyz")
    assert other.newest() is None
    assert "belongs to experiment abc" in other.skipped[0]


def test_a_leftover_of_a_killed_write_is_not_seen(store, tmp_path):
    store.save(make(1))
    (tmp_path / "checkpoints" / ".round-000002-00.safetensors.1234.tmp").write_bytes(b"half")
    assert store.newest().round == 1
    assert store.skipped == []


def test_digest_sees_names_types_and_values():
    base = {"a": np.zeros(3, np.float32)}
    assert state_digest(base) == state_digest({"a": np.zeros(3, np.float32)})
    assert state_digest(base) != state_digest({"b": np.zeros(3, np.float32)})
    assert state_digest(base) != state_digest({"a": np.zeros(3, np.float64)})
    assert state_digest(base) != state_digest({"a": np.array([0, 0, 1], np.float32)})
