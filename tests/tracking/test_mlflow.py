"""Runs in MLflow: the store, the run of an experiment and of a sweep, and the page of them."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
import urllib.request
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, TEMPORARILY_UNAVAILABLE
from mlflow.tracking import MlflowClient
from tiny_run import TINY

from trishul_ray.errors import InputError
from trishul_ray.storage.redaction import is_secret_name, redact
from trishul_ray.storage.store import Store
from trishul_ray.tracking import mlflow as mlflow_module
from trishul_ray.tracking.mlflow import ID_TAG, MlflowTracker, replace_run
from trishul_ray.tracking.mlflow_store import (
    get_or_create_experiment,
    open_client,
    sqlite_file,
    store_lock,
    tracking_uri,
    ui_command,
)
from trishul_ray.tracking.mlflow_sweep import CellLog, SweepRun
from trishul_ray.tracking.mlflow_ui import free_port, page_of_run
from trishul_ray.tracking.tracker import Input, RunEnd, RunStart


def test_the_store_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tracking_uri(None, "runs") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert tracking_uri(None, f"file://{tmp_path}/r") == f"sqlite:///{tmp_path}/r/mlflow.db"
    assert tracking_uri("my.db", "runs") == f"sqlite:///{tmp_path}/my.db"
    assert tracking_uri("http://host:5000", "s3://b/runs") == "http://host:5000"
    assert sqlite_file(f"sqlite:///{tmp_path}/a.db?timeout=3") == tmp_path / "a.db"
    assert sqlite_file("http://host") is None


def test_a_folder_of_any_name_may_hold_a_store(tmp_path):
    name = "a b, λ#1"
    uri = tracking_uri(None, str(tmp_path / name))
    assert sqlite_file(uri) == tmp_path / name / "mlflow.db"
    open_run(uri).round(1, {"accuracy": 0.5})
    assert (tmp_path / name / "mlflow.db").is_file()
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("uri", "runs", "message"),
    [
        (None, "s3://bucket/runs", "storage.runs='s3://bucket/runs' is remote"),
        ("mlruns", "runs", "no longer writes folders of files"),
        ("databricks", "runs", "a server of Databricks is not supported"),
        ("ftp://me:hunter2@host", "runs", "tracking.uri='ftp://***@host': name sqlite:///"),
        ("file:///tmp/mlruns", "runs", "no longer writes folders of files"),
        ("sqlite://", "runs", "name a file"),
        ("sqlite:///:memory:", "runs", "name a file"),
        (None, "a?b", "MLflow reads ? in the path"),
        ("a%20b/my.db", "runs", "MLflow reads % in the path"),
    ],
)
def test_a_wrong_store_is_refused_in_one_line(uri, runs, message):
    with pytest.raises(InputError) as caught:
        tracking_uri(uri, runs)
    assert message in str(caught.value)
    assert "tracking.uri" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["databricks", "./mlruns", "file:///tmp/mlruns", "sqlite://"])
def test_a_wrong_store_of_the_environment_is_called_by_its_variable(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(InputError, match=f"^MLFLOW_TRACKING_URI='{re.escape(uri)}': name "):
        tracking_uri(None, "runs")


@pytest.mark.parametrize(
    ("uri", "package"),
    [
        ("postgresql+psycopg2://me:hunter2@127.0.0.1:1/db", "psycopg2-binary"),
        ("mysql+pymysql://me:hunter2@127.0.0.1:1/db", "pymysql"),
    ],
)
def test_a_database_without_its_driver_names_the_package(uri, package, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(InputError, match=rf"^MLFLOW_TRACKING_URI=.*pip install {package}$") as said:
        open_client(uri)
    assert "hunter2" not in str(said.value)


@pytest.mark.parametrize("version", ["fffffffffffd", "451aebb31d03"], ids=["newer", "older"])
def test_a_database_of_another_mlflow_is_named_with_what_to_do(uri, version):
    with contextlib.closing(sqlite3.connect(sqlite_file(uri))) as database, database:
        database.execute("update alembic_version set version_num = ?", (version,))
    advice = r"is not of MLflow \d.* mlflow db upgrade sqlite:///.*pip install --upgrade mlflow"
    with pytest.raises(InputError, match=advice):
        open_client(uri)


def test_a_file_that_is_no_database_is_named(tmp_path):
    file = tmp_path / "mlflow.db"
    file.write_bytes(b"this is not a database, and long enough not to be taken for an empty one")
    with pytest.raises(InputError, match=r"mlflow\.db.*does not answer: .*not a database"):
        open_client(f"sqlite:///{file}")


#: Ends before the transaction of this number, of about seventy, or before the file has its name.
KILLED = """
    import os, signal, sys
    import sqlalchemy
    from trishul_ray.tracking.mlflow_store import open_client

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
@pytest.mark.parametrize("last", ["5", "40", "rename"])
def test_a_store_whose_creation_was_killed_is_created_again(tmp_path, last):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    words = [sys.executable, "-c", textwrap.dedent(KILLED), uri, last]
    assert subprocess.run(words).returncode == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} >= {".mlflow.db.new"}
    assert not (tmp_path / "mlflow.db").exists()
    assert open_client(uri).search_experiments()[0].name == "Default"
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_an_unreachable_server_is_named(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(InputError, match=r"127\.0\.0\.1:9.*does not answer") as caught:
        open_client("http://user:hunter2@127.0.0.1:9")
    assert "hunter2" not in str(caught.value)


def test_a_deleted_experiment_is_named(uri):
    client = open_client(uri)
    client.delete_experiment(get_or_create_experiment(client, "gone", None).experiment_id)
    with pytest.raises(InputError, match=r"tracking\.experiment='gone' was deleted"):
        get_or_create_experiment(client, "gone", None)


def test_a_folder_that_cannot_exist_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="cannot write in"),
        store_lock(f"sqlite:///{tmp_path}/file/mlflow.db"),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgresql://me:pw@db/mlflow", "postgresql://***@db/mlflow"),
        ("s3://key:secret@bucket/runs", "s3://***@bucket/runs"),
        ("http://me:p@ss@host:5000", "http://***@host:5000"),
        ("https://h/p?token=abc&x=1", "https://h/p?token=***&x=1"),
        ("https://h/p?x=1&X-Amz-Signature=abc", "https://h/p?x=1&X-Amz-Signature=***"),
        ("hf_" + "a" * 30, "***"),
        ("sqlite:////home/me/runs/mlflow.db", "sqlite:////home/me/runs/mlflow.db"),
        ("google/vit-base-patch16-224-in21k", "google/vit-base-patch16-224-in21k"),
        ("a note to me@example.org", "a note to me@example.org"),
    ],
)
def test_redact(text, clean):
    assert redact(text) == clean
    assert redact(clean) == clean


