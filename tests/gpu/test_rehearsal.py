"""benchmarks/gpu.py from end to end on the CPU, without the packages that a GPU box may lack."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
ABSENT = [
    *("ray", "mlflow", "datasets", "peft", "rich", "typer"),
    *("matplotlib", "sklearn", "scipy", "torchmetrics", "accelerate"),
]


@pytest.fixture
def gpu(tmp_path):
    """``gpu("prox", absent=["ray"])`` -> the finished script, and its results by part."""

    def call(*words, absent=ABSENT, rehearse=True):
        rehearsal = ["--rehearse"] if rehearse else []
        lines = ["import sys", f"sys.modules.update(dict.fromkeys({absent!r}))"]
        (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words, *rehearsal, "--out", str(tmp_path / "out")],
            env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        parts = {}
        for file in (tmp_path / "out").glob("gpu*.json"):
            parts = json.loads(file.read_text())["parts"]
            assert file.with_suffix(".md").is_file()
        return done, parts

    return call


@pytest.mark.slow
def test_every_part_is_rehearsed(gpu):
    done, parts = gpu()
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert list(parts) == ["graphs", "step", "run", "prox", "right", "slices", "backbones"]
    states = {name: part["state"].split()[0] for name, part in parts.items()}
    assert set(states.values()) == {"done"}
    sections = [section for part in parts.values() for section in part["sections"].values()]
    assert all(section["rows"] for section in sections)
    goals = {goal["what"]: goal["met"] for section in sections for goal in section["goals"]}
    # Speed means nothing here; what is right on the CPU must be right.
    for what in ("runs with other bytes", "failed without its name", "others harmed"):
        assert goals[what], what
    assert all(met for what, met in goals.items() if "route" in what or "uploads" in what)


@pytest.mark.slow
def test_a_part_that_is_stopped_does_not_stop_the_next(gpu):
    done, parts = gpu("prox", "step", "--limit", "0.1")
    assert done.returncode == 1
    assert [part["state"].split()[0] for part in parts.values()] == ["stopped", "stopped"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this part would succeed")
def test_a_part_that_fails_does_not_stop_the_next(gpu):
    done, parts = gpu("prox", "slices", rehearse=False)
    assert done.returncode == 1
    assert list(parts) == ["prox", "slices"]
    assert all("failed: RuntimeError: no CUDA device" in p["state"] for p in parts.values())


@pytest.mark.slow
def test_seconds_are_divided_among_the_parts(gpu):
    done, parts = gpu("prox", "step", "--seconds", "0.1")
    assert done.returncode == 1
    assert [part["state"] for part in parts.values()] == ["stopped after 1 s"] * 2


def test_all_missing_packages_are_named_with_the_command_that_brings_them(gpu):
    done, parts = gpu(absent=["pydantic", "ray", "tenacity"])
    assert (done.returncode, parts) == (1, {})
    first, *commands = done.stderr.strip().splitlines()
    assert first == "missing: pydantic, tenacity"
    assert [line.split(":")[0] for line in commands] == ["with a network", "here"]
    assert commands[0].endswith("-d wheels pydantic tenacity")
