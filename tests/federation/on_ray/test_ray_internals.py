"""Every private name of Ray that is used does what it is used for, in the version that is named."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import ray
from ray._private import ray_constants, utils, worker
from ray._private.node import Node
from ray._private.thirdparty import pynvml
from ray.job_submission import JobSubmissionClient

from trishul_ray.federation.on_ray import ray_internals


@pytest.fixture(params=[f"ray-{ray.__version__}"], autouse=True)
def version():
    """Names the version in every test."""


@pytest.mark.slow
def test_an_actor_that_is_killed_is_gone(local_ray):
    @ray.remote(num_cpus=0)
    class Actor:
        def pid(self):
            return os.getpid()

    actor = Actor.remote()
    ray.get(actor.pid.remote())
    assert not ray_internals.is_gone(actor)
    ray.kill(actor)
    end = time.monotonic() + 60
    while not ray_internals.is_gone(actor):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_an_actor_without_room_for_its_restart_is_restarting_and_not_gone(local_ray):
    @ray.remote(num_cpus=2, max_restarts=1)
    class Actor:
        def pid(self):
            return os.getpid()

    actor = Actor.remote()
    process = ray.get(actor.pid.remote())
    assert not ray_internals.is_restarting(actor)
    other = Actor.remote()  # takes the room
    os.kill(process, signal.SIGKILL)
    ray.get(other.pid.remote(), timeout=60)
    end = time.monotonic() + 60
    while not ray_internals.is_restarting(actor):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert not ray_internals.is_gone(actor)
    ray.kill(other)
    ray.kill(actor)


@pytest.mark.slow
def test_nodes_and_processes_of_a_ray_of_ones_own(local_ray):
    assert ray_internals.draining_nodes() == set()
    assert ray_internals.launch_failures() == []
    assert ray_internals.started_here()
    assert {*worker._global_node.all_processes} == {"gcs_server", "raylet"}
    processes = ray_internals.own_processes()
    assert len(processes) == 2 and all(each.poll() is None for each in processes)
    session = ray_internals.session_folder()
    assert (session / "logs").is_dir()


def test_there_is_no_gpu_where_torch_finds_none():
    import torch

    assert ray_internals.has_gpu() == (torch.cuda.device_count() > 0)


@pytest.mark.parametrize(
    ("mig", "expected"), [([0, 0], [24, 48]), ([0, 1], []), (None, [24, 48]), ("no driver", [])]
)
def test_the_memory_of_gpus_is_asked_of_their_driver(monkeypatch, mig, expected):
    def mode(handle):
        if mig is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [mig[handle], mig[handle]]

    def begin():
        if mig == "no driver":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    ended = []
    answers = {
        "nvmlInit": begin,
        "nvmlShutdown": lambda: ended.append(True),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMigMode": mode,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=24 * (handle + 1)),
    }
    for name, answer in answers.items():
        assert callable(getattr(pynvml, name))
        monkeypatch.setattr(pynvml, name, answer)
    assert ray_internals.gpu_memory() == expected
    assert bool(ended) == (mig != "no driver")


def test_what_is_replaced_while_ray_starts_is_there_and_put_back():
    before = ray_constants.ENABLE_RAY_CLUSTER, worker._worker_logs_enabled
    handler = signal.getsignal(signal.SIGTERM)
    install = utils.set_sigterm_handler
    starts = Node.start_api_server, utils.get_dashboard_dependency_error
    kill = Node.kill_all_processes
    with (
        ray_internals.without_grace(before=list),
        ray_internals.without_monitors(),
        ray_internals.listening_on_localhost(),
        ray_internals.without_messages(),
        ray_internals.without_sigterm_handler(),
    ):
        assert (ray_constants.ENABLE_RAY_CLUSTER, worker._worker_logs_enabled) == (False, False)
        assert Node.kill_all_processes is not kill
        utils.set_sigterm_handler(sys.exit)
        assert signal.getsignal(signal.SIGTERM) == handler
    assert before == (ray_constants.ENABLE_RAY_CLUSTER, worker._worker_logs_enabled)
    assert utils.set_sigterm_handler is install
    assert Node.kill_all_processes is kill
    assert starts == (Node.start_api_server, utils.get_dashboard_dependency_error)


def test_a_token_is_sent_unless_a_mode_is_set(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_internals.send_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_ray_ships_what_it_is_asked_for(tmp_path):
    """Its packages are tested with `find_secrets`."""
    for name in ("a.txt", "b.log", "sub/c.txt", "sub/d.tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "sub/.gitignore").write_text("*.tmp\n.gitignore\n")
    names = {path.name for path in ray_internals.shipped_paths(tmp_path, ["*.log"])}
    assert names == {"a.txt", "sub", "c.txt"}
    assert ray_internals.matcher(["*.log", "!b.log"])("sub/a.log")
    assert not ray_internals.matcher(["*.log", "!b.log"])("b.log")


def test_a_client_of_jobs_can_ask_for_all_nodes():
    """Its answers are tested by ``trishul status`` on a real cluster."""
    assert callable(JobSubmissionClient._do_request)
