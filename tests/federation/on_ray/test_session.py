"""A local Ray serves this machine and this process only, and leaves nothing behind for long."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from trishul_ray.errors import RunError
from trishul_ray.federation.on_ray.session import (
    QUIET_SECONDS,
    mark_session,
    ray_session,
    remove_old_sessions,
)


@ray.remote(num_cpus=1)
class Worker:
    def pid(self):
        return os.getpid()


@pytest.mark.slow
def test_a_local_ray_listens_on_localhost_keeps_home_clean_and_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    me = psutil.Process()
    earlier = set(me.children(recursive=True))
    with ray_session(1) as free:
        assert free["CPU"] == 1.0
        worker = Worker.remote()
        assert ray.get(worker.pid.remote()) != me.pid
        mine = [me, *(set(me.children(recursive=True)) - earlier)]
        addresses = set()
        for process in mine:
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has only started another
                addresses |= {
                    socket.laddr.ip.removeprefix("::ffff:")
                    for socket in process.net_connections("inet")
                    if socket.status == psutil.CONN_LISTEN
                }
        assert addresses == {"127.0.0.1"}
        while "CPU" in ray.available_resources():  # until Ray's list of nodes knows
            time.sleep(0.05)
        with ray_session(7) as inner:  # the existing runtime is used as it is
            assert inner.keys() == free.keys()
            assert inner["CPU"] == 0.0  # the worker has it
        assert ray.is_initialized()
    assert not ray.is_initialized()
    assert not (Path(tmp_path) / ".ray").exists()
    tokens = [name for name in os.environ if name.startswith("RAY_AUTH") and name not in before]
    assert tokens == []
    assert psutil.wait_procs(mine[1:], timeout=10)[1] == []


def test_a_cluster_that_does_not_answer_is_reported_in_one_line(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(RunError, match=r"cannot join the cluster at RAY_ADDRESS=127\.0\.0\.1:1: ."),
        ray_session(),
    ):
        pass


@pytest.mark.slow
def test_a_ray_that_starts_too_slowly_is_started_again(monkeypatch):
    init, left = ray.init, []

    def slow(**options):
        if not left:
            left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))
            raise Exception("The current node timed out during startup.\nMore.")
        return init(**options)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", slow)
    with ray_session(1) as free:
        assert free["CPU"] == 1
        assert left[0].wait(10) == -signal.SIGKILL  # a process of the first start


def test_a_ray_that_does_not_start_is_reported_in_one_line(monkeypatch):
    def starved(**_):
        # Ray raises this on a busy machine if its processes do not start within 30 seconds.
        raise Exception("The current node timed out during startup.\nMore.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", starved)
    with (
        pytest.raises(RunError, match=r"^cannot start a local Ray: .* timed out during startup$"),
        ray_session(),
    ):
        pass


@pytest.fixture
def session(tmp_path):
    """``session(name, age)`` -> a session's folder, last written to ``age`` seconds ago."""

    def make(name, age, marked=True):
        folder = tmp_path / f"session_{name}"
        (folder / "logs").mkdir(parents=True)
        (folder / "logs/raylet.out").write_text("x")
        if marked:
            mark_session(folder)
        for file in (folder / "logs/raylet.out", folder):
            os.utime(file, (time.time() - age, time.time() - age))
        return folder

    return make


def test_only_old_unused_sessions_of_ours_are_removed(session, tmp_path):
    old = session("old", QUIET_SECONDS + 60)
    kept = [session("new", 60.0), session("foreign", QUIET_SECONDS + 60, marked=False)]
    used = session("used", QUIET_SECONDS + 60)
    command = [sys.executable, "-c", "input()", f"--session={used}/sockets"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert remove_old_sessions(tmp_path) == [old]
    finally:
        process.communicate(b"\n")
    assert set(tmp_path.iterdir()) == {*kept, used}
    assert remove_old_sessions(tmp_path) == [used]
