"""Waits of the host for a GPU: never during a local step, only after a client's steps and round.

Without a GPU, the emulated device finds the waits, in a separate process.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from method_runs import SINGLE

from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.local import LocalSteps

SCRIPT = Path(__file__).with_name("emulated_rounds.py")
LOW_PRECISION = {"bf16", "decoder bf16"}
#: The losses, which end the time of the local steps, and the upload.
END = ["copy to the host at local.py", "copy to the host at messages.py"]
#: Further waits of a client: before its first step for the selection of its core heads on the host,
#: and after its last step for their statistics, sent with the upload.
DECISIONS = {
    "chosen heads": ["copy to the host at ravan.py"],
}
STATISTICS = {}
#: Waits before the last first step and after the last step of methods that train again in `upload`.
AGAIN = {
    "ditto": (
        ["copy to the host at local.py"],
        ["copy to the host at messages.py", "value read at ditto.py"],
    )
}


@pytest.fixture(scope="module")
def rounds(cache):
    """Return the output of :mod:`emulated_rounds`, keyed by configuration."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(cache)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def configurations(rounds):
    return {name: found for name, found in rounds.items() if name != "known waits"}


def places(waits):
    return [wait.rpartition(":")[0] for wait in waits]


@pytest.mark.slow
def test_emulated_device_records_only_waits(rounds):
    known = rounds["known waits"]
    assert known.pop("page-locked") == known.pop("arithmetic") == []
    assert all(len(waits) == 1 for waits in known.values()), known
    assert {*SINGLE} <= configurations(rounds).keys()


@pytest.mark.slow
def test_no_step_waits_for_the_device(rounds):
    waiting = {n: found["steps"] for n, found in configurations(rounds).items() if found["steps"]}
    assert waiting == {}


@pytest.mark.slow
def test_client_waits_after_its_steps_and_round(rounds):
    for name, found in configurations(rounds).items():
        waits = list(dict.fromkeys(places(found["end"])))
        expected = AGAIN[name][1] if name in AGAIN else END + STATISTICS.get(name, [])
        assert sorted(waits) == sorted(expected), name


@pytest.mark.slow
def test_before_its_first_step_a_client_only_receives(rounds):
    for name, found in configurations(rounds).items():
        sent = [wait for wait in places(found["start"]) if "copy to the host" in wait]
        assert sent == (AGAIN[name][0] if name in AGAIN else DECISIONS.get(name, [])), name


@pytest.mark.slow
def test_gpu_route_gives_the_cpu_state(rounds):
    for name, found in configurations(rounds).items():
        assert found["moved"] > 1e-3, name
        assert found["difference"] < (1e-3 if name in LOW_PRECISION else 1e-4), name


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["full", "uniform"])
@pytest.mark.parametrize("method", SINGLE)
def test_no_step_synchronizes_on_a_gpu(small, monkeypatch, method, compute):
    overrides = [f"method={method}", "resources.device=cuda", "resources.backend=inline"]
    try:
        experiment = small(*overrides, f"federation.compute={compute}")
    except ValueError:
        pytest.skip("this method takes no limited clients")
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    driver.step()  # Constants are copied to the device once per process.

    def watched(name):
        plain = getattr(LocalSteps, name)

        def call(*args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return plain(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for name in ("batch", "compute"):
        monkeypatch.setattr(LocalSteps, name, watched(name))
    driver.step()
