"""The checks of ``trishul doctor``, and ``trishul doctor --clean``."""

import http.server
import io
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
from rich.console import Console

from trishul_ray.cli import doctor
from trishul_ray.cli.doctor import Check
from trishul_ray.data.passed_rows import store_rows
from trishul_ray.storage import durable as files
from trishul_ray.storage.durable import KEPT_SECONDS, complete_file, scratch_folder


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Remove the caller's settings, and keep the checks off the hub."""
    for name in list(os.environ):
        if name.startswith(("RAY_", "TRISHUL_", "HF_")) or name.endswith("_NUM_THREADS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_diagnose_makes_every_check_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path / "cache"))
    checks = doctor.diagnose(runs=str(tmp_path / "runs"))
    assert [check.name for check in checks] == [
        "python", "packages", "devices", "cpus", "memory", "ray", "ray cluster", "ray token",
        "runs folder", "cache folder", "mlflow store", "mirror", "hub",
    ]  # fmt: skip
    assert not [check for check in checks if check.status == "fail"]
    assert all(check.hint for check in checks if check.status != "ok")
    assert not any("\n" in check.detail + check.hint for check in checks)
    assert list(tmp_path.iterdir()) == []


def test_the_command_exits_with_1_if_a_check_fails(called, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, error = called("doctor", "--runs", tmp_path / "file" / "runs")
    assert code == 1 and error == ""
    assert "cannot be written" in out and "a run would fail here" in out


def test_render_shows_detail_and_hint():
    console = Console(file=io.StringIO(), width=60)
    doctor.render(
        [Check("disk", "ok", "x [red] y"), Check("ray", "fail", "gone", "do this")], console
    )
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "ok    disk  x [red] y"
    assert lines[1] == "fail  ray   gone"
    assert lines[2].strip() == "do this"
    assert lines[3].startswith("1 of 2 checks failed")


def test_packages_names_missing_and_out_of_range_versions(monkeypatch):
    needs = [doctor.Requirement(text) for text in ("no-such-package>=1", "numpy<1", "rich")]
    monkeypatch.setattr(doctor, "_required", lambda: iter(needs))
    check = doctor.check_packages()
    assert check.status == "fail"
    assert "missing: no-such-package" in check.detail
    assert "numpy" in check.detail and "(needs <1)" in check.detail and "rich" not in check.detail


def test_packages_warns_of_untested_versions(monkeypatch):
    monkeypatch.setattr(doctor, "_tested_versions", lambda: {"numpy": "2.0.0"})
    monkeypatch.setattr(doctor, "_required", lambda: iter([doctor.Requirement("numpy")]))
    check = doctor.check_packages()
    assert check.status == "warn" and "(tested 2.0.0)" in check.detail


def test_constraints_pin_every_required_package():
    pins = doctor._tested_versions()
    required = list(doctor._required())
    assert len(required) > 10
    for need in required:
        assert need.specifier.contains(pins[need.name.lower()]), need


@pytest.mark.parametrize("value", ["0", "many", "100000"])
def test_cpus_warns_of_thread_settings_that_do_not_fit(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    check = doctor.check_cpus()
    assert check.status == "warn" and f"OMP_NUM_THREADS={value}" in check.detail


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
    assert doctor.check_ray_address().status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", f"ray://{server}")
    assert doctor.check_ray_address().status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", silent)
    assert doctor.check_ray_address().status == "fail"
    for wrong in ("host:port", "ray://", ":6379"):
        monkeypatch.setenv("RAY_ADDRESS", wrong)
        check = doctor.check_ray_address()
        assert check.status == "fail" and "is not an address" in check.detail, wrong


def test_ray_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.check_ray_token().status == "ok"
    (tmp_path / ".ray").write_text("a file where the folder should be")
    assert doctor.check_ray_token().status == "ok"  # nothing is written there, unless it is asked
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check = doctor.check_ray_token()
    assert check.status == "fail" and "RAY_AUTH_MODE=disabled" in check.hint
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    check = doctor.check_ray_token()
    assert check.status == "ok" and "s3cret" not in check.detail
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    assert doctor.check_ray_token().status == "fail"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert doctor.check_ray_token().status == "ok"


def test_folder(tmp_path):
    assert doctor.check_folder("runs folder", str(tmp_path / "a" / "b")).status == "ok"
    assert doctor.check_folder("runs folder", f"file://{tmp_path}").status == "ok"
    (tmp_path / "file").write_text("")
    check = doctor.check_folder("runs folder", str(tmp_path / "file" / "runs"))
    assert check.status == "fail" and "cannot be written" in check.detail
    check = doctor.check_folder("runs folder", "nosuch://user:pw@bucket/runs")
    assert check.status == "fail" and "user:pw" not in check.detail


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder that refuses even root")
def test_writability_is_tested_by_writing():
    assert "/proc cannot be written" in doctor.why_not_writable(Path("/proc/runs"))


def test_mlflow_store(tmp_path, server, silent):
    file = tmp_path / "mlflow.db"
    uri = f"sqlite:///{file}"
    assert doctor.check_mlflow_store(uri, "runs").detail.endswith("will be created")
    with sqlite3.connect(file) as database:
        database.execute("create table runs (id)")
        database.execute("insert into runs values (1)")
    database.close()
    assert doctor.check_mlflow_store(uri, "runs").detail.endswith("1 runs")
    file.write_bytes(b"not a database at all, just some bytes that are long enough to see")
    check = doctor.check_mlflow_store(uri, "runs")
    assert check.status == "fail" and "not a database" in check.detail
    assert doctor.check_mlflow_store(f"http://{server}", "runs").status == "ok"
    assert doctor.check_mlflow_store(f"http://{server}/broken", "runs").status == "fail"
    assert doctor.check_mlflow_store(f"http://{silent}", "runs").status == "fail"
    assert doctor.check_mlflow_store(None, "s3://bucket/runs").status == "fail"
    assert doctor.check_mlflow_store("mlruns", "runs").status == "fail"


def test_mirror(tmp_path):
    assert doctor.check_mirror(None).status == "ok"
    assert doctor.check_mirror(tmp_path / "absent").status == "fail"
    assert doctor.check_mirror(tmp_path).status == "warn"
    (tmp_path / "uoft-cs" / "cifar100").mkdir(parents=True)
    assert "uoft-cs/cifar100" in doctor.check_mirror(tmp_path).detail


def test_hub(monkeypatch, server, silent):
    assert "HF_HUB_OFFLINE" in doctor.check_hub().detail
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"http://{server}")
    assert doctor.check_hub().status == "ok"
    monkeypatch.setenv("HF_ENDPOINT", f"http://{silent}")
    assert doctor.check_hub().status == "warn"


def test_leftovers_are_removed_and_named(called, monkeypatch, tmp_path):
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "_SHORT", ())
    monkeypatch.chdir(tmp_path)
    weights, run = tmp_path / "cache/weights", tmp_path / "runs/0123"
    failed = tmp_path / "cache/data/table-0123456789ab"
    for folder in (weights, run, failed):
        folder.mkdir(parents=True)
    (failed / "lock").touch()
    os.utime(failed / "lock", (time.time() - 2 * doctor.UNUSED_SECONDS,) * 2)
    killed = """
        import os, signal
        from pathlib import Path
        from trishul_ray.storage.durable import complete_file, complete_folder, scratch_folder
        with (
            scratch_folder("test"),
            complete_folder(Path("cache/weights/key")),
            complete_file(Path("runs/0123/result.json")),
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        """
    with scratch_folder("used") as used, complete_file(run / "used") as unfinished:
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(killed)],
            env=os.environ | {"TMPDIR": str(tmp_path)},
            check=False,
        )
        (abandoned,) = tmp_path.glob(".trishul-test.*.tmp")
        (folder,), (file,) = weights.glob(".key.*"), run.glob(".result.json.*")
        code, out, _ = called("doctor", "--clean")
        assert Path(used).is_dir() and unfinished.is_file()
    assert code == 0
    removed = [failed, folder, Path("runs/0123", file.name), abandoned]
    assert out.splitlines() == [*(f"removed {path}" for path in removed), "4 removed"]
    assert not any(path.exists() for path in [*removed, Path(used)])


