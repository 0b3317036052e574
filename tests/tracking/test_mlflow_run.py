import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest
from mlflow.entities import Run, RunData, RunInfo
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from trishul_ray.errors import InputError
from trishul_ray.tracking.mlflow_run import MlflowRun, Tracker
from trishul_ray.tracking.store import open_client, ui_command
from trishul_ray.tracking.sweep_run import SweepRun


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A database with MLflow's schema and nothing else, created once: it takes a second."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_client(f"sqlite:///{file}")
    return file


@pytest.fixture
def uri(tmp_path, empty_store):
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs" / "mlflow.db")
    return f"sqlite:///{tmp_path}/runs/mlflow.db"


def open_run(uri, attempt="abc123", params=None, **more):
    return MlflowRun.open(uri, "trishul", attempt, "a run", params or {}, **more)


def history(uri, run_id, key):
    return sorted(
        (point.step, point.value) for point in MlflowClient(uri).get_metric_history(run_id, key)
    )


def test_a_run_holds_what_was_logged(uri, tmp_path):
    run = open_run(
        uri, params={"method.lam": 0.01, "seed": 0}, tags={"profile": "smoke"}, parent_run="f00d"
    )
    run.log_round(1, {"accuracy": 0.5, "loss": 1.25})
    run.log_round(2, {"accuracy": 0.75, "loss": 1.0})
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "config.yaml").write_text("seed: 0")
    (tmp_path / "out" / "figures" / "a.png").write_bytes(b"png")
    run.log_artifacts(tmp_path / "out")
    assert run.finish() == []

    stored = MlflowClient(uri).get_run(run.run_id)
    assert stored.data.params == {"method.lam": "0.01", "seed": "0"}
    assert stored.data.tags["mlflow.parentRunId"] == "f00d"
    assert stored.data.tags["profile"] == "smoke"
    assert stored.info.run_name == "a run"
    assert stored.info.status == "FINISHED"
    assert history(uri, run.run_id, "accuracy") == [(1, 0.5), (2, 0.75)]
    assert history(uri, run.run_id, "loss") == [(1, 1.25), (2, 1.0)]
    kept = tmp_path / "runs" / "mlartifacts" / run.run_id / "artifacts"
    assert (kept / "config.yaml").read_text() == "seed: 0"
    assert (kept / "figures" / "a.png").read_bytes() == b"png"


def test_the_same_attempt_continues_its_run_and_another_does_not(uri):
    first = open_run(uri)
    first.log_round(1, {"accuracy": 0.5})
    first.finish("KILLED")
    again = open_run(uri)
    other = open_run(uri, attempt="def456")
    assert again.run_id == first.run_id != other.run_id
    client = MlflowClient(uri)
    assert client.get_run(again.run_id).info.status == "RUNNING"
    assert again.logged_steps() == {1}
    assert other.logged_steps() == frozenset()


def test_a_round_is_logged_once(uri):
    first = open_run(uri)
    first.log_round(1, {"accuracy": 0.5})
    first.log_round(1, {"accuracy": 0.6})
    again = open_run(uri)
    again.log_round(1, {"accuracy": 0.7})
    again.log_round(2, {"accuracy": 0.8})
    assert history(uri, first.run_id, "accuracy") == [(1, 0.5), (2, 0.8)]


def test_changed_parameters_go_into_a_tag(uri):
    open_run(uri, params={"resources.actors": 2, "seed": 0})
    again = open_run(uri, params={"resources.actors": 4, "seed": 0, "new": 1})
    stored = MlflowClient(uri).get_run(again.run_id).data
    assert stored.params == {"resources.actors": "2", "seed": "0", "new": "1"}
    assert json.loads(stored.tags["trishul.resumed_with"]) == {"resources.actors": "4"}


def test_long_values_are_cut_many_are_batched_and_secrets_stay_out(uri):
    params = {f"p{i:03d}": i for i in range(250)}
    params |= {
        "long": "x" * 7000,
        "hub.token": "t0ps3cret",
        "odd[key]": 1,
        "tracking.uri": "postgresql://me:t0ps3cret@db/x",
    }
    run = open_run(uri, params=params, tags={"password": "t0ps3cret", "note": "y" * 9000})
    stored = MlflowClient(uri).get_run(run.run_id).data
    assert len(stored.params) == 253
    assert len(stored.params["long"]) == 6000 and stored.params["long"].endswith("x…")
    assert stored.params["odd_key_"] == "1"
    assert stored.params["tracking.uri"] == "postgresql://***@db/x"
    assert len(stored.tags["note"]) == 5000
    assert "t0ps3cret" not in json.dumps(stored.params | stored.tags)


def test_more_metrics_than_one_request_takes(uri):
    run = open_run(uri)
    run.log_round(3, {f"m/{i}": float(i) for i in range(2500)})
    assert history(uri, run.run_id, "m/2499") == [(3, 2499.0)]
    assert run.logged_steps() == {3}


def test_a_lost_store_does_not_stop_the_run_and_nothing_is_lost(uri, tmp_path):
    run = open_run(uri)
    run.log_round(1, {"accuracy": 0.1})
    database, aside = tmp_path / "runs" / "mlflow.db", tmp_path / "runs" / "aside.db"
    run._client._tracking_client.store.engine.dispose()
    database.rename(aside)
    run.log_round(2, {"accuracy": 0.2})
    assert [line for line in run.finish("FAILED") if line.startswith("round")] == ["round 2"]
    run._client._tracking_client.store.engine.dispose()
    aside.replace(database)
    run.log_round(3, {"accuracy": 0.3})
    assert run.finish() == []
    assert history(uri, run.run_id, "accuracy") == [(1, 0.1), (2, 0.2), (3, 0.3)]