def test_credentials_that_a_run_has_masked_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(InputError, match=r"credentials, which are never written; name them again"):
        tracking_uri("http://***@host:5000", "runs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@host:5000")
    assert tracking_uri("http://***@host:5000", "runs") == "http://me:hunter2@host:5000"


def test_names_of_secrets():
    secret = "token hub.token HF_TOKEN aws-secret-access-key storage.api_key db.password"
    plain = "tokenizer data.max_tokens method.lam adapter.targets keyword evaluation.top_k"
    assert [name for name in secret.split() if not is_secret_name(name)] == []
    assert [name for name in plain.split() if is_secret_name(name)] == []


@pytest.fixture
def uri(mlflow_store):
    return f"sqlite:///{mlflow_store}"


def open_run(uri, attempt="abc123", params=None, tags=None, experiment="trishul", **more):
    run = MlflowTracker(uri, experiment)
    run.start(RunStart(attempt, "a run", params or {}, tags or {}, **more))
    return run


def history(uri, run_id, key):
    return sorted(
        (point.step, point.value) for point in MlflowClient(uri).get_metric_history(run_id, key)
    )


def test_a_run_holds_what_was_logged(uri, tmp_path):
    rows = Input("mine train", "abc", "mirror:me/mine", "training", {"used": 3, "official": 9})
    start = {"params": {"method.lam": 0.01, "seed": 0}, "tags": {"profile": "smoke"}}
    open_run(uri, parent="f00d", inputs=[rows], **start).end("KILLED")
    run = open_run(uri, parent="f00d", inputs=[rows], **start)  # resumed
    run.round(1, {"accuracy": 0.5, "loss": 1.25})
    run.round(2, {"accuracy": 0.75, "loss": 1.0})
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "config.yaml").write_text("seed: 0")
    (tmp_path / "out" / "figures" / "a.png").write_bytes(b"png")
    totals = RunEnd(2, {"total/megabytes": 3.0}, {"place": "here"}, folder=tmp_path / "out")
    assert run.end("FINISHED", totals) == []

    stored = MlflowClient(uri).get_run(run.run_id)
    assert stored.data.params == {"method.lam": "0.01", "seed": "0"}
    (found,) = stored.inputs.dataset_inputs  # once
    assert (found.dataset.name, found.dataset.digest) == ("mine train", "abc")
    assert json.loads(found.dataset.source) == {"source": "mirror:me/mine"}
    assert json.loads(found.dataset.profile) == {"used": 3, "official": 9}
    assert {tag.key: tag.value for tag in found.tags} == {"mlflow.data.context": "training"}
    assert stored.data.tags["mlflow.parentRunId"] == "f00d"
    assert stored.data.tags["profile"] == "smoke" and stored.data.tags["place"] == "here"
    assert history(uri, run.run_id, "total/megabytes") == [(2, 3.0)]
    assert stored.info.run_name == "a run"
    assert stored.info.status == "FINISHED"
    assert history(uri, run.run_id, "accuracy") == [(1, 0.5), (2, 0.75)]
    assert history(uri, run.run_id, "loss") == [(1, 1.25), (2, 1.0)]
    kept = tmp_path / "runs" / "mlartifacts" / run.run_id / "artifacts"
    assert (kept / "config.yaml").read_text() == "seed: 0"
    assert (kept / "figures" / "a.png").read_bytes() == b"png"


