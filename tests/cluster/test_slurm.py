"""The scripts of docs/slurm.md, with substitutes for the commands of SLURM, Ray and trishul."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
SCRIPTS = dict(
    re.findall(r"`(\w+\.sh)`[^`]*:\n\n```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
)
COMMANDS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "ray": "exec sleep 60",
    "sleep": 'exec /bin/sleep "$([ "$1" = 60 ] && echo 60 || echo 0.1)"',
    "scontrol": 'echo "$@" >> requeued',
    # A run that ends at once, or at a signal.
    "trishul": 'echo "$@" > called; [ -e quick ] && exit "$(cat quick)"; '
    "trap 'exit 143' TERM; touch ready; while :; do /bin/sleep 0.05; done",
}


@pytest.fixture
def start(tmp_path):
    """Start a script of the page in a folder with the substitutes."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    started = []

    def start_script(name, signals):
        (tmp_path / name).write_text(SCRIPTS[name])
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "17", "SLURM_NNODES": "2",
        }  # fmt: skip
        process = subprocess.Popen(
            ["bash", name], cwd=tmp_path, env=environment, start_new_session=True
        )
        started.append(process)
        if signals:
            deadline = time.monotonic() + 60
            while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            signals(process)
        return process.wait(60)

    yield start_script
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the substitutes of Ray


def to_the_script(process):
    process.send_signal(signal.SIGTERM)


def to_the_step(process):
    step = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(step.stdout.split()[0]), signal.SIGTERM)


@pytest.mark.parametrize(
    ("name", "signals"), [("array.sh", to_the_step), ("cluster.sh", to_the_script)]
)
def test_a_terminated_job_is_requeued(name, signals, start, tmp_path):
    assert start(name, signals) == 143
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert "storage.runs=/shared/runs" in (tmp_path / "called").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_ends_is_not_requeued(name, code, start, tmp_path):
    (tmp_path / "quick").write_text(str(code))
    assert start(name, None) == code
    assert not (tmp_path / "requeued").exists()
