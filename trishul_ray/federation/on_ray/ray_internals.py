"""Uses of Ray beyond its public interface, each with its reason.

tests/federation/on_ray/test_ray_internals.py calls every function on a real Ray and fails, with its
version, where a name is gone.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, utils, worker
from ray._private.accelerators import get_all_accelerator_managers
from ray._private.node import Node
from ray._private.runtime_env import packaging
from ray._private.state import state
from ray._private.thirdparty import pynvml
from ray._private.thirdparty.pathspec.pathspec import PathSpec

from trishul_ray.storage.durable import Json

_MONITORS = ("start_api_server", "start_log_monitor", "start_monitor")
_raylet: Any = ray._raylet  # a compiled module without types

# Actors and nodes. The public lists of them (ray.util.state) need a dashboard, which a local Ray
# has not.


def is_gone(actor: Any) -> bool:
    """Return whether Ray will not restart an actor.

    The error of a call does not tell: it is ``ActorDiedError`` also for an actor whose node is lost
    and that starts again elsewhere.
    """
    return _state_of(actor) == "DEAD"


def is_restarting(actor: Any) -> bool:
    """Return whether an actor waits for its restart, which may need room that nobody frees.

    Ray holds its calls back until then, also those that it does not repeat.
    """
    return _state_of(actor) == "RESTARTING"


def _state_of(actor: Any) -> str:
    return str(state.actor_table(actor._actor_id.hex()).get("State", "DEAD"))


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that are being drained: they take no new work and will end."""
    return set(state.get_draining_nodes())


def launch_failures() -> list[str]:
    """Return one line for each kind of node that the autoscaler could not start, with the reason.

    Such as a lack of spot capacity, about which Ray is silent.
    """
    from ray.autoscaler.v2.sdk import get_cluster_status

    failed = get_cluster_status(ray.get_runtime_context().gcs_address).failed_launches
    reasons = {launch.ray_node_type_name: launch.details for launch in failed}
    return [f"cannot start {name}: {' '.join(str(why).split())}" for name, why in reasons.items()]


def nodes_since_start(client: Any) -> list[Json]:
    """Return what the dashboard of a ``JobSubmissionClient`` knows of all nodes, gone ones too.

    ``ray.util.state.list_nodes`` takes no address of a dashboard together with its token.
    """
    reply = client._do_request("GET", "/api/v0/nodes?detail=1&limit=10000")
    reply.raise_for_status()
    nodes: list[Json] = reply.json()["data"]["result"]["result"]
    return nodes


# Files that a job ships.


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tells whether patterns of .gitignore match a relative path.

    Ray matches its ``excludes`` so. A pattern that matches a folder matches what is in it.
    """
    matches: Callable[[str], bool] = PathSpec.from_lines("gitwildmatch", patterns).match_file
    return matches


def shipped_paths(directory: Path, excludes: Sequence[str]) -> list[Path]:
    """Return the files and folders of a working directory that Ray ships, a folder before its own.

    As Ray, leave out what ``excludes`` and every .gitignore and .rayignore on the way name.
    """
    found: list[Path] = []
    included = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    outside = packaging._get_excludes(directory, list(excludes))
    packaging._dir_travel(directory, [outside], found.append, included)
    return [path for path in found if path != directory]


def quiet_jobs() -> None:
    """Keep Ray's client of jobs from logging every step of an upload, and the end of a log."""
    from ray.dashboard.modules import dashboard_sdk
    from ray.dashboard.modules.job import sdk

    for module in (packaging, dashboard_sdk, sdk):
        logging.getLogger(module.__name__).setLevel(logging.WARNING)


# The Ray that this process has started.


def started_here() -> bool:
    """Return whether this process has started the Ray that it uses."""
    node: Any = worker._global_node
    return bool(node and node.is_head())


def own_processes() -> list[Any]:
    """Return the processes of Ray that this one has started and cannot be without."""
    node: Any = worker._global_node
    if node is None:
        return []
    kinds = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
    return [info.process for kind in kinds for info in node.all_processes.get(kind, ())]


def session_folder() -> Path:
    """Return the folder of the session's logs and sockets."""
    node: Any = worker._global_node
    return Path(node.get_session_dir_path())


def has_gpu() -> bool:
    """Return whether there is an accelerator, which a process that imports torch may initialize.

    Torch, which would tell, is not yet imported.
    """
    managers = get_all_accelerator_managers()
    return any(manager.get_current_node_num_accelerators() > 0 for manager in managers)


def gpu_memory() -> list[int]:
    """Return the bytes of each GPU of this machine by NVIDIA's driver, without a CUDA context.

    Empty if the driver does not say, or where a GPU is divided (MIG).
    """
    with ExitStack() as stack, suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        stack.callback(pynvml.nvmlShutdown)
        handles = [*map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))]
        if not any(map(_is_divided, handles)):
            return [pynvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles]
    return []


def _is_divided(handle: Any) -> bool:
    with suppress(pynvml.NVMLError):  # a GPU that cannot be divided
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    return False


# Start of Ray.


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give a module or class of Ray other attributes in the block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def without_messages() -> AbstractContextManager[None]:
    """Keep Ray from printing messages on standard output: it logs to its session's folder."""
    return _replaced(worker, _worker_logs_enabled=False)


def listening_on_localhost() -> AbstractContextManager[None]:
    """Let the servers of a Ray that starts in the block listen on the loopback address only.

    Ray's default on macOS and Windows. (It replaces an ``_node_ip_address`` of 127.0.0.1 by the
    address that other machines see.)
    """
    return _replaced(ray_constants, ENABLE_RAY_CLUSTER=False)


@contextmanager
def without_monitors() -> Iterator[None]:
    """Let a Ray that starts in the block do without what nothing here asks, and half of its time.

    That is the server of the dashboard, which Ray starts even without a dashboard, the monitor of
    the autoscaler, that of logs, which stay in files, and the agent's part for a dashboard, which
    Ray leaves out where the dashboard's dependencies are not installed.
    """
    missing = _replaced(utils, get_dashboard_dependency_error=lambda: ImportError("not used"))
    with _replaced(Node, **dict.fromkeys(_MONITORS, lambda self, **_: None)), missing:
        yield


def without_sigterm_handler() -> AbstractContextManager[None]:
    """Keep Ray, if it starts in the block, from replacing the handler of SIGTERM."""
    return _replaced(utils, set_sigterm_handler=lambda handler: None)


def uninstall_failure_handlers() -> None:
    """Undo the handlers of SIGTERM and of crashes that Ray's C++ has set; others are to be set.

    Ray does so itself when it ends, also to handlers that were set after its own.
    """
    ctypes.CDLL(_raylet.__file__)._ZN3ray6RayLog21UninstallSignalActionEv()


def without_grace(before: Callable[[], None]) -> AbstractContextManager[None]:
    """Let Ray kill its processes in the block without asking them to end first.

    ``before`` is called when this process has left Ray, and Ray's processes still live.
    """
    kill: Any = Node.kill_all_processes

    def kill_at_once(node: Node, **options: Any) -> None:
        before()
        kill(node, **options | {"allow_graceful": False})

    return _replaced(Node, kill_all_processes=kill_at_once)


def send_token() -> None:
    """Let this process send the token of this machine to clusters, unless a mode is set.

    As `ray start` does if there is a token. With an explicit address Ray sends none.
    """
    has_token = _raylet.AuthenticationTokenLoader.instance().has_token
    if not os.environ.get("RAY_AUTH_MODE") and has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_MODE"] = "token"
        _raylet.Config.initialize("")  # the mode was read when Ray was imported
