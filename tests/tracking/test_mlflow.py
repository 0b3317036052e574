"""Runs in MLflow: the store, the run of an experiment and the run of a sweep."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.tracking import MlflowClient

from trishul_ray.errors import InputError
from trishul_ray.tasks.sums import group_metrics
from trishul_ray.tracking.mlflow import MlflowRun, dataset_input, find_runs, is_outage
from trishul_ray.tracking.store import open_client, opened, sqlite_file, tracking_uri, ui_command
from trishul_ray.tracking.sweep import SweepRun


@pytest.fixture
def uri(mlflow_store):
    return f"sqlite:///{mlflow_store}"


def open_run(uri, attempt="abc123", *, params=(), tags=(), **more):
    return MlflowRun(uri, "trishul", attempt, "a run", params=dict(params), tags=dict(tags), **more)


def history(uri, run_id, key):
    points = MlflowClient(uri).get_metric_history(run_id, key)
    return sorted((point.step, point.value) for point in points)


def test_store_is_named_by_field_or_variable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(None, "runs") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert tracking_uri(None, f"file://{tmp_path}/r") == f"sqlite:///{tmp_path}/r/mlflow.db"
    assert tracking_uri("my.db", "runs") == f"sqlite:///{tmp_path}/my.db"
    assert tracking_uri("http://host:5000", "s3://b/runs") == "http://host:5000"
    assert sqlite_file(f"sqlite:///{tmp_path}/a.db?timeout=3") == tmp_path / "a.db"
    with pytest.raises(InputError, match="credentials are not stored"):
        tracking_uri("http://***@host:5000", "runs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@host:5000")
    assert tracking_uri(None, "s3://b/runs") == "http://me:hunter2@host:5000"


@pytest.mark.parametrize(
    ("uri", "runs", "message"),
    [
        (None, "s3://bucket/runs", "storage.runs='s3://bucket/runs' is remote"),
        ("mlruns", "runs", "tracking.uri='mlruns' must be a SQLite file"),
        ("databricks", "runs", "tracking.uri='databricks' must be"),
        ("ftp://me:hunter2@host", "runs", r"tracking.uri='ftp://\*\*\*@host' must be"),
        ("sqlite:///:memory:", "runs", "must be a SQLite file"),
    ],
)
def test_wrong_store_is_rejected_in_one_line(uri, runs, message):
    with pytest.raises(InputError, match=message) as caught:
        tracking_uri(uri, runs)
    assert "\n" not in str(caught.value)


def test_store_of_any_folder_name_is_created(tmp_path):
    name = "a b, λ#1"
    open_run(tracking_uri(None, str(tmp_path / name))).round(1, {"accuracy": 0.5})
    assert (tmp_path / name / "mlflow.db").is_file()
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_store_that_does_not_answer_is_named(tmp_path, monkeypatch):
    file = tmp_path / "mlflow.db"
    file.write_bytes(b"this is not a database, and long enough not to be taken for an empty one")
    with pytest.raises(InputError, match=r"mlflow\.db.*does not respond: .*not a database"):
        open_client(f"sqlite:///{file}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(InputError, match=r"127\.0\.0\.1:9.*does not respond") as caught:
        open_client("http://user:hunter2@127.0.0.1:9")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InputError, match="is a folder"), opened(f"sqlite:///{tmp_path}", "a"):
        pass
    with pytest.raises(InputError, match="cannot write"), opened(f"sqlite:///{file}/x.db", "a"):
        pass


def test_clock_set_back_gives_no_negative_duration(uri, monkeypatch):
    run = open_run(uri)
    clock = SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic)
    monkeypatch.setattr("trishul_ray.tracking.mlflow.time", clock)
    assert run.end("FINISHED") == []
    info = MlflowClient(uri).get_run(run.run_id).info
    assert info.end_time == info.start_time


#: Exits before a transaction of this number, or before the file gets its name.
KILLED = """
    import os, signal, sys
    import sqlalchemy
    from trishul_ray.tracking.store import open_client

    uri, last = sys.argv[1:]
    transactions = []

    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    def commit(_):
        transactions.append(1)
        if str(len(transactions)) == last:
            end()

    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("/mlflow.db"):
            end()

    sqlalchemy.event.listen(sqlalchemy.Engine, "commit", commit)
    sys.addaudithook(hook)
    open_client(uri)
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", ["40", "rename"])
def test_store_killed_in_its_creation_is_created_again(tmp_path, last):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    words = [sys.executable, "-c", textwrap.dedent(KILLED), uri, last]
    assert subprocess.run(words).returncode == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    assert open_client(uri).search_experiments()[0].name == "Default"
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