def test_the_same_attempt_continues_its_run_and_another_does_not(uri):
    first = open_run(uri)
    first.round(1, {"accuracy": 0.5})
    first.end("KILLED")
    again = open_run(uri)
    other = open_run(uri, attempt="def456")
    assert again.run_id == first.run_id != other.run_id
    client = MlflowClient(uri)
    assert client.get_run(again.run_id).info.status == "RUNNING"
    for run in (again, other):
        run.round(1, {"accuracy": 0.7})
        run.round(1, {"accuracy": 0.8})
        run.round(2, {"accuracy": 0.9})
        run.end("FINISHED")
    assert history(uri, first.run_id, "accuracy") == [(1, 0.5), (2, 0.9)]
    assert history(uri, other.run_id, "accuracy") == [(1, 0.7), (2, 0.9)]


def test_a_run_is_not_replaced_if_the_process_that_was_to_delete_it_was_killed(uri, monkeypatch):
    first = open_run(uri)

    def killed(self, run):
        raise KeyboardInterrupt

    monkeypatch.setattr(MlflowClient, "delete_run", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_run(uri, "trishul", "abc123", "another")
    again = open_run(uri)
    assert again.run_id == first.run_id
    assert "trishul.replaced_by" not in MlflowClient(uri).get_run(first.run_id).data.tags


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
    assert len(stored.params["long"]) == 5000 and stored.params["long"].endswith("x…")
    assert stored.params["odd_key_"] == "1"
    assert stored.params["tracking.uri"] == "postgresql://***@db/x"
    assert len(stored.tags["note"]) == 5000
    assert "t0ps3cret" not in json.dumps(stored.params | stored.tags)


def test_more_metrics_than_one_request_takes(uri):
    run = open_run(uri)
    run.round(3, {f"m/{i}": float(i) for i in range(2500)})
    assert history(uri, run.run_id, "m/2499") == [(3, 2499.0)]


def test_a_lost_store_does_not_stop_the_run_and_nothing_is_lost(uri, tmp_path):
    run = open_run(uri)
    run.round(1, {"accuracy": 0.1})
    database, aside = tmp_path / "runs" / "mlflow.db", tmp_path / "runs" / "aside.db"
    run.client._tracking_client.store.engine.dispose()
    database.rename(aside)
    run.round(2, {"accuracy": 0.2})
    refused = [line.partition(" (")[0] for line in run.end("FAILED")]
    assert refused == ["round 2", "status FAILED"]
    run.client._tracking_client.store.engine.dispose()
    aside.replace(database)
    run.round(3, {"accuracy": 0.3})
    assert run.end("FINISHED") == []
    assert history(uri, run.run_id, "accuracy") == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_what_mlflow_refuses_does_not_stop_the_run_and_is_listed(uri):
    run = open_run(uri)
    run.round(1, {"accuracy[0]": 0.5})
    (refused,) = run.end("FINISHED")
    assert refused.startswith("round 1 (Invalid value")
    run = open_run(uri, attempt="deleted")
    MlflowClient(uri, uri).delete_run(run.run_id)
    run.round(2, {"accuracy": 0.2})
    refused = run.end("FINISHED")
    assert refused and all("'active' state" in line for line in refused)


def test_what_a_store_refuses_is_named_in_one_line(uri, monkeypatch):
    def refuse(*_, **__):
        raise MlflowException("Permission denied.\nMore.", error_code=PERMISSION_DENIED)

    monkeypatch.setattr(MlflowClient, "create_run", refuse)
    with pytest.raises(InputError, match=r"the MLflow store refuses: Permission denied\.$"):
        open_run(uri)


def test_a_server_that_hangs_is_asked_for_a_tenth_of_the_time(uri, monkeypatch):
    run, now, tries = open_run(uri), [0.0], []

    def hang(*_, **__):
        tries.append(now[0])
        now[0] += 90.0
        raise MlflowException("no answer", error_code=TEMPORARILY_UNAVAILABLE)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep, time=time.time)
    monkeypatch.setattr(mlflow_module, "time", clock)
    monkeypatch.setattr(run.client, "log_batch", hang)
    for number in range(100):
        now[0] += 20.0
        run.round(number, {"accuracy": 0.1})
    assert 90.0 * len(tries) < 0.15 * now[0] + 90.0
    monkeypatch.undo()
    assert run.end("FINISHED") == []  # nothing is lost once it answers
    assert len(history(uri, run.run_id, "accuracy")) == 100


