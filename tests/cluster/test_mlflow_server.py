"""cluster/mlflow/start.sh, and runs on it: with a password, in parallel, and with an outage."""

import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from mlflow_server import PASSWORD, MlflowServer
from tiny_run import TINY

from trishul_ray.errors import InputError
from trishul_ray.report.summary import read_metrics
from trishul_ray.runs.mlflow_log import grouped_metrics
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store
from trishul_ray.tracking.mlflow import MlflowRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: The number of runs at once on a node of a large machine.
TRIALS = 20
#: Seconds of an outage: several of the growing pauses between two attempts.
GONE = 15.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = MlflowServer(tmp_path_factory.mktemp("head"))
    (started.home / "mlflow").mkdir()
    # Before a restart of the machine, a server had this process id.
    (started.home / "mlflow" / "pid").write_text(str(os.getpid()))
    started.start()
    try:
        started.wait()
        yield started
    finally:
        started.end()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "trishul")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)


def opened(server, attempt, tags=None, parent=None):
    named = {"params": {"seed": 0}, "tags": tags or {}, "parent": parent}
    return MlflowRun(server.address, "trishul", attempt, attempt, **named)


def test_wrong_password_is_rejected(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another-password")
    with pytest.raises(InputError, match="does not respond") as caught:
        opened(server, "wrong", parent="0" * 32)  # immediately: it is not an outage
    assert "another-password" not in str(caught.value)
    with pytest.raises(urllib.error.HTTPError) as nobody:
        urllib.request.urlopen(f"{server.address}/api/2.0/mlflow/experiments/search?max_results=1")
    assert nobody.value.code == 401


def test_a_stopped_run_is_continued_on_the_server(server, tmp_path, capfd):
    first = opened(server, "stopped")
    first.round(0, {"accuracy": 0.25})
    # The driver is gone. The next driver logs again the rounds from the checkpoint.
    second = opened(server, "stopped")
    for step, accuracy in enumerate((0.25, 0.5)):
        second.round(step, {"accuracy": accuracy})
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "result.json").write_text("{}")
    (tmp_path / "out" / "figures" / "loss.png").write_bytes(b"png")
    assert second.end("FINISHED", folder=tmp_path / "out") == []
    assert second.run_id == first.run_id

    client = second.client
    (group,) = client.search_experiments(filter_string="name = 'trishul'")
    (run,) = client.search_runs([group.experiment_id], "tags.`trishul.attempt` = 'stopped'")
    assert run.info.run_id == first.run_id and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert sorted((point.step, point.value) for point in history) == [(0, 0.25), (1, 0.5)]
    found = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert found == {"figures", "result.json"}
    # MLflow prints no address of the run.
    assert capfd.readouterr().out == ""


def test_a_password_in_the_address_is_written_nowhere(
    server, called, trishul, cache, monkeypatch, tmp_path
):
    address = server.address.replace("http://", f"http://trishul:{PASSWORD}@")
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    words = [*TINY, "tracking.mlflow=true", f"tracking.uri={address}", "tracking.experiment=own"]
    code, shown, error = called("run", "--show", *words)
    assert code == 0 and PASSWORD not in shown + error
    code, said, error = trishul("run", *words).end()
    assert code == 0 and PASSWORD not in said + error, error
    (config,) = tmp_path.glob("runs/*/config.yaml")
    kept = [path for place in (tmp_path, server.home) for path in place.rglob("*")]
    kept = [path for path in kept if path.is_file() and path.name != "credentials"]
    assert {"result.json", "mlflow.db"} <= {path.name for path in kept}
    assert [path for path in kept if PASSWORD.encode() in path.read_bytes()] == []

    # The file written by the run is run again, with the store of the environment.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    code, _, error = called("run", config)
    assert code == 0, error


def test_trials_log_at_once_and_lose_nothing(server):
    parent = opened(server, "parent").run_id

    def trial(number):
        run = opened(server, f"trial-{number}", tags={"number": number}, parent=parent)
        for step in range(3):
            run.round(step, {"accuracy": number + step / 10})
        return run, run.end("FINISHED")

    with ThreadPoolExecutor(TRIALS) as pool:
        ended = list(pool.map(trial, range(TRIALS)))
    assert [rejected for _, rejected in ended] == [[]] * TRIALS
    assert len({run.run_id for run, _ in ended}) == TRIALS
    for number, (run, _) in enumerate(ended):
        history = run.client.get_metric_history(run.run_id, "accuracy")
        points = sorted((point.step, point.value) for point in history)
        assert points == [(step, number + step / 10) for step in range(3)]


def test_interrupted_server_loses_no_trials_or_metrics(server, trishul, small_words, tmp_path):
    words = [*small_words, "tracking.mlflow=true", f"tracking.uri={server.address}"]
    words += ["federation.rounds=4", "federation.local_steps=20", "resources.backend=inline"]
    runs, others = tmp_path / "runs", opened(server, "another-sweep").run_id
    sweep = trishul("sweep", "--axis", "seed=0..1", *words, f"storage.runs={runs}")

    def wait_for(files, number):
        deadline = time.monotonic() + 240
        while len(list(runs.glob(files))) < number:
            assert sweep.process.poll() is None and time.monotonic() < deadline, sweep.end()
            time.sleep(0.1)

    wait_for("*/checkpoints/round-00000[1-3]-*", 1)
    server.end()
    gone = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        # Without a server, a trial waits for it at its start and at its end.
        late = pool.submit(opened, server, "begins-late", parent=others)
        wait_for("*/result.json", 1)
        time.sleep(max(0.0, gone + GONE - time.monotonic()))
        assert not late.done() and sweep.process.poll() is None
        server.start()
        server.wait()
        assert late.result(400).end("FINISHED") == []
    code, out, errors = sweep.end(400)
    assert code == 0, out + errors
    assert "refused" not in errors and "attempt 2" not in errors

    client = late.result().client
    (experiment,) = client.search_experiments(filter_string="name = 'trishul'")
    found = client.search_runs([experiment.experiment_id], "tags.`trishul.id` LIKE '%'")
    finished = {file.parent.name for file in runs.glob("*/result.json")}
    assert len(finished) == 2
    assert {run.data.tags["trishul.id"] for run in found} == finished
    for run in found:
        home = Store.open(f"{runs}/{run.data.tags['trishul.id']}")
        records = {record["round"]: grouped_metrics(record) for record in read_metrics(home)}
        assert run.info.status == "FINISHED" and sorted(records) == list(range(5))
        for name in records[4]:
            history = client.get_metric_history(run.info.run_id, name)
            # A point whose response was lost with the server is sent again.
            logged = sorted({(point.step, point.value) for point in history})
            assert logged == [(step, each[name]) for step, each in records.items() if name in each]
        assert {"best_on_test/accuracy", "total/wall_seconds"} <= set(run.data.metrics)
        assert "result.json" in {file.path for file in client.list_artifacts(run.info.run_id)}


def test_second_start_changes_nothing_and_hides_secrets(server):
    before = (server.home / "mlflow" / "pid").read_text()
    server.start()
    assert (server.home / "mlflow" / "pid").read_text() == before
    assert PASSWORD not in server.log() and redact(server.log()) == server.log()
    shell = psutil.Process(int(before))
    for process in [shell, *shell.children(recursive=True)]:
        assert PASSWORD not in " ".join(process.cmdline())
    listening = {
        connection.laddr.ip
        for process in shell.children(recursive=True)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    for name in ("users.db", "secret-key", "auth.ini"):
        assert (server.home / "mlflow" / name).stat().st_mode & 0o077 == 0
