"""Checkpoints: complete or absent, the newest valid one is used, corrupt ones are reported."""

import subprocess
import sys
import time

import numpy as np
import pytest

from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore, arrays_digest
from trishul_ray.federation.records import RoundRecord
from trishul_ray.methods.base import State
from trishul_ray.storage import Store


def state_of(fill):
    def some():
        return np.full(5, fill, np.float32)

    return State(
        some(), {"control": some()}, {"block.0.q": some()}, {"block.0.q": {"basis": some()}},
        {"block.1": some()},
    )  # fmt: skip


def make(round_number, fill=1.0):
    return Checkpoint(
        experiment_id="abc",
        attempt="a1",
        round=round_number,
        state=state_of(fill),
        client_states={3: {"variate": np.arange(4, dtype=np.float32)}},
        records=[RoundRecord(0, scores={"accuracy": 0.5}), RoundRecord(1, refused={"2": "why"})],
        spectra={"before": np.ones((2, 3))},
        matrices={"cosine": np.ones((1, 2, 2))},
        test_rows={"row": np.arange(3), "score": np.ones(3, dtype=np.float32)},
    )


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(Store.open(str(tmp_path / "checkpoints")), "abc", keep=2)


def test_round_trip(store):
    store.save(make(1))
    restored = store.newest()
    original = make(1)
    assert (restored.round, restored.attempt, restored.records) == (1, "a1", original.records)
    assert restored.state.map(np.ndarray.tobytes) == original.state.map(np.ndarray.tobytes)
    np.testing.assert_array_equal(
        restored.client_states[3]["variate"], original.client_states[3]["variate"]
    )
    np.testing.assert_array_equal(restored.spectra["before"], original.spectra["before"])
    np.testing.assert_array_equal(restored.matrices["cosine"], np.ones((1, 2, 2)))
    np.testing.assert_array_equal(restored.test_rows["row"], np.arange(3))


def test_the_newest_are_kept_and_a_round_is_replaced(store):
    for number in (1, 2, 3):
        store.save(make(number))
    store.save(make(3, fill=2.0))
    names = store.store.names()
    assert [n[:12] for n in names] == ["round-000002", "round-000003"]
    assert store.newest().state.shared[0] == 2.0


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_corrupt_checkpoint_is_reported_and_the_one_before_is_used(store, damage, tmp_path):
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


def test_a_checkpoint_with_an_unknown_part_is_skipped(store):
    store.save(make(1))
    newer = make(2)
    newer.unknown = {"layer": np.zeros(1)}
    store.save(newer)
    assert store.newest().round == 1
    assert "not a checkpoint of this version: " in store.skipped[0]


def test_a_checkpoint_of_another_experiment_is_skipped(store, tmp_path):
    store.save(make(1))
    other = CheckpointStore(Store.open(str(tmp_path / "checkpoints")), "xyz")
    assert other.newest() is None
    assert "belongs to experiment abc" in other.skipped[0]


def test_a_temporary_file_of_a_killed_write_is_ignored(store, tmp_path):
    store.save(make(1))
    (tmp_path / "checkpoints" / ".round-000002-00.safetensors.1234.tmp").write_bytes(b"half")
    assert store.newest().round == 1
    assert store.skipped == []


def test_a_writer_killed_at_any_time_leaves_its_last_checkpoint_intact(tmp_path):
    script = (
        "import sys, numpy as np\n"
        "from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore\n"
        "from trishul_ray.methods.base import State\n"
        "from trishul_ray.storage import Store\n"
        "store = CheckpointStore(Store.open(sys.argv[1]), 'x')\n"
        "restored = store.newest()\n"
        "number = restored.round if restored else 0\n"
        "while True:\n"
        "    number += 1\n"
        "    state = State(np.full(2_000_000, number, np.float32))\n"
        "    store.save(Checkpoint('x', 'a', number, state))\n"
        "    print(number, flush=True)\n"
    )
    store = CheckpointStore(Store.open(str(tmp_path)), "x")
    rng = np.random.default_rng()
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        saved = int(writer.stdout.readline())
        time.sleep(rng.uniform(0, 0.1))
        writer.kill()
        saved = max([saved, *map(int, writer.communicate()[0].split())])
        restored = store.newest()
        assert restored.round >= saved
        assert store.skipped == []
        assert set(restored.state.shared.tolist()) == {float(restored.round)}


def test_the_digest_depends_on_names_dtypes_and_values():
    base = {"a": np.zeros(3, np.float32)}
    assert arrays_digest(base) == arrays_digest({"a": np.zeros(3, np.float32)})
    assert arrays_digest(base) != arrays_digest({"b": np.zeros(3, np.float32)})
    assert arrays_digest(base) != arrays_digest({"a": np.zeros(3, np.float64)})
    assert arrays_digest(base) != arrays_digest({"a": np.array([0, 0, 1], np.float32)})