@pytest.mark.timeout(60)  # and not OUTAGE_SECONDS
def test_a_stopped_run_does_not_wait_for_a_server(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # nobody listens
        address = f"http://127.0.0.1:{gone.getsockname()[1]}"
        for run in (open_run(uri), open_parent(uri, "stopped")):
            run.client, run.patience = MlflowClient(address, address), 300.0
            if isinstance(run, SweepRun):
                rejected = run.close({}, {"missing": 3}, "KILLED")
            else:
                rejected = run.end("KILLED")
            assert rejected[-1].startswith("status KILLED")


def test_short_rounds_are_sent_together(uri, monkeypatch):
    run = open_run(uri)
    client, sent = run.client, []
    log_batch = client.log_batch

    def counted(id, metrics, **more):
        sent.append(sorted({point.step for point in metrics}))
        log_batch(id, metrics, **more)

    monkeypatch.setattr(client, "log_batch", counted)
    for step in range(5):
        run.round(step, {"accuracy": step / 10, "loss": 1.0})
    assert sent[0] == [0]  # the page of a run shows it at once
    run.end("FINISHED")
    assert sent == [[0], [1, 2, 3, 4]]
    assert history(uri, run.run_id, "accuracy") == [(step, step / 10) for step in range(5)]
    assert open_run(uri).logged_rounds() == set(range(5))


@pytest.mark.parametrize("attempt", ["", "it's", "λ"])
def test_a_wrong_attempt_is_refused(uri, attempt):
    with pytest.raises(InputError, match="attempt="):
        open_run(uri, attempt=attempt)


def test_ui_command_opens_this_store(uri, tmp_path, monkeypatch):
    monkeypatch.delenv("TRISHUL_RUNS", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = open_run(uri)
    monkeypatch.chdir(tmp_path)
    assert run.command() == "trishul ui"
    assert run.command("abc") == "trishul ui abc"
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    assert run.command("abc") == f"trishul ui abc --runs {tmp_path}/runs"
    monkeypatch.chdir(tmp_path.parent)
    assert run.command() == f"trishul ui --runs {tmp_path.name}/runs"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    assert run.command() == f"trishul ui --uri {uri}"
    assert ui_command("sqlite:////x/my.db") == "trishul ui --uri sqlite:////x/my.db"
    assert ui_command("http://me:secret@host:5000", "abc") == "http://***@host:5000"


#: Script of a driver, which opens the store after it has read a line.
DRIVER = """
    import sys
    import mlflow.tracking
    from trishul_ray.tracking.mlflow import MlflowTracker
    from trishul_ray.tracking.tracker import RunStart
    print("ready", flush=True)
    sys.stdin.readline()
    run = MlflowTracker(sys.argv[1], "trishul")
    run.start(RunStart(sys.argv[2], "a run", {"seed": 0}, {}))
    run.round(1, {"accuracy": 0.5})
    print(run.run_id, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_four_processes_open_a_fresh_store_at_once(tmp_path):
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
    client = MlflowClient(uri)
    [experiment] = [e for e in client.search_experiments() if e.name == "trishul"]
    assert len(client.search_runs([experiment.experiment_id])) == 3


def open_parent(uri, name, folder=None):
    tags = {"sweep": name, "profile": "smoke"}
    runs = Store.open(str(folder or sqlite_file(uri).parent))
    parent = SweepRun(uri, "trishul", runs, tags, {"axis.seed": "0, 1"})
    parent.open()
    return parent


def open_cell(uri, id, name, parent=None):
    marks = {"trishul.id": id, **({f"sweep.{name}": "smoke"} if name else {})}
    return open_run(uri, f"attempt-{id}", tags=marks, parent=parent)


def test_every_run_ends_as_its_cell_did(uri):
    parent = open_parent(uri, "first")
    for id in ("done", "open", "failed", "running", "stopped"):
        open_cell(uri, id, "first", parent.run_id).round(0, {"accuracy": 0.1})
    open_cell(uri, "interrupted", "first", parent.run_id).end("FAILED")
    done = open_cell(uri, "done", "first", parent.run_id)
    done.end("FINISHED")
    single = open_cell(uri, "single", None)
    single.end("FINISHED")
    tags = {"sweep.first": "smoke", "table": "t"}
    cells = {
        "done": CellLog(tags, "FINISHED", done.run_id),
        "open": CellLog(tags, "FINISHED"),
        "failed": CellLog(tags, "FAILED"),
        "stopped": CellLog(tags, "KILLED", stopped="stopped early after round 1"),
        "running": CellLog(tags, "KILLED"),
        "interrupted": CellLog(tags, "KILLED"),
        "single": CellLog(tags, "FINISHED", single.run_id),
        "elsewhere": CellLog(tags, "FINISHED", "0" * 32),  # logged to another store
    }
    counts = {"finished": 3, "failed": 1, "missing": 1}
    assert parent.close(cells, counts, "FAILED") == []

    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "trishul"]
    found = client.search_runs([experiment.experiment_id])
    runs = {
        run.data.tags.get("trishul.id"): run
        for run in found
        if "trishul.shared_id" not in run.data.tags
    }
    ended = {"failed": "FAILED", "running": "KILLED", "stopped": "KILLED", "interrupted": "KILLED"}
    ended |= dict.fromkeys(("done", "open", "single"), "FINISHED")
    assert {id: run.info.status for id, run in runs.items()} == {None: "FAILED", **ended}
    assert runs[None].data.metrics == {}
    assert {name: runs[None].data.tags[f"cells.{name}"] for name in counts} == {
        name: str(n) for name, n in counts.items()
    }
    assert runs["stopped"].data.tags["trishul.stopped"] == "stopped early after round 1"
    # A run of its own keeps that it has no parent.
    assert runs["single"].data.tags["sweep.first"] == "smoke"
    assert "table" not in runs["single"].data.tags  # nor is its place that of this sweep
    assert "mlflow.parentRunId" not in runs["single"].data.tags
    assert "table" not in runs["done"].data.tags  # its tags were set when it began


def test_the_runs_of_another_sweep_of_the_same_name_go_on(uri):
    parent, other = (open_parent(uri, "mine", sqlite_file(uri).parent / name) for name in "ab")
    theirs = open_cell(uri, "x", "mine", other.run_id)
    lost = open_cell(uri, "y", "mine", parent.run_id)
    assert parent.close({}, {}, "FINISHED") == []
    client = MlflowClient(uri)
    assert client.get_run(theirs.run_id).info.status == "RUNNING"
    assert client.get_run(lost.run_id).info.status == "KILLED"


class FailsOnce:
    """A client whose methods each fail once, as they do while a server is gone."""

    def __init__(self, client):
        self._client = client
        self.failed = set()

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if name not in self.failed:
                self.failed.add(name)
                raise MlflowException("no answer")
            return getattr(self._client, name)(*args, **kwargs)

        return call


def test_a_sweep_ends_while_its_server_is_gone_for_a_moment(uri, monkeypatch):
    monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=lambda seconds: None))
    parent = open_parent(uri, "outage")
    cell = open_cell(uri, "killed-in-outage", "outage", parent.run_id)
    single = open_cell(uri, "single-in-outage", None)
    single.end("FINISHED")
    parent.client = client = FailsOnce(parent.client)
    parent.patience = 60.0
    tags = {"sweep.outage": "smoke"}
    rounds = [{"round": 0, "Score/accuracy": 0.1}]
    cells = {
        "killed-in-outage": CellLog(tags, "KILLED"),
        "single-in-outage": CellLog(tags, "FINISHED", single.run_id, rounds=lambda: rounds),
    }
    assert parent.close(cells, {"finished": 1}, "FINISHED") == []
    asked = {"search_runs", "get_run", "set_tag", "create_run", "log_batch", "set_terminated"}
    assert client.failed >= asked

    store = MlflowClient(uri)
    runs = [store.get_run(run.run_id) for run in (parent, cell, single)]
    assert [run.info.status for run in runs] == ["FINISHED", "KILLED", "FINISHED"]
    assert runs[0].data.tags["cells.finished"] == "1"
    assert runs[2].data.tags.items() >= tags.items()
    below = store.search_runs(
        [runs[0].info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'"
    )
    (short,) = [run for run in below if "trishul.shared_run" in run.data.tags]
    assert short.info.status == "FINISHED" and short.data.metrics == {"Score/accuracy": 0.1}


def test_a_sweep_knows_what_its_store_has_unless_that_is_another_file(uri, tmp_path):
    parent, results = open_parent(uri, "noted"), {"abc": "checksum"}
    assert not parent.has(results)
    parent.note(results)
    assert parent.has(results) and not parent.has({"abc": "another"})
    again = open_parent(uri, "noted")
    assert again.has(results)
    shutil.copy(tmp_path / "runs" / "mlflow.db", tmp_path / "copy.db")
    (tmp_path / "runs" / "mlflow.db").unlink()
    assert not again.has(results)
    (tmp_path / "copy.db").rename(tmp_path / "runs" / "mlflow.db")
    assert not again.has(results)


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

    for name in ("mlflow.py", "random.py"):  # of the user, and none of MLflow's
        (tmp_path / name).write_text("raise RuntimeError('not a library')")
    page = start(*shlex.split(printed), PATH="/usr/bin:/bin")
    line = page.process.stdout.readline()
    address = re.match(r"MLflow +(http://127\.0\.0\.1:\d+)(/#\S+)", line)
    assert address, line
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    page_of_it = f"/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}?"
    assert address[2].startswith(page_of_it)
    with urllib.request.urlopen(address[1], timeout=30) as answer:
        assert "MLflow" in answer.read().decode()
    page.process.send_signal(signal.SIGINT)
    code, _, error = page.end()
    assert (code, error) == (130, ""), error
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
    open_client(f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(InputError, match="run 'nosuch' is not in sqlite:"):
        page_of_run(f"sqlite:///{tmp_path}/other.db", "nosuch")
    assert page_of_run(f"sqlite:///{tmp_path}/other.db", "") == "/"


def test_the_page_of_a_store_is_its_list_of_training_runs_with_scores(uri):
    run = open_run(uri, tags={ID_TAG: "abc"})
    number, tags = run.experiment.experiment_id, run.experiment.tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    view = json.loads(tags["mlflow.sharedViewState.trishul"])
    columns = json.loads(view["state"])["selectedColumns"]
    assert "metrics.`Score/accuracy`" in columns and "params.`method.name`" in columns
    query = "workflowType=machine_learning"
    assert page_of_run(uri, "") == (
        f"/#/experiments/{number}/runs?{query}&viewStateShareKey=trishul"
    )
    assert page_of_run(uri, "abc") == f"/#/experiments/{number}/runs/{run.run_id}?{query}"
    open_run(uri, "def", tags={ID_TAG: "def"}, experiment="other")
    assert page_of_run(uri, "") == f"/#/experiments?{query}"


def test_an_experiment_of_an_earlier_version_becomes_one_of_training_runs(uri):
    client = MlflowClient(uri)
    client.create_experiment("trishul")
    client.create_experiment("mine", tags={"mlflow.experimentKind": "regression"})
    for name, kind in (("trishul", "custom_model_development"), ("mine", "regression")):
        get_or_create_experiment(client, name, None)
        tags = client.get_experiment_by_name(name).tags
        assert tags["mlflow.experimentKind"] == kind and "mlflow.sharedViewState.trishul" in tags


def test_the_page_of_a_run_is_found_by_the_beginning_of_its_id_without_writing(uri, tmp_path):
    ids = {id: open_run(uri, id, tags={ID_TAG: id}).run_id for id in ("abc1", "abd2")}
    (tmp_path / "runs" / "mlflow.db.lock").unlink()
    assert ids["abc1"] in page_of_run(uri, "abc1") and ids["abd2"] in page_of_run(uri, "abd2")
    assert page_of_run(uri, "abc") == page_of_run(uri, "abc1")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mlflow.db"]
    with pytest.raises(InputError, match="run 'ab': several begin so: abc1, abd2"):
        page_of_run(uri, "ab")
