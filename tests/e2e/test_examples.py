"""The scripts and the notebook in examples/, unchanged."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def output_of(command, cwd, cache):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRISHUL")}
    environment |= {"TRISHUL_CACHE": str(cache), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["own_data", "instruction_tuning"])
def test_a_script_trains_and_exports(name, cache, tmp_path):
    said = output_of([sys.executable, EXAMPLES / f"{name}.py"], tmp_path, cache)
    assert " by round: [" in said
    assert len([*tmp_path.glob("runs/*/adapter/adapter_config.json")]) == 1


def test_the_method_passes_its_checks_and_is_compared(cache, tmp_path):
    text = (EXAMPLES / "own_method.py").read_text(encoding="utf-8")
    check, sweep = (shlex.split(line) for line in re.findall(r"^    trishul (.*)$", text, re.M))
    program = [Path(sys.executable).with_name("trishul")]
    (tmp_path / "examples").symlink_to(EXAMPLES)
    said = output_of([*program, *check], tmp_path, cache)
    assert "ok       method=fedit-momentum  moves, and the loss falls" in said
    said = output_of([*program, *sweep, "mlflow=false"], tmp_path, cache)
    assert said.count("fedit-momentum") >= 1 and "report" in said


def test_the_cells_of_the_notebook_run(cache, tmp_path):
    notebook = json.loads((EXAMPLES / "first_runs.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    said = output_of([sys.executable, "-c", "\n".join(cells)], tmp_path, cache)
    assert "['0', '1', '2', '3', '4']" in said
