"""`trishul submit`: errors in one line, and a command as a job on a real cluster."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest
from ports import free_port
from ray._private.runtime_env.packaging import create_package
from tiny_run import TINY

from trishul_ray.cli.submit import EXCLUDES

TOKEN = "0123456789abcdef" * 4
SECRET = "wJalrXUtnFEMI"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "ui"], "'ui' cannot run as a job; submit run,"),
        (["--runs", "runs", "--", "run"], "--runs 'runs' must be a URI or the full path"),
        (["--working-dir", "nowhere", "--", "run"], "--working-dir nowhere does not exist"),
        (["--cluster", "none.yaml", "--", "run"], "--cluster none.yaml does not exist"),
        (["--", "run", f"storage.runs=s3://AKIAABC:{SECRET}@mine/runs"], "remove the credentials"),
    ],
)
def test_wrong_input_is_one_line(called, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, error = called("submit", *words)
    assert (code, out) == (2, ""), error
    assert message in error and len(error.splitlines()) == 1
    assert SECRET not in error


def test_a_silent_address_is_one_line(called):
    code, _, error = called("submit", "--address", f"http://127.0.0.1:{free_port()}", "--", "run")
    assert code == 1 and "Failed to connect to Ray" in error and "Traceback" not in error


def test_data_and_usual_secrets_are_not_shipped(tmp_path):
    project = tmp_path / "project"
    kept = {"mine.yaml", "mine.py", "keys/id.pub", "nested/data/notes.csv"}
    left_out = (
        *("data/x.bin", "runs/a/result.json", ".git/config", ".venv/bin/python", "mlflow.db"),
        *(".env", "prod.env", ".aws/config", "keys/server.pem", "id_rsa", ".ssh/known_hosts"),
        *(".config/gcloud/adc.json", "credentials.json", "my-secrets.yaml", "huggingface/token"),
    )
    for name in (*kept, *left_out):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    package = tmp_path / "package.zip"
    create_package(str(project), package, include_gitignore=True, excludes=EXCLUDES)
    with zipfile.ZipFile(package) as file:
        assert {name for name in file.namelist() if not name.endswith("/")} == kept


@pytest.fixture
def cluster(ray_head, tmp_path):
    """Start a cluster with two CPUs that requires a token; return the address of its dashboard."""
    dashboard = free_port()
    words = ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    words += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    runs = {"TRISHUL_RUNS": str(tmp_path / "results"), "RAY_AUTH_MODE": "token"}
    command, _ = ray_head(tmp_path / "home", *words, token=TOKEN, PATH=path, **runs)
    address, deadline = f"http://127.0.0.1:{dashboard}", time.monotonic() + 90
    while True:
        try:
            urllib.request.urlopen(f"{address}/api/version", timeout=1).close()
            return address
        except urllib.error.HTTPError:  # The cluster requires the token.
            return address
        except OSError:
            assert time.monotonic() < deadline and command.process.poll() is None
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_submitted_sweep_skips_finished_runs(cluster, trishul, tmp_path, cache):
    project, runs = tmp_path / "project", tmp_path / "results"
    project.mkdir()
    (project / "mine.yaml").write_text("axes: {seed: [0, 1]}\n")
    fields = [word for word in TINY if not word.startswith("storage.runs=")]
    words = ["--", "sweep", "mine.yaml", *fields, f"storage.cache={cache}"]

    def submit(token):
        command = trishul(
            *("submit", "--address", cluster, "--working-dir", project, *words),
            **{"RAY_AUTH_TOKEN": token, "HOME": str(tmp_path)},
        )
        return command.end(240)

    code, _, errors = submit("f" * 64)
    assert code == 1 and "f" * 64 not in errors and "Traceback" not in errors
    code, out, errors = submit(TOKEN)
    assert code == 0, out + errors
    # The runs and the report are in the storage of the nodes.
    assert "joining the Ray cluster" in out
    assert f"report    {runs}/reports/trishul-sweep-" in out and TOKEN not in out
    results = {path: path.read_bytes() for path in runs.glob("*/result.json")}
    assert len(results) == 2 and all(json.loads(content) for content in results.values())
    code, out, errors = submit(TOKEN)
    assert code == 0, out + errors
    assert {path: path.read_bytes() for path in results} == results