@pytest.mark.timeout(60)  # and not OUTAGE_SECONDS
@pytest.mark.parametrize("kind", [MlflowRun, SweepRun])
def test_a_stopped_run_does_not_wait_for_a_server(kind, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # nobody listens
        uri = f"http://127.0.0.1:{gone.getsockname()[1]}"
        known = Run(RunInfo("f" * 32, "0", "me", "RUNNING", 0, None, "active"), RunData())
        run = kind(MlflowClient(uri, uri), uri, "0", known)
        rejected = []
        if isinstance(run, SweepRun):
            run.stop_waiting()
            rejected += run.settle({}, {}, lambda id: False, lambda id: None)
            assert rejected != []
            run.close({"missing": 3}, "KILLED")
        rejected += run.finish("KILLED")
    assert rejected[-1] == "status KILLED"


def test_a_metric_name_mlflow_refuses_is_an_error(uri):
    run = open_run(uri)
    with pytest.raises(MlflowException, match="Invalid value"):
        run.log_round(1, {"accuracy[0]": 0.5})


@pytest.mark.parametrize("attempt", ["", "it's", "λ"])
def test_a_wrong_attempt_is_refused(uri, attempt):
    with pytest.raises(InputError, match="attempt="):
        open_run(uri, attempt=attempt)


def test_artifacts_must_be_a_folder(uri, tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        open_run(uri).log_artifacts(tmp_path / "absent")


def test_ui_command_opens_this_store(uri, tmp_path, monkeypatch):
    monkeypatch.delenv("TRISHUL_RUNS", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = open_run(uri)
    monkeypatch.chdir(tmp_path)
    assert run.ui_command() == "trishul ui"
    assert run.ui_command("abc") == "trishul ui abc"
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    assert run.ui_command("abc") == f"trishul ui abc --runs {tmp_path}/runs"
    monkeypatch.chdir(tmp_path.parent)
    assert run.ui_command() == f"trishul ui --runs {tmp_path.name}/runs"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    assert run.ui_command() == f"trishul ui --uri {uri}"
    assert ui_command("sqlite:////x/my.db") == "trishul ui --uri sqlite:////x/my.db"
    assert ui_command("http://me:secret@host:5000", "abc") == "http://***@host:5000"


def test_the_base_tracker_discards_everything(tmp_path):
    run = Tracker()
    run.log_round(1, {"accuracy": 0.5})
    run.log_data("digits train", "abc", "scikit-learn", "training", {"used": 3})
    run.log_artifacts(tmp_path)
    assert run.finish() == []
    assert run.run_id is None and run.ui_command() is None


SCRIPT = """
    import sys
    import mlflow.tracking
    from trishul_ray.tracking.mlflow_run import MlflowRun
    uri, attempt = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    run = MlflowRun.open(uri, "trishul", attempt, attempt, {"seed": 0})
    run.log_round(1, {"accuracy": 0.5})
    print(run.run_id, flush=True)
    sys.stdin.readline()
"""


def start_driver(uri, attempt):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), uri, attempt],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def send(driver, text="\n"):
    driver.stdin.write(text)
    driver.stdin.flush()


@pytest.mark.slow
def test_four_processes_open_a_fresh_store_at_once(tmp_path):
    uri = f"sqlite:///{tmp_path}/fresh/mlflow.db"
    drivers = [start_driver(uri, attempt) for attempt in ("a", "b", "c", "c")]
    assert [driver.stdout.readline() for driver in drivers] == ["ready\n"] * 4
    for driver in drivers:
        send(driver)
    outputs = [driver.communicate("\n", timeout=120) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * 4, outputs
    ids = [out.strip() for out, _ in outputs]
    assert len(set(ids)) == 3 and ids[2] == ids[3]
    assert not any("INFO" in err for _, err in outputs), outputs
    client = MlflowClient(uri)
    [experiment] = [e for e in client.search_experiments() if e.name == "trishul"]
    assert len(client.search_runs([experiment.experiment_id])) == 3


@pytest.mark.chaos
def test_a_killed_driver_continues_its_run(uri):
    driver = start_driver(uri, "abc123")
    assert driver.stdout.readline() == "ready\n"
    send(driver)
    run_id = driver.stdout.readline().strip()
    driver.kill()
    driver.communicate(timeout=30)
    again = open_run(uri)
    assert again.run_id == run_id
    assert again.logged_steps() == {1}


def test_a_resumed_run_logs_its_rows_once(uri):
    for _ in range(2):
        run = open_run(uri)
        run.log_data("mine train", "abc", "mirror:me/mine", "training", {"used": 3, "official": 9})
        assert run.finish() == []
    (found,) = MlflowClient(uri).get_run(run.run_id).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest) == ("mine train", "abc")
    assert json.loads(found.dataset.source) == {"source": "mirror:me/mine"}
    assert json.loads(found.dataset.profile) == {"used": 3, "official": 9}
    assert {tag.key: tag.value for tag in found.tags} == {"mlflow.data.context": "training"}
