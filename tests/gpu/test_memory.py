"""A limit on memory is enforced: a client that exceeds it fails and does not affect others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("capped_client.py")
#: Per device: a limit that a small batch fits into and a large one does not; see capped_client.py.
LIMITS = {"cpu": "900", "cuda": "0.05"}
LARGE_BATCH = {"cpu": 16_384, "cuda": 200_000}


def begin(experiment, device, limit, tmp_path, name):
    """Start a client in a separate process."""
    file = tmp_path / f"{name}.yaml"
    file.write_bytes(experiment.to_yaml())
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(file), device, limit],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    return out.splitlines()[-1]


@pytest.mark.slow
def test_client_beyond_its_memory_slice_fails_by_name(small, tmp_path, device):
    modest = small("federation.local_steps=2")
    greedy = small("federation.local_steps=2", f"federation.batch_size={LARGE_BATCH[device]}")
    free = begin(modest, device, "0", tmp_path, "free")
    first = begin(modest, device, LIMITS[device], tmp_path, "first")  # two slices of one device
    second = begin(greedy, device, LIMITS[device], tmp_path, "second")
    message = end(second)
    assert message.startswith("RunError: client 2 in round 1 needs more memory"), message
    assert "federation.batch_size" in message and "\n" not in message
    assert end(first) == end(free)
