import http.server
import io
import os
import socket
import sqlite3
import threading

import pytest
from rich.console import Console

from trishul_ray.doctor import diagnose, exit_code, machine, render, services
from trishul_ray.doctor.base import PATIENCE, Check, unwritable, within


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """None of the caller's settings; the hub is not asked."""
    for name in list(os.environ):
        if name.startswith(("RAY_", "TRISHUL_", "HF_")) or name.endswith("_NUM_THREADS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def server():
    """A web server that says ok, on a port of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503 if self.path.startswith("/broken") else 200)
            self.end_headers()

        def log_message(self, *args):
            """Keep quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent():
    """A port that nobody listens to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_every_check_is_made_and_nothing_is_left_behind(tmp_path):
    checks = diagnose(runs=str(tmp_path / "runs"), cache=str(tmp_path / "cache"))
    assert [check.name for check in checks] == [
        "python", "packages", "devices", "cpus", "memory", "ray", "ray cluster", "ray token",
        "runs folder", "cache folder", "mlflow store", "mirror", "hub",
    ]  # fmt: skip
    assert {check.name for check in checks if check.status == "fail"} <= {"ray token"}
    assert all(check.hint for check in checks if check.status != "ok")
    assert not any("\n" in check.detail + check.hint for check in checks)
    assert list(tmp_path.iterdir()) == []


def test_exit_code():
    ok, warn, fail = (Check("a", status, "b") for status in ("ok", "warn", "fail"))
    assert exit_code([ok, warn]) == 0
    assert exit_code([ok, fail, warn]) == 1


def test_render_shows_detail_and_cure():
    console = Console(file=io.StringIO(), width=60)
    render([Check("disk", "ok", "x [red] y"), Check("ray", "fail", "gone", "do this")], console)
    shown = console.file.getvalue().splitlines()
    assert shown[0] == "ok    disk  x [red] y"
    assert shown[1] == "fail  ray   gone"
    assert shown[2].strip() == "do this"
    assert shown[3].startswith("1 of 2 checks failed")


def test_packages_name_what_is_missing_and_what_is_out_of_range(monkeypatch):
    needs = [machine.Requirement(text) for text in ("no-such-package>=1", "numpy<1", "rich")]
    monkeypatch.setattr(machine, "_required", lambda: iter(needs))
    check = machine.packages()
    assert check.status == "fail"
    assert "missing: no-such-package" in check.detail
    assert "numpy" in check.detail and "(needs <1)" in check.detail and "rich" not in check.detail


def test_packages_warn_of_versions_that_were_not_tested(monkeypatch):
    monkeypatch.setattr(machine, "_tested_versions", lambda: {"numpy": "2.0.0"})
    monkeypatch.setattr(machine, "_required", lambda: iter([machine.Requirement("numpy")]))
    check = machine.packages()
    assert check.status == "warn" and "(tested 2.0.0)" in check.detail


def test_constraints_pin_every_required_package():
    pins = machine._tested_versions()
    required = list(machine._required())
    assert len(required) > 10
    for need in required:
        assert need.specifier.contains(pins[need.name.lower()]), need


@pytest.mark.parametrize("value", ["0", "many", "100000"])
def test_threads_that_do_not_fit(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    check = machine.cpus()
    assert check.status == "warn" and f"OMP_NUM_THREADS={value}" in check.detail


def test_ray_address(monkeypatch, server, silent):
    monkeypatch.setenv("RAY_ADDRESS", server)
    assert services.ray_address().status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", f"ray://{server}")
    assert services.ray_address().status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", silent)
    assert services.ray_address().status == "fail"
    for wrong in ("host:port", "ray://", ":6379"):
        monkeypatch.setenv("RAY_ADDRESS", wrong)
        check = services.ray_address()
        assert check.status == "fail" and "is no address" in check.detail, wrong


def test_ray_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert services.ray_token().status == "ok"
    (tmp_path / ".ray").write_text("a file where the folder should be")
    check = services.ray_token()
    assert check.status == "fail" and "RAY_AUTH_MODE=disabled" in check.hint
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    check = services.ray_token()
    assert check.status == "ok" and "s3cret" not in check.detail
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    assert services.ray_token().status == "fail"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert services.ray_token().status == "ok"


def test_folder(tmp_path):
    assert services.folder("runs folder", str(tmp_path / "a" / "b")).status == "ok"
    assert services.folder("runs folder", f"file://{tmp_path}").status == "ok"
    (tmp_path / "file").write_text("")
    check = services.folder("runs folder", str(tmp_path / "file" / "runs"))
    assert check.status == "fail" and "cannot be written" in check.detail
    check = services.folder("runs folder", "nosuch://user:pw@bucket/runs")
    assert check.status == "fail" and "user:pw" not in check.detail


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder that refuses even root")
def test_a_folder_that_refuses_is_found_by_writing():
    assert "/proc cannot be written" in unwritable(services.Path("/proc/runs"))


def test_mlflow_store(tmp_path, server, silent):
    file = tmp_path / "mlflow.db"
    uri = f"sqlite:///{file}"
    assert services.mlflow_store(uri, "runs").detail.endswith("will be created")
    with sqlite3.connect(file) as database:
        database.execute("create table runs (id)")
        database.execute("insert into runs values (1)")
    database.close()
    assert services.mlflow_store(uri, "runs").detail.endswith("1 runs")
    file.write_bytes(b"not a database at all, just some bytes that are long enough to see")
    check = services.mlflow_store(uri, "runs")
    assert check.status == "fail" and "not a database" in check.detail
    assert services.mlflow_store(f"http://{server}", "runs").status == "ok"
    assert services.mlflow_store(f"http://{server}/broken", "runs").status == "fail"
    assert services.mlflow_store(f"http://{silent}", "runs").status == "fail"
    assert services.mlflow_store(None, "s3://bucket/runs").status == "fail"
    assert services.mlflow_store("mlruns", "runs").status == "fail"


def test_mirror(tmp_path):
    assert services.mirror(None).status == "ok"
    assert services.mirror(str(tmp_path / "absent")).status == "fail"
    assert services.mirror(str(tmp_path)).status == "warn"
    (tmp_path / "uoft-cs" / "cifar100").mkdir(parents=True)
    assert "uoft-cs/cifar100" in services.mirror(str(tmp_path)).detail


def test_hub(monkeypatch, server, silent):
    assert "HF_HUB_OFFLINE" in services.hub_reach().detail
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"http://{server}")
    assert services.hub_reach().status == "ok"
    monkeypatch.setenv("HF_ENDPOINT", f"http://{silent}")
    assert services.hub_reach().status == "warn"


def test_what_hangs_is_given_up():
    never = threading.Event()
    assert within(never.wait) == f"no answer within {PATIENCE:g} s"
    never.set()
    assert within(lambda: None) == ""
