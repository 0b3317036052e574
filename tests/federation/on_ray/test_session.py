"""A local Ray serves only this machine and this process, and leaves nothing behind for long."""

import errno
import os
import secrets
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
from commands import HEAR_SIGNALS

from trishul_ray.errors import InputError, RunError
from trishul_ray.federation.on_ray.session import ray_session
from trishul_ray.storage import durable as files


@ray.remote(num_cpus=1)
class Worker:
    def pid(self):
        return os.getpid()


def ask_for_nodes(environment, home):
    """Return the number of nodes that another process sees in this Ray, or its error."""
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
def test_local_ray_requires_token_and_keeps_home_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    me = psutil.Process()
    earlier = set(me.children(recursive=True))
    with ray_session(1) as free:
        assert free["CPU"] == 1.0
        worker = Worker.remote()
        assert ray.get(worker.pid.remote()) != me.pid
        mine = set(me.children(recursive=True)) - earlier
        for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}):
            assert "InvalidAuthToken" in ask_for_nodes(token, tmp_path)
        assert ask_for_nodes(dict(os.environ), tmp_path) == "1"
        with ray_session(7):  # The existing Ray stays.
            assert ray.cluster_resources()["CPU"] == 1.0
        assert ray.is_initialized()
    assert not ray.is_initialized()
    assert not (Path(tmp_path) / ".ray").exists()
    assert psutil.wait_procs(mine, timeout=10)[1] == []


def test_unreachable_cluster_is_reported_in_one_line(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    message = r"cannot join the cluster at RAY_ADDRESS=127\.0\.0\.1:1: .*; unset RAY_ADDRESS to run"
    with pytest.raises(RunError, match=message), ray_session():
        pass


def test_failed_start_is_reported_in_one_line(monkeypatch):
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


def test_missing_loopback_is_reported_at_once(monkeypatch):
    def unavailable(*_):
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("socket.create_server", unavailable)
    message = r"127\.0\.0\.1 cannot be used .*; set resources\.backend=inline"
    with pytest.raises(InputError, match=message), ray_session():
        pass


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Ray's start is watched on Linux")
@pytest.mark.parametrize("threads", ["1", "2"])  # A native thread may receive the signal.
@pytest.mark.parametrize(("again", "stuck"), [(True, 100), (False, 2)])
def test_a_stuck_start_ends_after_a_signal(threads, again, stuck):
    code = f"""
    import ctypes, ray
    from trishul_ray.federation.on_ray import session
    session.STUCK_SECONDS = {stuck}

    def stuck(**_):
        print("starting", flush=True)
        ctypes.CDLL(None).sleep(60)

    ray.init = stuck
    with session.ray_session(1):
        pass
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    words = [*HEAR_SIGNALS, sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(
        words, env={**environment, "OMP_NUM_THREADS": threads}, stdout=subprocess.PIPE
    ) as start:
        assert start.stdout.readline() == b"starting\n"
        for _ in range(2):
            start.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert start.poll() is None
        if again:
            start.send_signal(signal.SIGINT)
        assert start.wait(20) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_local_ray_folder_is_private_and_removed(monkeypatch, tmp_path):
    """Also test a TMPDIR that is too long for a socket; after an error the logs are kept."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    short = Path("/tmp", secrets.token_hex(2)[1:])  # the path of a socket has few bytes left
    monkeypatch.setattr(files, "_SHORT", (str(short),))
    short.mkdir()
    try:
        with ray_session(1):
            (folder,) = short.iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700
            assert list(folder.glob("r/session_*/sockets/*"))
        assert not folder.exists()
        with pytest.raises(RunError), ray_session(1):
            raise RunError("its logs are kept")
        (folder,) = short.iterdir()
        assert list(folder.glob("r/session_*/logs/raylet.*"))
    finally:
        shutil.rmtree(short)


def test_missing_short_temporary_folder_names_the_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(files, "_SHORT", ())
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 60}")
    message = r"at most 8 bytes; set RAY_TMPDIR"
    with pytest.raises(RunError, match=message), ray_session(1):
        pass


@pytest.mark.slow
def test_local_ray_has_cpus_of_this_process():
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
