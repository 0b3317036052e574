"""Workers are forks of a process that has imported PyTorch, or start without it."""

import json
import os
import shlex
import subprocess
import sys

import psutil
import pytest
import ray

from trishul_ray.federation.on_ray import fork_server as module
from trishul_ray.federation.on_ray.fork_server import ForkServer

#: A worker's script, which reports its process and its input.
SCRIPT = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "arguments": sys.argv[1:],
    "directory": os.getcwd(), "environment": dict(os.environ), "name": __name__,
    "torch": "torch" in sys.modules, "ray": "ray" in sys.modules,
}))
print("an error line", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def worker(tmp_path):
    """``worker(server, "argument")`` returns the report of a worker started by this server."""
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)

    def start(server, *arguments):
        ended = subprocess.run(
            [*shlex.split(server.py_executable), str(script), *arguments],
            env={"GIVEN": "ä", "RAY_RAYLET_PID": str(os.getpid())},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.stderr == "an error line\n"
        return json.loads(ended.stdout)

    return start


@pytest.mark.slow
def test_forked_worker_has_separate_arguments_and_environment(fork_server, worker, tmp_path):
    first, second = worker(fork_server, "a b", "--flag"), worker(fork_server)
    assert first["parent"] == second["parent"] == fork_server.pid
    assert first["pid"] != second["pid"]
    assert first["group"] == first["pid"], "Ray ends the whole process group of a worker"
    assert first["arguments"] == ["a b", "--flag"] and second["arguments"] == []
    assert first["directory"] == str(tmp_path) and first["name"] == "__main__"
    assert first["environment"]["GIVEN"] == "ä" and "HOME" not in first["environment"]
    assert first["torch"] and not first["ray"]


def test_another_user_is_given_no_worker(fork_server, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with module.socket.socket(module.socket.AF_UNIX) as connection:
        connection.connect(f"\0{shlex.split(fork_server.py_executable)[-1]}")
        assert not module._same_user(connection)


def test_a_worker_ends_with_its_raylet(fork_server, tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, time; print(os.getpid(), flush=True); time.sleep(90); print('it outlived')"
    )
    raylet = subprocess.Popen(["sleep", "120"])
    words = [*shlex.split(fork_server.py_executable), str(script)]
    environment = os.environ | {"RAY_RAYLET_PID": str(raylet.pid)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as started:
        worker = psutil.Process(int(started.stdout.readline()))
        assert worker.ppid() == fork_server.pid
        raylet.kill()
        raylet.wait()
        assert b"outlived" not in started.stdout.read()  # until the worker has closed it


@pytest.mark.parametrize("lives", [True, False])
def test_worker_without_fork_server_starts_with_live_raylet(tmp_path, lives):
    with ForkServer() as ended:
        pass
    assert not psutil.pid_exists(ended.pid)
    script = tmp_path / "prints.py"
    script.write_text("print('a worker')")
    raylet = os.getpid() if lives else 2**22 + 1
    words = [*shlex.split(ended.py_executable), str(script)]
    environment = os.environ | {"RAY_RAYLET_PID": str(raylet)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ("a worker\n" if lives else "")


def test_hanging_worker_ends_after_python_finishes(fork_server, tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import ctypes; library = ctypes.CDLL(None); library.__cxa_atexit(library.pause, 0, 0)\n"
        "print('the last line', flush=True)"
    )
    words = [*shlex.split(fork_server.py_executable), str(script)]
    environment = os.environ | {"RAY_RAYLET_PID": str(os.getpid())}
    ended = subprocess.run(words, env=environment, capture_output=True, timeout=60)
    assert ended.stdout == b"the last line\n"


def test_server_ends_with_its_parent():
    code = (
        "import sys, time; from trishul_ray.federation.on_ray.fork_server import *\n"
        "server = ForkServer(); print(server.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = psutil.Process(int(process.stdout.readline()))
    assert server.is_running()
    process.kill()
    process.communicate()
    gone, _ = psutil.wait_procs([server], timeout=60)  # It checks after its imports.
    assert gone


def test_actors_of_a_local_ray_are_forks(local_ray, fork_server):
    @ray.remote(num_cpus=1)
    class Actor:
        def parent(self):
            return os.getppid(), "torch" in sys.modules

    actor = Actor.remote()
    assert ray.get(actor.parent.remote()) == (fork_server.pid, True)
    ray.kill(actor)
