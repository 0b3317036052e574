"""A local Ray serves this machine and this process only, and leaves nothing behind for long."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import ray

from trishul_ray.errors import RunError
from trishul_ray.federation.on_ray.ray_internals import session_folder
from trishul_ray.federation.on_ray.session import ray_session
from trishul_ray.storage import durable as files


@ray.remote(num_cpus=1)
class Worker:
    def pid(self):
        return os.getpid()


def ask_for_nodes(environment, home):
    """Return how many nodes another process sees in this one's Ray, or the error that it gets."""
    code = """
        import sys
        from ray._raylet import GcsClient
        try:
            print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=60)))
        except Exception as error:
            print(error)
    """
    words = [sys.executable, "-c", textwrap.dedent(code), ray.get_runtime_context().gcs_address]
    answer = subprocess.run(
        words, env={**environment, "HOME": str(home)}, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


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
        for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}):
            assert "InvalidAuthToken" in ask_for_nodes(token, tmp_path)
        assert ask_for_nodes(dict(os.environ), tmp_path) == "1"
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
        pytest.raises(
            RunError, match=r"^cannot start a local Ray: .* timed out during startup; its logs: /"
        ),
        ray_session(),
    ):
        pass


@pytest.mark.slow
def test_a_local_ray_is_in_a_folder_of_its_user_alone(monkeypatch, tmp_path):
    """Also where the path of TMPDIR is too long for a socket; the folder goes with Ray."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long = tmp_path / ("x" * (113 - len(str(tmp_path)) - 1))
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with ray_session(1):
        session = session_folder()
        folder = session.parents[1]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.parent == Path("/tmp") and folder.name.startswith(".trishul-ray.")
        assert list(session.glob("sockets/*"))
    assert not folder.exists()
    with pytest.raises(RunError), ray_session(1):
        session = session_folder()
        raise RunError("its logs are kept")
    assert list(session.glob("logs/raylet.*"))
    shutil.rmtree(session.parents[1])


def test_without_a_short_temporary_folder_the_variable_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(files, "_SHORT", ())
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 60}")
    message = r"at most 8 bytes, and none of /.*/absent, /tmp/x+ is one: set RAY_TMPDIR"
    with pytest.raises(RunError, match=message), ray_session(1):
        pass


@pytest.mark.slow
def test_a_local_ray_has_the_cpus_that_this_process_may_use():
    code = """
    import os
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from trishul_ray.federation.on_ray.session import ray_session
    from trishul_ray.runs.results import hardware
    with ray_session() as free:
        print(free["CPU"], hardware().cpus)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert run.stdout.split() == ["1.0", "1"], run.stderr


def test_a_proc_that_hides_processes_is_named(monkeypatch):
    """As Ray raises it where /proc is mounted with hidepid=1."""

    def hidden(**_):
        raise psutil.AccessDenied(pid=1)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", hidden)
    message = r"\(pid=1\); with a /proc .* hidepid=1, use resources.backend=inline"
    with pytest.raises(RunError, match=message), ray_session(1):
        pass
