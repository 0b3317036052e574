"""benchmarks/gpu.py from end to end on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (file,) = tmp_path.glob("gpu-rehearsal*.json")
    sections = json.loads(file.read_text())["sections"]
    assert all(section["rows"] for section in sections)
    goals = {goal["what"]: goal["met"] for section in sections for goal in section["goals"]}
    # Speed means nothing here, but the checks must pass on the CPU.
    names = [what for what in goals if "bitwise" in what or "sigma_1" in what]
    assert len(names) > 5 and all(goals[what] for what in names)
