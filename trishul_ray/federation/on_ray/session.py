"""Join a Ray cluster, or start a local one and shut it down; what the cluster offers a run."""

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray
from ray._private import ray_constants, utils, worker
from ray._private.accelerators import get_all_accelerator_managers
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trishul_ray.errors import RunError, first_line, last_words
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.fork_server import ForkServer, take_early
from trishul_ray.federation.on_ray.nodes import possible_nodes, total_resources
from trishul_ray.federation.on_ray.old_sessions import mark_session, remove_old_sessions
from trishul_ray.federation.on_ray.slices import Slices, plan_slices, slices_of_bundles
from trishul_ray.files import remove_abandoned

_raylet: Any = ray._raylet  # a compiled module without types

#: Where Ray looks for a token, besides ~/.ray/auth_token.
_TOKEN_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

#: Seconds in which a cluster must accept a connection.
CONNECT_TIMEOUT = 10.0


#: Seconds between two looks at Ray's own processes, and at a cluster that was joined.
WATCH_SECONDS, JOINED_WATCH_SECONDS = 1.0, 5.0
#: Seconds without an answer after which a joined cluster is lost; Ray aborts the process after 60.
GONE_SECONDS = 40.0


class _Watch:
    """Ends this process in good order if it loses its Ray; see :func:`at_loss`.

    Without its raylet or its GCS (Ray's list of nodes and actors), every call of Ray blocks until
    Ray aborts the process, which no exception can prevent. So a thread notices the loss, calls
    ``last_words``, the first one first, and ends the process with exit code 1.

    Args:
        joined: Whether Ray was there before this process.
        cleanup: Called last.
    """

    def __init__(self, *, joined: bool, cleanup: Callable[[], None]) -> None:
        node: Any = worker._global_node
        self._cleanup, self._answered = cleanup, time.monotonic()
        self._gcs = node.gcs_address if joined else None
        # Ray's processes that this one started, and cannot be without.
        self._own: list[Any] = [
            info.process
            for kind in (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
            for info in node.all_processes.get(kind, ())
        ]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch Ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; if Ray is lost already, the process ends."""
        if self._loss() is None:
            self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(WATCH_SECONDS if self._own else JOINED_WATCH_SECONDS):
            if (why := self._loss()) is not None:
                self._end(why)

    def _loss(self) -> str | None:
        if any(process.poll() is not None for process in self._own):
            return "Ray's own processes on this machine have ended (killed, or out of memory)"
        if self._gcs is not None:
            with suppress(OSError):
                _check_answers(self._gcs)
                self._answered = time.monotonic()
            if time.monotonic() - self._answered > GONE_SECONDS:
                return f"the Ray cluster at {self._gcs} does not answer any more"
        return None

    def _end(self, why: str) -> None:
        for process in self._own:  # and with them all workers
            process.kill()
        if not last_words:
            print(f"error: {why}", file=sys.stderr)
        for action in list(last_words):
            with suppress(Exception):
                action(why)
        with suppress(Exception):
            self._cleanup()
        os._exit(1)


@contextmanager
def ray_session(
    cpus: int | None = None, fork_server: ForkServer | None = None
) -> Iterator[dict[str, float]]:
    """Join the cluster at ``RAY_ADDRESS``, use the current runtime, or start a local one.

    At the end a runtime that existed before is left as it was. One started here is shut down with
    all its processes, even if this process is killed. A local cluster has ``cpus`` CPUs (None: all
    of the machine), listens on localhost only, requires a token that only this process and its
    children know, writes nothing to the home directory, and has no dashboard. On Linux without
    GPUs, its workers are forks of ``fork_server`` (None: of one that ends with the session).

    If this machine has a token (``RAY_AUTH_TOKEN``, ``~/.ray/auth_token``), an existing cluster
    receives it, as from Ray's own commands; set ``RAY_AUTH_MODE=disabled`` to join a cluster that
    requires none.

    Yields:
        The free resources: ``{"CPU": ..., "GPU": ...}``.

    Raises:
        RunError: The cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield ray.available_resources()
        return
    address = os.environ.get("RAY_ADDRESS")
    joins = address not in (None, "", "local")
    # By default Ray hides all GPUs from an actor that holds none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    before = {name: os.environ.get(name) for name in _TOKEN_SETTINGS}
    stack = ExitStack()
    try:
        # Ray logs to its session directory; the run itself reports what matters to the user.
        worker._worker_logs_enabled = False
        try:
            with _own_signal_handlers():
                if joins:
                    _join(str(address))
                else:
                    forks = fork_server
                    if forks is None and sys.platform == "linux" and not _has_gpu():
                        forks = stack.enter_context(take_early() or ForkServer())
                    _start(cpus, forks)
        except Exception as error:  # Ray raises a bare Exception if its processes do not start
            action = f"join the cluster at RAY_ADDRESS={address}" if joins else "start a local Ray"
            raise RunError(f"cannot {action}: {first_line(error).rstrip('.')}") from error
        watch = _Watch(joined=joins, cleanup=stack.close)
        try:
            yield ray.available_resources()
        finally:
            watch.close()
    finally:
        # Also after an interrupted start.
        ray.shutdown()
        stack.close()
        worker._worker_logs_enabled = True
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep this process's signal handlers while Ray starts, and run none while Ray connects.

    Ray installs two handlers of SIGTERM: one in Python, which exits at once, and one in C++, which
    prints a stack trace and aborts the process after three seconds. And an exception raised inside
    the constructor of Ray's core worker leaves a connection that nothing can shut down. A signal
    that arrives during that constructor is therefore delivered at the end of the block.

    Ray's processes are started by forks, and an exception raised in one of Python's hooks around a
    fork is only printed. What a handler raised is therefore raised again at the end of the block.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    own = {s: handler for s in signals if callable(handler := signal.getsignal(s))}
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    raised: list[BaseException] = []
    set_sigterm_handler, core_worker = utils.set_sigterm_handler, _raylet.CoreWorker

    def connect(*args: Any, **kwargs: Any) -> Any:
        for signum in own:
            signal.signal(signum, lambda signum, _frame: held.append(signum))
        return core_worker(*args, **kwargs)

    def handle(signum: int, frame: FrameType | None) -> None:
        try:
            own[signal.Signals(signum)](signum, frame)
        except BaseException as error:
            raised.append(error)
            raise

    for signum in own:
        signal.signal(signum, handle)
    if signal.SIGTERM in own:
        utils.set_sigterm_handler = lambda handler: None
    _raylet.CoreWorker = connect
    try:
        yield
    finally:
        utils.set_sigterm_handler, _raylet.CoreWorker = set_sigterm_handler, core_worker
        for signum, handler in own.items():
            signal.signal(signum, handler)
        if held:
            signal.alarm(0)  # by which the C++ handler would abort
            signal.raise_signal(held[0])
    if raised:
        raise raised[0]


def _has_gpu() -> bool:
    """Return whether there is an accelerator, which a process that imports torch may initialize."""
    managers = get_all_accelerator_managers()
    return any(manager.get_current_node_num_accelerators() > 0 for manager in managers)


def _start(cpus: int | None, fork_server: ForkServer | None) -> None:
    if not any(os.environ.get(name) for name in _TOKEN_SETTINGS):
        # Otherwise Ray writes one to the home directory, which may be read-only or shared.
        os.environ["RAY_AUTH_TOKEN"] = _process_token()
    # Ray starts workers at niceness 15: any other process on this machine would starve the clients.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's default on macOS and Windows: its servers listen on the loopback address only. (Ray
    # replaces an `_node_ip_address` of 127.0.0.1 by the address that other machines see.)
    default, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        _init_twice(
            address="local", num_cpus=cpus, include_dashboard=False,
            logging_level=logging.ERROR, log_to_driver=False,
            runtime_env={"py_executable": fork_server.py_executable} if fork_server else None,
        )  # fmt: skip
        node: Any = worker._global_node
        session = Path(node.get_session_dir_path())
        mark_session(session)
        remove_old_sessions(session.parent)
        remove_abandoned()
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = default


def _init_twice(**options: Any) -> None:
    """Start Ray; once more if its processes were too slow, as on a machine under load."""
    before = set(psutil.Process().children())
    try:
        ray.init(**options)
        return
    except Exception as error:  # as Ray raises it
        if "timed out" not in str(error):
            raise
    ray.shutdown()
    for process in set(psutil.Process().children()) - before:
        with suppress(psutil.Error):
            process.kill()
    ray.init(**options)


def _join(address: str) -> None:
    _check_answers(address)
    send_token()
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


def send_token() -> None:
    """Let this process send the token of this machine to clusters, unless a mode is set.

    As `ray start` does if there is a token. With an explicit address Ray sends none.
    """
    has_token = _raylet.AuthenticationTokenLoader.instance().has_token
    if not os.environ.get("RAY_AUTH_MODE") and has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_MODE"] = "token"
        _raylet.Config.initialize("")  # the mode was read when Ray was imported


def _check_answers(address: str) -> None:
    """Fail at once if nothing listens there: Ray itself retries for minutes."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), CONNECT_TIMEOUT).close()


@cache
def _process_token() -> str:
    # The same for all clusters that this process starts: Ray reads it once.
    return secrets.token_hex(32)


def slices_for_run(experiment: Experiment, held: Slices | None = None) -> Slices:
    """Return the slices of a run: the bundles of its trial, or a share of the whole cluster.

    ``held`` are slices of this process that the run may use.

    Raises:
        InputError: The requested resources are not available.
    """
    group = ray.util.get_current_placement_group()
    if group is not None:
        return slices_of_bundles(experiment, group.bundle_specs)
    free, total = ray.available_resources(), total_resources(possible_nodes())
    if held is not None:
        mine = {"CPU": held.actors * held.cpus, "GPU": held.actors * held.gpus}
        free = {k: min(free.get(k, 0.0) + mine[k], total.get(k, 0.0)) for k in mine}
    return plan_slices(experiment, free, total)


def fits_now(slices: Slices) -> bool:
    """Return whether one slice is free now; the bundles of a trial are reserved for it."""
    free = ray.available_resources()
    return ray.util.get_current_placement_group() is not None or (
        free.get("CPU", 0.0) >= slices.cpus and free.get("GPU", 0.0) >= slices.gpus
    )


def driver_node_affinity() -> NodeAffinitySchedulingStrategy | None:
    """Return a strategy that keeps an actor on this node, next to a local folder of runs.

    None inside a trial: its actors belong into its bundles, and every node sees its storage.
    """
    if ray.util.get_current_placement_group() is not None:
        return None
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
