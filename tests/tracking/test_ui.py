"""The page of a local store, from the command that a run printed."""

import re
import shlex
import signal
import socket
import sys
import urllib.request

import pytest
from mlflow.tracking import MlflowClient
from tiny_run import TINY

from trishul_ray.errors import InputError
from trishul_ray.tracking.ui import free_port, page_of_run


@pytest.mark.slow
def test_the_printed_command_opens_the_page_of_the_run_and_leaves_nothing(start, tmp_path):
    # Only the environment of `make demo` has the command: it is typed by its path.
    program = tmp_path / ".venv" / "bin" / "trishul"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nfrom trishul_ray.cli import main\nmain()\n")
    program.chmod(0o755)
    words = [".venv/bin/trishul", "run", *TINY, "tracking.mlflow=true"]
    code, said, error = start(*words, PATH="/usr/bin:/bin").end()
    assert code == 0, error
    (printed,) = re.findall(r"^MLflow +(.*)$", said, re.MULTILINE)
    assert printed.startswith(".venv/bin/trishul ui ")

    page = start(*shlex.split(printed), PATH="/usr/bin:/bin")
    line = page.process.stdout.readline()
    address = re.match(r"MLflow +(http://127\.0\.0\.1:\d+)(/#\S+)", line)
    assert address, line
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert address[2] == f"/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    with urllib.request.urlopen(address[1], timeout=30) as answer:
        assert "MLflow" in answer.read().decode()
    page.process.send_signal(signal.SIGINT)
    assert page.end()[0] == 130
    assert page.left_behind() == []


def test_a_port_in_use_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) > port


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"mlflow\.db does not exist: no run has logged to it"):
        page_of_run(f"sqlite:///{tmp_path}/mlflow.db", "")
    (tmp_path / "mlflow.db").touch()
    with pytest.raises(InputError, match="run 'nosuch' is not in sqlite:"):
        page_of_run(f"sqlite:///{tmp_path}/mlflow.db", "nosuch")
    assert page_of_run(f"sqlite:///{tmp_path}/mlflow.db", "") == "/"
