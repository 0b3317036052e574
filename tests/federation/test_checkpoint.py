"""Checkpoints: complete or absent, the newest valid one is used, corrupt ones are reported."""

import hashlib
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from trishul_ray.federation.checkpoint import (
    Checkpoint,
    CheckpointStore,
    arrays_digest,
    round_of,
)
from trishul_ray.federation.records import RoundRecord
from trishul_ray.methods.base.messages import State
from trishul_ray.storage.store import Store


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


def test_newest_checkpoints_are_kept_and_replaced(store):
    for number in (1, 2, 3):
        store.save(make(number))
    store.save(make(3, fill=2.0))
    names = [name for name in store.store.names() if not name.startswith("clients-")]
    assert [n[:12] for n in names] == ["round-000002", "round-000003"]
    assert store.newest().state.shared[0] == 2.0


def keeping(round_number, states, kept=None):
    made = make(round_number)
    made.client_states, made.kept = dict(states), dict(kept or {})
    return made


def values(arrays):
    return {client: {n: a.tolist() for n, a in own.items()} for client, own in arrays.items()}


def client_files(store):
    return [name for name in store.store.names() if name.startswith("clients-")]


def some(value):
    return {"variate": np.full(1000, value, np.float32), "step": np.array(value)}


def test_unchanged_client_state_is_not_written(store):
    rng = np.random.default_rng(0)
    states, kept = {}, {}
    for number in range(1, 21):
        changed = rng.choice(20, size=3, replace=False).tolist()
        for client in changed:
            states[client] = some(float(number))
            kept[client] = {"left/over": np.full(50, number, np.float32)}
        store.save(keeping(number, states, kept))
        newest = client_files(store)[-1]
        assert newest.startswith(f"clients-{number:06d}")
        clients = {int(name.split("/")[0]) for name in load_tensors(store.store.read(newest))}
        assert clients == {*changed}
        if number % 4 == 0:  # Another process resumes the run.
            store = CheckpointStore(store.store, "abc", keep=2)
        found = store.newest()
        assert values(found.client_states) == values(states)
        assert values(found.kept) == values(kept)
        states, kept = found.client_states, found.kept
    store.save(keeping(21, {}))
    store.save(keeping(22, {}))
    assert client_files(store) == []


@pytest.mark.parametrize("damage", [None, b"", b"other bytes"])
def test_a_checkpoint_whose_clients_are_damaged_is_skipped(store, damage, tmp_path):
    states = {1: some(1.0)}
    store.save(keeping(1, states))
    store.save(keeping(2, {**states, 2: some(2.0)}))
    lost = client_files(store)[-1]
    path = tmp_path / "checkpoints" / lost
    path.unlink() if damage is None else path.write_bytes(damage)
    found = store.newest()
    assert found.round == 1 and values(found.client_states) == values(states)
    assert store.skipped == [
        f"checkpoint {max(store.store.names())} is unreadable ({lost} is "
        f"{'missing' if damage is None else 'corrupt'}): skipped"
    ]
    both = {**states, 2: some(2.0)}
    store.save(keeping(2, both))
    assert values(CheckpointStore(store.store, "abc").newest().client_states) == values(both)


def test_files_of_a_killed_writer_are_removed(store):
    store.save(keeping(1, {1: some(1.0)}))
    store.store.write(f"clients-000002-{64 * '0'}.safetensors", b"half")
    store.save(keeping(2, {1: some(2.0)}))
    assert [name[:14] for name in client_files(store)] == ["clients-000001", "clients-000002"]
    assert store.newest().client_states[1]["step"] == 2.0


def test_an_earlier_checkpoint_outlives_a_resume(store, tmp_path):
    states = {1: some(1.0)}
    for number in (1, 2):
        name = store.save(keeping(number, states))
    resumed = CheckpointStore(store.store, "abc")
    assert resumed.newest().round == 2
    resumed.tidy()
    (tmp_path / "checkpoints" / name).write_bytes(b"damaged afterwards")
    found = CheckpointStore(store.store, "abc").newest()
    assert found.round == 1 and values(found.client_states) == values(states)
    for number in (2, 3):
        resumed.save(keeping(number, {}))
    assert [file[:12] for file in store.store.names()] == ["round-000002", "round-000003"]


