import subprocess
import sys
import textwrap
import time

import pytest

from trishul_ray.errors import InputError
from trishul_ray.redaction import is_secret_name, redact
from trishul_ray.tracking.store import (
    get_or_create_experiment,
    open_client,
    sqlite_file,
    store_lock,
    tracking_uri,
)


def test_the_default_store_is_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tracking_uri(None, "runs") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert tracking_uri(None, f"file://{tmp_path}/r") == f"sqlite:///{tmp_path}/r/mlflow.db"


def test_a_bare_database_path_is_sqlite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tracking_uri("my.db", "runs") == f"sqlite:///{tmp_path}/my.db"
    assert tracking_uri("http://host:5000", "s3://b/runs") == "http://host:5000"


@pytest.mark.parametrize(
    ("uri", "runs", "message"),
    [
        (None, "s3://bucket/runs", "storage.runs='s3://bucket/runs' is remote"),
        ("mlruns", "runs", "no longer writes folders of files"),
        ("file:///tmp/mlruns", "runs", "no longer writes folders of files"),
        ("sqlite://", "runs", "name a file"),
        ("sqlite:///:memory:", "runs", "name a file"),
    ],
)
def test_a_wrong_store_is_refused_in_one_line(uri, runs, message):
    with pytest.raises(InputError) as caught:
        tracking_uri(uri, runs)
    assert message in str(caught.value)
    assert "tracking.uri" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sqlite_file(tmp_path):
    assert sqlite_file(f"sqlite:///{tmp_path}/a.db") == tmp_path / "a.db"
    assert sqlite_file(f"sqlite:///{tmp_path}/a.db?timeout=3") == tmp_path / "a.db"
    assert sqlite_file("http://host") is None
    assert sqlite_file("sqlite:///:memory:") is None


def test_a_file_that_is_no_database_is_named(tmp_path):
    file = tmp_path / "mlflow.db"
    file.write_bytes(b"this is not a database, and long enough not to be taken for an empty one")
    with pytest.raises(InputError, match=r"mlflow\.db.*does not answer: .*not a database"):
        open_client(f"sqlite:///{file}")


KILLED = """
    import sys
    from trishul_ray.tracking.store import open_client
    open_client(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [100_000, 400_000, 600_000])
def test_a_store_whose_creation_was_killed_is_created_again(tmp_path, size):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), uri])
    new = tmp_path / ".mlflow.db.new"
    while process.poll() is None and not (new.exists() and new.stat().st_size >= size):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    assert open_client(uri).search_experiments()[0].name == "Default"
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_an_unreachable_server_is_named(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(InputError, match=r"127\.0\.0\.1:9.*does not answer") as caught:
        open_client("http://user:hunter2@127.0.0.1:9")
    assert "hunter2" not in str(caught.value)


def test_a_deleted_experiment_is_named(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = open_client(uri)
    client.delete_experiment(get_or_create_experiment(client, "gone", None))
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


@pytest.mark.parametrize(
    "key",
    ["token", "hub.token", "HF_TOKEN", "aws-secret-access-key", "storage.api_key", "db.password"],
)
def test_secret_names(key):
    assert is_secret_name(key)


@pytest.mark.parametrize(
    "key",
    [
        "tokenizer",
        "data.max_tokens",
        "method.lam",
        "adapter.targets",
        "keyword",
        "evaluation.top_k",
    ],
)
def test_ordinary_names(key):
    assert not is_secret_name(key)