#: Script of a driver, which opens the store after it has read a line.
DRIVER = """
    import sys
    import mlflow.tracking
    from trishul_ray.tracking.mlflow import MlflowRun
    print("ready", flush=True)
    sys.stdin.readline()
    run = MlflowRun(sys.argv[1], "trishul", sys.argv[2], "a run", params={}, tags={})
    run.round(1, {"accuracy": 0.5})
    print(run.run_id, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_four_processes_open_a_fresh_store(tmp_path):
    uri = f"sqlite:///{tmp_path}/fresh/mlflow.db"
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, "-c", textwrap.dedent(DRIVER), uri]
    drivers = [
        subprocess.Popen([*words, attempt], text=True, env=os.environ | path, **pipes)
        for attempt in ("a", "b", "c", "c")
    ]
    assert [driver.stdout.readline() for driver in drivers] == ["ready\n"] * 4
    for driver in drivers:
        driver.stdin.write("\n")
        driver.stdin.flush()
    outputs = [driver.communicate(timeout=120) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * 4, outputs
    ids = [out.strip() for out, _ in outputs]
    assert len(set(ids)) == 3 and ids[2] == ids[3]
    assert not any("INFO" in err for _, err in outputs), outputs


def test_deleted_experiment_is_named(uri):
    with opened(uri, "gone") as (client, experiment):
        client.delete_experiment(experiment.experiment_id)
    with pytest.raises(InputError, match="'gone' was deleted"), opened(uri, "gone"):
        pass


def test_experiment_is_shown_as_training_runs_with_scores(uri):
    with opened(uri, "trishul") as (_, experiment):
        tags = experiment.tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    view = json.loads(tags["mlflow.sharedViewState.trishul"])
    columns = {*json.loads(view["state"])["selectedColumns"]}
    assert {"metrics.`Score/accuracy`", "metrics.`total/uploaded_bytes`"} <= columns
    assert "params.`method.name`" in columns


def test_resumed_run_has_every_logged_value(uri, tmp_path):
    start = {"params": {"method.lam": 0.01, "seed": 0}, "tags": {"profile": "smoke"}}
    profile = {"used": 3, "official": 9}
    for _ in range(2):  # resumed
        rows = dataset_input("mine train", "abc", "mirror:me/mine", "training", profile)
        run = open_run(uri, parent="f00d", inputs=[rows], **start)
        run.round(1, {"accuracy": 0.5, "loss": 1.25})
        run.end("KILLED")
    run = open_run(uri, parent="f00d", **start)
    run.round(2, {"accuracy": 0.75, "loss": 1.0})
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    (tmp_path / "out" / "adapter" / "a.bin").write_bytes(b"weights")
    totals = {"metrics": {"total/megabytes": 3.0}, "tags": {"place": "here"}}
    assert run.end("FINISHED", folder=tmp_path / "out", **totals) == []

    stored = MlflowClient(uri).get_run(run.run_id)
    assert stored.data.params == {"method.lam": "0.01", "seed": "0"}
    (found,) = stored.inputs.dataset_inputs  # once
    assert (found.dataset.name, found.dataset.digest) == ("mine train", "abc")
    assert json.loads(found.dataset.source) == {"source": "mirror:me/mine"}
    assert json.loads(found.dataset.profile) == profile
    assert {tag.key: tag.value for tag in found.tags} == {"mlflow.data.context": "training"}
    assert stored.data.tags["mlflow.parentRunId"] == "f00d"
    assert stored.data.tags["profile"] == "smoke" and stored.data.tags["place"] == "here"
    assert history(uri, run.run_id, "total/megabytes") == [(2, 3.0)]
    assert stored.info.run_name == "a run" and stored.info.status == "FINISHED"
    assert history(uri, run.run_id, "accuracy") == [(1, 0.5), (2, 0.75)]
    assert history(uri, run.run_id, "loss") == [(1, 1.25), (2, 1.0)]
    kept = tmp_path / "runs" / "mlartifacts" / run.run_id / "artifacts"
    assert (kept / "adapter" / "a.bin").read_bytes() == b"weights"


def test_same_attempt_continues_its_run(uri):
    first = open_run(uri)
    first.round(1, {"accuracy": 0.5})
    first.end("KILLED")
    again, other = open_run(uri), open_run(uri, "def456")
    assert again.run_id == first.run_id != other.run_id
    assert MlflowClient(uri).get_run(again.run_id).info.status == "RUNNING"
    for run in (again, other):
        run.round(1, {"accuracy": 0.7})
        run.round(1, {"accuracy": 0.8})
        run.round(2, {"accuracy": 0.9})
        run.end("FINISHED")
    assert history(uri, first.run_id, "accuracy") == [(1, 0.5), (2, 0.9)]
    assert history(uri, other.run_id, "accuracy") == [(1, 0.7), (2, 0.9)]


def test_run_of_an_attempt_is_deleted(uri):
    first, other, client = open_run(uri), open_run(uri, "def456"), MlflowClient(uri)
    (found,) = find_runs(uri, "trishul", "abc123", delete=True)
    assert found.info.run_id == first.run_id
    assert find_runs(uri, "trishul", "abc123") == []
    assert client.get_run(other.run_id).info.lifecycle_stage == "active"


def test_secrets_are_omitted_and_long_values_truncated(uri):
    params = {f"p{i:03d}": i for i in range(250)}
    params |= {"long": "x" * 7000, "hub.token": "t0ps3cret", "odd[key]": 1}
    params |= {"odd{key}": 2, "axis.a//..": 3, 300 * "k": 4, 300 * "k" + "l": 5}
    params |= {"tracking.uri": "postgresql://me:t0ps3cret@db/x"}
    run = open_run(uri, params=params, tags={"password": "t0ps3cret", "note": "y" * 9000})
    stored = MlflowClient(uri).get_run(run.run_id).data
    assert len(stored.params) == 257 and len(stored.params["long"]) == 5000
    assert [stored.params[key] for key in ("odd_key_", "odd_key_-2", "axis.a__..")] == [*"123"]
    assert stored.params["tracking.uri"] == "postgresql://***@db/x"
    assert "t0ps3cret" not in json.dumps(stored.params | stored.tags)


def test_odd_names_of_groups_lose_no_totals(uri):
    groups = ("物理", "化学", "हिन्दी", "a/b", "a\\b", ".", "..", "", 300 * "x")
    scores = {f"Score/validation_{name}": 0.5 for name in group_metrics("accuracy", groups)}
    run = open_run(uri)
    run.round(1, scores)
    assert run.end("FINISHED", metrics={"total/uploaded_bytes": 8.0}) == []
    stored = MlflowClient(uri).get_run(run.run_id).data.metrics
    assert stored == scores | {"round": 1.0, "total/uploaded_bytes": 8.0}


def test_lost_store_does_not_stop_the_run(uri, tmp_path):
    run = open_run(uri)
    run.round(1, {"accuracy": 0.1})
    database, aside = tmp_path / "runs" / "mlflow.db", tmp_path / "runs" / "aside.db"
    run.client._tracking_client.store.engine.dispose()
    database.rename(aside)
    run.round(2, {"accuracy": 0.2})
    refused = [line.partition(" (")[0] for line in run.end("FAILED")]
    assert refused == ["rounds", "status FAILED"]
    run.client._tracking_client.store.engine.dispose()
    aside.replace(database)
    run.round(3, {"accuracy": 0.3})
    assert run.end("FINISHED") == []
    assert history(uri, run.run_id, "accuracy") == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_rejected_values_are_listed(uri, monkeypatch):
    run = open_run(uri)
    run.round(1, {"accuracy[0]": 0.5})
    (refused,) = run.end("FINISHED")
    assert refused.startswith("rounds (Invalid value")

    def refuse(*_, **__):
        raise MlflowException("Permission denied.\nMore.", error_code=PERMISSION_DENIED)

    monkeypatch.setattr(MlflowClient, "create_run", refuse)
    with pytest.raises(InputError, match=r"MLflow rejected the request: Permission denied\.$"):
        open_run(uri, "other")


def test_interrupt_is_not_an_outage():
    assert not is_outage(KeyboardInterrupt()) and is_outage(MlflowException("no answer"))


@pytest.mark.timeout(60)  # and not OUTAGE_SECONDS
def test_stopped_run_does_not_wait_for_a_server(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = open_run(uri)
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # nothing listens
        address = f"http://127.0.0.1:{gone.getsockname()[1]}"
        run.client, run.patience = MlflowClient(address, address), 300.0
        assert run.end("KILLED")[-1].startswith("status KILLED")


def test_short_rounds_are_sent_together(uri, monkeypatch):
    run, sent = open_run(uri), []
    log_batch = run.client.log_batch

    def counted(id, metrics, **more):
        sent.append(sorted({point.step for point in metrics}))
        log_batch(id, metrics, **more)

    monkeypatch.setattr(run.client, "log_batch", counted)
    for step in range(5):
        run.round(step, {"accuracy": step / 10, "loss": 1.0})
    assert sent[0] == [0]  # MLflow shows it immediately.
    run.end("FINISHED")
    assert sent == [[0], [1, 2, 3, 4]]
    assert open_run(uri).logged_rounds() == set(range(5))


def test_ui_command_shows_this_store(uri, tmp_path, monkeypatch):
    for name in ("TRISHUL_RUNS", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert ui_command(uri) == "trishul ui"
    assert ui_command("sqlite:////x/my.db") == "trishul ui --uri sqlite:////x/my.db"
    assert ui_command("http://me:secret@host:5000") == "http://***@host:5000"


def open_parent(uri, name, *keys):
    tags = {"sweep": name, "profile": "smoke"}
    return SweepRun(uri, "trishul", tags, {"axis.seed": "0, 1", "axis.lam": "0.1"}, keys)


def open_cell(uri, id, name, parent=None):
    marks = {"trishul.id": id, **({f"sweep.{name}": "smoke"} if name else {})}
    return open_run(uri, f"attempt-{id}", tags=marks, parent=parent)


class FailsOnce:
    """A client whose methods each fail once, as with a server that is down."""

    def __init__(self, client):
        self._client, self.failed = client, set()

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if name not in self.failed:
                self.failed.add(name)
                raise MlflowException("no answer")
            return getattr(self._client, name)(*args, **kwargs)

        return call


def test_every_run_ends_as_its_cell(uri, monkeypatch):
    monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=lambda seconds: None))
    parent = open_parent(uri, "first")
    assert open_parent(uri, "first").run_id == parent.run_id
    for id in ("done", "open", "failed", "running"):
        open_cell(uri, id, "first", parent.run_id).round(0, {"accuracy": 0.1})
    open_cell(uri, "interrupted", "first", parent.run_id).end("FAILED")
    done, single = open_cell(uri, "done", "first", parent.run_id), open_cell(uri, "single", None)
    for each in (done, single):
        each.end("FINISHED")
    cells = {
        "done": "FINISHED",
        "open": "FINISHED",
        "failed": "FAILED",
        "running": "KILLED",
        "interrupted": "KILLED",
        "single": "FINISHED",
        "elsewhere": "FINISHED",  # logged to another store
    }
    counts = {"finished": 3, "failed": 1, "missing": 1}
    parent.client, parent.patience = FailsOnce(parent.client), 60.0
    assert parent.close(cells, counts, "FAILED") == []
    assert parent.client.failed >= {"search_runs", "set_tag", "set_terminated"}

    client = MlflowClient(uri)
    found = client.search_runs([parent.experiment_id])
    runs = {run.data.tags.get("trishul.id"): run for run in found}
    ended = {"failed": "FAILED", "running": "KILLED", "interrupted": "KILLED"}
    ended |= dict.fromkeys(("done", "open", "single"), "FINISHED")
    assert {id: run.info.status for id, run in runs.items()} == {None: "FAILED", **ended}
    assert runs[None].info.run_name == "first-smoke seed"
    tags = {f"cells.{name}": str(number) for name, number in counts.items()}
    assert runs[None].data.tags.items() >= tags.items()
    # A run of another call still has no parent.
    assert runs["single"].data.tags["sweep.first"] == "smoke"
    assert "mlflow.parentRunId" not in runs["single"].data.tags


def test_runs_of_another_sweep_stay_open(uri):
    parent, other = (open_parent(uri, "mine", folder) for folder in "ab")
    run = open_cell(uri, "x", "mine", other.run_id)
    assert parent.close({}, {}, "FINISHED") == []
    assert MlflowClient(uri).get_run(run.run_id).info.status == "RUNNING"
