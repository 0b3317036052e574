"""An MLflow run over HTTP, as on a cluster: a tracking server that all nodes reach."""

import sys
import time
import urllib.request

import pytest
from mlflow.tracking import MlflowClient
from ports import free_port
from tiny_run import TINY

from trishul_ray.tracking.mlflow import MlflowTracker
from trishul_ray.tracking.tracker import RunEnd, RunStart

pytestmark = pytest.mark.slow


@pytest.fixture
def server(start, tmp_path):
    """The address of a tracking server on localhost."""
    port = free_port()
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


def test_a_stopped_run_is_continued_on_the_server(server, tmp_path, capfd):
    def opened():
        run = MlflowTracker(server, "trishul")
        run.start(RunStart("attempt", "a run", {"seed": 0}, {}))
        return run

    first = opened()
    first.round(0, {"accuracy": 0.25})
    # The driver is gone. The next one logs again what it reads from the checkpoint.
    second = opened()
    for step, accuracy in enumerate((0.25, 0.5)):
        second.round(step, {"accuracy": accuracy})
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "result.json").write_text("{}")
    (tmp_path / "out" / "figures" / "loss.png").write_bytes(b"png")
    assert second.end("FINISHED", RunEnd(1, {}, {}, folder=tmp_path / "out")) == []
    assert second.run_id == first.run_id

    client = MlflowClient(server)
    (group,) = client.search_experiments(filter_string="name = 'trishul'")
    (run,) = client.search_runs([group.experiment_id])
    assert run.info.run_id == first.run_id and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert sorted((point.step, point.value) for point in history) == [(0, 0.25), (1, 0.5)]
    found = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert found == {"figures", "result.json"}
    address = f"{server}/#/experiments/{group.experiment_id}/runs/{run.info.run_id}"
    assert second.command() == f"{address}?workflowType=machine_learning"
    # MLflow prints no address of the run.
    assert capfd.readouterr().out == ""


def test_a_password_in_the_address_is_written_nowhere(server, start, tmp_path):
    address = server.replace("http://", "http://me:hunter2@")
    command = [sys.executable, "-m", "trishul_ray.cli", "run"]
    words = [*TINY, "tracking.mlflow=true", f"tracking.uri={address}"]
    code, shown, errors = start(*command, "--show", *words).end()
    assert code == 0 and "http://***@" in shown and "hunter2" not in shown + errors
    code, said, errors = start(*command, *words).end()
    assert code == 0 and "hunter2" not in said + errors, errors
    (config,) = tmp_path.glob("runs/*/config.yaml")
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"result.json", "server.db"} <= {path.name for path in kept}
    assert [path for path in kept if b"hunter2" in path.read_bytes()] == []

    # The file that the run has written is run again, with the credentials of the environment.
    code, _, errors = start(*command, config).end()
    assert code == 2 and "credentials, which are never written" in errors
    code, _, errors = start(*command, config, MLFLOW_TRACKING_URI=address).end()
    assert code == 0, errors
