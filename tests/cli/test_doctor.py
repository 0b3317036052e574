"""The checks of ``trishul doctor``, and ``trishul doctor --clean``."""

import http.server
import importlib.metadata
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from trishul_ray.cli import doctor
from trishul_ray.storage import durable as files
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.storage.integrity import KEPT_SECONDS, make_once


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Remove the caller's settings, and keep the checks off the hub."""
    for name in list(os.environ):
        if name.startswith(("RAY_", "TRISHUL_", "HF_")) or name.endswith("_NUM_THREADS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_check_is_made_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path / "cache"))
    checks = doctor.diagnose(runs=str(tmp_path / "runs"))
    assert [check.name for check in checks] == [
        "versions", "devices", "ray", "runs", "cache", "mlflow", "hub"
    ]  # fmt: skip
    assert not [check for check in checks if check.status == "fail"]
    assert not any("\n" in check.detail for check in checks)
    assert list(tmp_path.iterdir()) == []


def test_failed_check_gives_exit_code_one(called, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, error = called("doctor", "--runs", tmp_path / "file" / "runs")
    assert code == 1 and error == ""
    assert "cannot be written" in out and "a run would fail here: runs" in out


def test_missing_and_outdated_packages_are_named(monkeypatch):
    required = ["torch>=999", "not-a-package>=1", "lm-eval>1; extra == 'eval'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: required)
    status, detail = doctor.result_of(doctor.check_packages)
    assert status == "fail" and "not-a-package is missing" in detail
    assert "is not >=999" in detail and "lm-eval" not in detail


def test_constraints_pin_every_required_package():
    text = (Path(__file__).parents[2] / "constraints.txt").read_text()
    pins = {line.partition("==")[0].strip().lower() for line in text.splitlines() if "==" in line}
    required = map(Requirement, importlib.metadata.requires("trishul-ray"))
    names = {r.name for r in required if not r.marker or r.marker.evaluate({"extra": ""})}
    assert {name.lower() for name in names} <= pins


@pytest.fixture
def server():
    """Return the address of a web server that responds with 200, and 503 below ``/broken``."""

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
    """Return the address of a port that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_stores_and_hub_must_respond(tmp_path, server, silent, monkeypatch):
    def mlflow(runs):
        return doctor.result_of(lambda: doctor.check_mlflow(str(runs)))

    def hub(mirror):
        return doctor.result_of(lambda: doctor.check_hub(mirror))

    assert mlflow(tmp_path)[1].endswith("which the first run creates")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("create table runs (id text)")
    assert mlflow(tmp_path)[1].endswith("mlflow.db, 0 runs")
    (tmp_path / "mlflow.db").write_text("no database" * 99)
    assert mlflow(tmp_path)[0] == mlflow("s3://bucket/runs")[0] == "fail"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for address, responds in ((server, True), (f"{server}/broken", False), (silent, False)):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}")
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        assert mlflow("runs")[0] == ("ok" if responds else "fail")
        assert hub(None)[0] == ("ok" if responds else "warn")
    assert hub(tmp_path)[0] == "fail"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert hub(tmp_path)[1].endswith(", 1 repositories")


def test_old_leftovers_are_removed(called, monkeypatch, tmp_path):
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "_SHORT", ())
    monkeypatch.chdir(tmp_path)
    old = [
        make_once(tmp_path / "cache", "data/raw/table-0123456789ab", Path.touch),
        tmp_path / "cache/weights/.key.01234567.tmp",
        Path("runs/0123/.result.json.01234567.tmp"),
        tmp_path / ".trishul-test.abcdefgh.tmp",
    ]
    new = [path.with_name(path.name.replace("a", "b").replace("0", "1")) for path in old[1:]]
    for path in (*old[1:], *new):
        path.mkdir(parents=True)
    for path in old:
        os.utime(path, (time.time() - 2 * KEPT_SECONDS,) * 2)
    with scratch_folder("used") as used:
        os.utime(used, (0, 0))
        code, out, _ = called("doctor", "--clean")
        assert Path(used).is_dir()
    assert code == 0
    assert out.splitlines() == [*(f"removed {path}" for path in old), "4 removed"]
    assert not any(path.exists() for path in old) and all(path.exists() for path in new)


def test_user_without_a_home_gets_the_variable(tmp_path):
    """Test a user like in a container with any uid, or in a service of systemd."""
    code = """
    import pwd, sys
    def unknown(uid):
        raise KeyError(uid)
    pwd.getpwuid = unknown
    from trishul_ray.cli import main
    main()
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "TRISHUL_CACHE")}

    def run(*command, **more):
        words = [sys.executable, "-c", textwrap.dedent(code), *command]
        options = {"cwd": tmp_path, "capture_output": True, "text": True}
        return subprocess.run(words, env=environment | more, **options)

    without = run("list", "datasets", "digits")
    assert without.returncode == 2 and len(without.stderr.splitlines()) == 1
    assert "set TRISHUL_CACHE" in without.stderr
    there = run("doctor", TRISHUL_CACHE=str(tmp_path / "cache"))
    assert there.returncode == 0, there.stdout + there.stderr
