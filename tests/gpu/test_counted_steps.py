"""Kernels and memory of local steps at real sizes, counted without a GPU.

The launches of its kernels limit a step, which no time measurement on a CPU would show. Lower a
bound when a change reduces its count.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("counted_steps.py")
#: Per setup: maximum kernels of a local step, GiB of tensors, kernels of an evaluated chunk.
BOUNDS = {
    "vit trishul": (691, 1.6, 219),
    "vit ravan": (587, 1.6, None),
    "vit fedit": (560, 1.4, None),
    "vit fullft": (1138, 3.9, None),
    "vit trishul fp32": (605, 2.8, 168),
    "vit trishul stacked": (1007, 3.9, None),
    "vit fedit stacked": (598, 3.8, None),
    "t5 trishul": (2821, 2.6, None),
    "llama trishul": (2191, 5.8, 850),
}
#: The ids of the answers are copied to the device once per process.
ONCE = "blocking copy to the device at base.py"


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """Return the output of :mod:`counted_steps`, keyed by setup."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("backbones"))],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def setups(counts):
    return {name: each for name, each in counts.items() if name != "known"}


def test_step_needs_no_more_kernels_or_memory(counts):
    found = {
        name: (each["kernels"], round(each["GiB"], 1), each.get("kernels of evaluation"))
        for name, each in setups(counts).items()
    }
    assert found.keys() == BOUNDS.keys()
    beyond = {
        name: (found[name], bounds)
        for name, bounds in BOUNDS.items()
        if any(value > most for value, most in zip(found[name], bounds, strict=True) if most)
    }
    assert beyond == {}
    # A count far below the bound means that the device does not see the step.
    assert all(0.8 * bounds[0] < found[name][0] for name, bounds in BOUNDS.items())


def test_no_operation_of_a_step_raises_or_waits(counts):
    for name, each in setups(counts).items():
        assert each["raising"] == [], name
        assert [wait for wait in each["waits"] if not wait.startswith(ONCE)] == [], name


def test_device_counts_known_operations(counts):
    known = counts["known"]
    assert (known["kernels"], known["bytes"]) == (2, 64)  # a product of 4 x 4, and its scaling
    assert known["raising"] == ["median at elsewhere"]
    assert known["waits"] == ["value read at elsewhere"]
    assert "one device" in known["two devices"]