def test_rows_and_weights_are_removed_a_month_after_their_last_use(called, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    monkeypatch.setattr(files, "_SHORT", ())
    passed = [{"text": "a", "label": 0}]
    old, used = store_rows(passed, cache, {}), store_rows(passed * 2, cache, {})
    (cache / "weights").mkdir()
    weights = [cache / "weights" / name for name in ("old", "used")]
    for place in (old, used, *weights):
        place.mkdir(exist_ok=True)
        if place != weights[1]:
            os.utime(place, (time.time() - 2 * KEPT_SECONDS,) * 2)
    assert store_rows(passed * 2, cache, {}) == used  # which is a use
    code, out, _ = called("doctor", "--clean")
    assert code == 0 and out.splitlines() == [
        f"removed {old}",
        f"removed {weights[0]}",
        "2 removed",
    ]
    assert used.is_dir() and weights[1].is_dir()
    # Without the command, they go when others come.
    os.utime(used, (time.time() - 2 * KEPT_SECONDS,) * 2)
    assert list(used.parent.iterdir()) == [used]
    assert store_rows(passed, cache, {}) == old
    assert list(used.parent.iterdir()) == [old]


def test_the_parts_of_the_cache_have_their_sizes(tmp_path):
    assert "MiB" not in doctor.check_cache(tmp_path / "none").detail
    (tmp_path / "data" / "digits").mkdir(parents=True)
    (tmp_path / "data" / "digits" / "train.arrow").write_bytes(bytes(3 * 2**20))
    assert doctor.check_cache(tmp_path).detail.endswith("; data 3 MiB")


def test_a_user_without_a_home_folder_is_told_what_to_set(tmp_path):
    """As in a container with any uid, or a service of systemd."""
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

    without = run("datasets", "digits")
    assert without.returncode == 2 and len(without.stderr.splitlines()) == 1
    assert "set TRISHUL_CACHE" in without.stderr
    there = run("doctor", TRISHUL_CACHE=str(tmp_path / "cache"))
    assert there.returncode == 0, there.stdout + there.stderr
