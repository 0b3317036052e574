"""The server, inline: judged uploads, quorum, resume over corrupt and half-written checkpoints."""

import subprocess
import sys
import time

import numpy as np
import pytest

from trishul_ray.errors import RunError
from trishul_ray.federation.checkpoint import CheckpointStore, open_checkpoints
from trishul_ray.federation.inline import InlineDriver, InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.server import Server
from trishul_ray.federation.workbench import capacity
from trishul_ray.storage import Store


class Faulty(InlineExecutor):
    """Some clients' uploads are spoilt on the way, in one round."""

    spoilt: tuple[int, ...] = ()

    def run(self, broadcast, jobs):
        outcome = super().run(broadcast, jobs)
        for upload in outcome.uploads[: len(self.spoilt)]:
            upload.arrays["shared"] = np.full_like(upload.arrays["shared"], np.nan)
        return outcome


def serve(experiment, spoilt):
    executor = Faulty(experiment, prepare_run(experiment))
    server = Server(experiment, executor, open_checkpoints(experiment), "a")
    server.step()
    executor.spoilt = (0,) * spoilt
    return server


def test_a_spoilt_upload_is_left_out_counted_and_named(small):
    experiment = small("resources.backend=inline")
    server = serve(experiment, spoilt=1)
    server.step()
    record = server.records[2]
    first = record["clients"][0]
    assert list(record["refused"]) == [str(first)]
    assert f"upload of client {first} rejected: shared holds" in server.progress().events[-1]
    assert np.isfinite(server.state["shared"]).all()


def test_below_the_quorum_the_run_fails_and_keeps_its_state(small):
    experiment = small("resources.backend=inline")
    server = serve(experiment, spoilt=2)
    with pytest.raises(RunError, match=r"round 2: only 1 of 3 uploads are valid"):
        server.step()
    assert open_checkpoints(experiment).newest().round == 1


def test_a_corrupt_checkpoint_is_named_and_the_one_before_continues(
    small, inline_result, assert_same, drive_to_end, tmp_path
):
    experiment = small("resources.backend=inline")
    prepared = prepare_run(experiment)
    driver = InlineDriver(experiment, prepared, "a")
    for _ in range(2):
        driver.step()
    folder = tmp_path / "runs" / experiment.id / "checkpoints"
    newest = max(folder.glob("round-*"))
    newest.write_bytes(newest.read_bytes()[:-10])
    result = drive_to_end(InlineDriver(experiment, prepared, "b"))
    events = result.__dict__["events"]
    assert events[0] == f"checkpoint {newest.name} is corrupt (checksum differs): skipped"
    assert events[1] == "continuing after round 1"
    assert_same(result, inline_result(experiment))


def test_killed_while_writing_a_checkpoint_the_one_before_is_there(tmp_path):
    script = (
        "import sys, numpy as np\n"
        "from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore\n"
        "from trishul_ray.storage import Store\n"
        "store = CheckpointStore(Store.open(sys.argv[1]), 'x')\n"
        "found = store.newest()\n"
        "number = found.round if found else 0\n"
        "while True:\n"
        "    number += 1\n"
        "    state = {'shared': np.full(2_000_000, number, np.float32)}\n"
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
        found = store.newest()
        assert found.round >= saved
        assert store.skipped == []
        assert set(found.state["shared"].tolist()) == {float(found.round)}


@pytest.mark.gpu
def test_a_slice_of_a_gpu_is_enforced_on_the_device():
    import torch

    from trishul_ray.federation.on_ray.actors import cap_device_memory

    total = torch.cuda.get_device_properties(0).total_memory
    cap_device_memory(0.1)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.2 * total), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("method", ["ravan", "trishul"])
def test_full_and_limited_clients_stand_in_one_cohort(small, inline_result, method):
    # A client of full capacity sends no mask: the diagnostics see it beside those that do.
    experiment = small(
        f"method={method}",
        "federation.compute=uniform",
        "federation.clients_per_round=4",
        "federation.rounds=1",
    )
    shares = {capacity("uniform", experiment.seed, client) for client in range(4)}
    assert 1.0 in shares and min(shares) < 1.0, "choose another seed"
    record = inline_result(experiment).records[1]
    assert record["clients"] == [0, 1, 2, 3]
    assert record["effective_rank"] > 0 and np.isfinite(record["aggregation_variance"])
