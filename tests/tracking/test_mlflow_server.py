"""The same run over HTTP, as on a cluster: a tracking server that nodes share."""

import json
import socket
import sys
import time
import urllib.request

import pytest

from trishul_ray.loading import load_experiment

pytestmark = pytest.mark.slow


@pytest.fixture
def server(start, tmp_path):
    """The address of a tracking server on localhost."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path / "server.log").open("w")
    command = start(
        sys.executable, "-m", "mlflow", "server",
        "--host", "127.0.0.1", "--port", port, "--workers", 1,
        "--backend-store-uri", f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination", tmp_path / "artifacts",
        options={"stdout": log, "stderr": log}.items(),
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=1).close()
            return address
        except OSError:
            dead = command.process.poll() is not None
            assert not dead and time.monotonic() < end, (tmp_path / "server.log").read_text()
            time.sleep(0.2)


def test_a_stopped_run_is_continued_on_the_server(server, trishul, small_words, tmp_path):
    from mlflow.tracking import MlflowClient

    words = [*small_words, "storage.runs=runs", "resources.backend=inline"]
    words += ["tracking.mlflow=true", f"tracking.uri={server}", "federation.local_steps=20"]
    first = trishul("run", *words)
    first.wait_for("round 1/3")
    first.process.kill()
    first.process.wait()
    code, out, errors = trishul("run", *words).end()
    assert code == 0, errors
    assert "View run" not in out + errors

    client = MlflowClient(server)
    (group,) = client.search_experiments(filter_string="name = 'trishul'")
    (run,) = client.search_runs([group.experiment_id])
    assert run.info.status == "FINISHED"
    assert f"{server}/#/experiments/{group.experiment_id}/runs/{run.info.run_id}" in out
    home = tmp_path / "runs" / load_experiment(None, words).id
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {
        "adapter", "config.yaml", "figures", "result.json"
    }  # fmt: skip
    final = json.loads((home / "result.json").read_text())["final"]
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert sorted(point.step for point in history) == [0, 1, 2, 3]
    assert {p.step: p.value for p in history}[3] == pytest.approx(final["accuracy"])
