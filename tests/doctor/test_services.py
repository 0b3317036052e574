import http.server
import os
import socket
import sqlite3
import threading

import pytest

from trishul_ray.doctor import services
from trishul_ray.doctor.services import why_not_writable


@pytest.fixture
def server():
    """Address of a web server that answers 200, and 503 below ``/broken``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503 if self.path.startswith("/broken") else 200)
            self.end_headers()

        def log_message(self, *args):
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent():
    """Address of a port that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_ray_address(monkeypatch, server, silent):
    monkeypatch.setenv("RAY_ADDRESS", server)
    assert services.check_ray_address().status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", f"ray://{server}")
    assert services.check_ray_address().status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", silent)
    assert services.check_ray_address().status == "fail"
    for wrong in ("host:port", "ray://", ":6379"):
        monkeypatch.setenv("RAY_ADDRESS", wrong)
        check = services.check_ray_address()
        assert check.status == "fail" and "is not an address" in check.detail, wrong


def test_ray_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert services.check_ray_token().status == "ok"
    (tmp_path / ".ray").write_text("a file where the folder should be")
    check = services.check_ray_token()
    assert check.status == "fail" and "RAY_AUTH_MODE=disabled" in check.hint
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    check = services.check_ray_token()
    assert check.status == "ok" and "s3cret" not in check.detail
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    assert services.check_ray_token().status == "fail"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert services.check_ray_token().status == "ok"


def test_folder(tmp_path):
    assert services.check_folder("runs folder", str(tmp_path / "a" / "b")).status == "ok"
    assert services.check_folder("runs folder", f"file://{tmp_path}").status == "ok"
    (tmp_path / "file").write_text("")
    check = services.check_folder("runs folder", str(tmp_path / "file" / "runs"))
    assert check.status == "fail" and "cannot be written" in check.detail
    check = services.check_folder("runs folder", "nosuch://user:pw@bucket/runs")
    assert check.status == "fail" and "user:pw" not in check.detail


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder that refuses even root")
def test_writability_is_tested_by_writing():
    assert "/proc cannot be written" in why_not_writable(services.Path("/proc/runs"))


def test_mlflow_store(tmp_path, server, silent):
    file = tmp_path / "mlflow.db"
    uri = f"sqlite:///{file}"
    assert services.check_mlflow_store(uri, "runs").detail.endswith("will be created")
    with sqlite3.connect(file) as database:
        database.execute("create table runs (id)")
        database.execute("insert into runs values (1)")
    database.close()
    assert services.check_mlflow_store(uri, "runs").detail.endswith("1 runs")
    file.write_bytes(b"not a database at all, just some bytes that are long enough to see")
    check = services.check_mlflow_store(uri, "runs")
    assert check.status == "fail" and "not a database" in check.detail
    assert services.check_mlflow_store(f"http://{server}", "runs").status == "ok"
    assert services.check_mlflow_store(f"http://{server}/broken", "runs").status == "fail"
    assert services.check_mlflow_store(f"http://{silent}", "runs").status == "fail"
    assert services.check_mlflow_store(None, "s3://bucket/runs").status == "fail"
    assert services.check_mlflow_store("mlruns", "runs").status == "fail"


def test_mirror(tmp_path):
    assert services.check_mirror(None).status == "ok"
    assert services.check_mirror(tmp_path / "absent").status == "fail"
    assert services.check_mirror(tmp_path).status == "warn"
    (tmp_path / "uoft-cs" / "cifar100").mkdir(parents=True)
    assert "uoft-cs/cifar100" in services.check_mirror(tmp_path).detail


def test_hub(monkeypatch, server, silent):
    assert "HF_HUB_OFFLINE" in services.check_hub().detail
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"http://{server}")
    assert services.check_hub().status == "ok"
    monkeypatch.setenv("HF_ENDPOINT", f"http://{silent}")
    assert services.check_hub().status == "warn"