def test_resume_keeps_the_configured_number_of_checkpoints(store):
    first = store.save(make(1))
    data = store.store.read(first)
    for number in (2, 3):
        store.save(make(number))
    store.store.write(first, data)  # a process that was killed before it removed this file
    resumed = CheckpointStore(store.store, "abc", keep=2)
    assert resumed.newest().round == 3
    resumed.tidy()
    assert [round_of(name) for name in store.store.names() if round_of(name)] == [2, 3]
    resumed.save(make(3, fill=2.0))
    assert [round_of(name) for name in store.store.names() if round_of(name)] == [2, 3]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_corrupt_checkpoint_is_reported_and_skipped(store, damage, tmp_path):
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
    data = newer.to_bytes({})
    store.store.write(f"round-000002-{hashlib.sha256(data).hexdigest()}.safetensors", data)
    assert store.newest().round == 1
    assert "not a checkpoint of this version: " in store.skipped[0]
    store.save(make(4))
    assert store.newest().round == 4


def test_a_checkpoint_of_another_experiment_is_skipped(store, tmp_path):
    store.save(make(1))
    other = CheckpointStore(Store.open(str(tmp_path / "checkpoints")), "xyz")
    assert other.newest() is None
    assert "belongs to experiment abc" in other.skipped[0]


def test_temporary_file_of_killed_write_is_ignored(store, tmp_path):
    store.save(make(1))
    (tmp_path / "checkpoints" / ".round-000002-00.safetensors.1234.tmp").write_bytes(b"half")
    assert store.newest().round == 1
    assert store.skipped == []


def test_killed_writer_leaves_its_last_checkpoint(tmp_path):
    script = (
        "import sys, numpy as np\n"
        "from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore\n"
        "from trishul_ray.methods.base.messages import State\n"
        "from trishul_ray.federation.records import RoundRecord\n"
        "from trishul_ray.storage.store import Store\n"
        "store = CheckpointStore(Store.open(sys.argv[1]), 'x')\n"
        "restored = store.newest()\n"
        "number = restored.round if restored else 0\n"
        "while True:\n"
        "    number += 1\n"
        "    state = State(np.full(2_000_000, number, np.float32))\n"
        "    done = Checkpoint('x', 'a', number, state, records=[RoundRecord(number)])\n"
        "    store.save(done)\n"
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


#: Fields of a checkpoint, and values that no checkpoint has there.
ODD = {
    "experiment_id": 7, "state": {"values": [1.0]}, "records": [{"number": 1}],
    "files": [], "info": {"name": "digits"}, "more": 1,
}  # fmt: skip


@pytest.mark.parametrize("field", ODD)
def test_odd_content_with_valid_checksum_is_skipped(store, field):
    store.save(make(1))
    tensors = load_tensors(make(2).to_bytes({}))
    meta = json.loads(tensors.pop("__meta__").tobytes())
    text = json.dumps(meta | {field: ODD[field]}).encode()
    data = save_tensors(tensors | {"__meta__": np.frombuffer(text, np.uint8)})
    name = f"round-000002-{hashlib.sha256(data).hexdigest()}.safetensors"
    store.store.write(name, data)
    assert store.newest().round == 1
    (line,) = store.skipped
    assert line.startswith(f"checkpoint {name} ")


def test_unscored_file_of_a_round_is_removed(store):
    """A process that is killed after the second write of the last round leaves both files."""
    unscored, scored = make(2), make(2)
    scored.records = [*scored.records, RoundRecord(2, scores={"accuracy": 0.7})]
    unscored.records = [*unscored.records, RoundRecord(2)]
    file = store.save(unscored)
    data = store.store.read(file)
    store.save(scored)
    store.store.write(file, data)
    assert len([name for name in store.store.names() if name.startswith("round-000002")]) == 2
    assert store.newest().records == scored.records
    store.tidy()
    assert len([name for name in store.store.names() if name.startswith("round-")]) == 1
    assert store.newest().records == scored.records
