"""Join a Ray cluster, or start a local one and shut it down; what the cluster offers a run."""

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trishul_ray.errors import (
    InputError,
    RunError,
    first_line,
    join_limited,
    last_words,
    stop_signals,
)
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.fork_server import ForkServer
from trishul_ray.federation.on_ray.nodes import (
    least_gpu_memory,
    possible_nodes,
    total_resources,
)
from trishul_ray.federation.on_ray.ray_internals import (
    has_gpu,
    listening_on_localhost,
    own_processes,
    send_token,
    session_folder,
    started_here,
    uninstall_failure_handlers,
    without_grace,
    without_messages,
    without_monitors,
    without_sigterm_handler,
)
from trishul_ray.federation.on_ray.slices import Slices, plan_slices, slices_of_bundles
from trishul_ray.runtime.cpu import usable_cores
from trishul_ray.storage.durable import (
    keep_logs,
    remove_abandoned,
    scratch_folder,
    temporary_folders,
)

#: Variables in which Ray looks for a token, besides ~/.ray/auth_token.
_TOKEN_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

#: Seconds in which a cluster must accept a connection.
CONNECT_TIMEOUT = 10.0

#: Seconds between two looks at Ray's own processes, or at the cluster that was joined.
WATCH_SECONDS = 2.0
#: Seconds between two looks at processes of this machine.
LOOK_SECONDS = 0.1
#: Seconds without an answer after which a joined cluster is lost; Ray aborts the process after 60.
GONE_SECONDS = 40.0


#: Longest path of a socket in bytes (``sun_path``, without the zero at its end).
SOCKET_BYTES = 107 if sys.platform == "linux" else 103
#: The end of the longest path of a socket that Ray makes in a scratch folder.
_SOCKET = "/.trishul-ray.012345-01234567.tmp/r/"
_SOCKET += "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
#: The logs of Ray's processes in it.
_LOGS = "r/session_latest/logs"


class _Watch:
    """Ends this process in good order if it loses its Ray; see :func:`at_loss`.

    Without its raylet or its GCS (Ray's list of nodes and actors), every call of Ray blocks until
    Ray aborts the process, which no exception can prevent. So a thread notices the loss, calls
    ``last_words``, the first one first, and ends the process with exit code 1; or with that of
    a signal, if this process was asked to stop.

    Args:
        joined: Whether Ray was there before this process.
        fork_server: The parent of the workers, if it is not Ray.
    """

    def __init__(self, *, joined: bool, fork_server: ForkServer | None) -> None:
        self._answered = time.monotonic()
        self._gcs = ray.get_runtime_context().gcs_address if joined else None
        self._own = [] if joined else own_processes()
        self._parents = [process.pid for process in self._own]
        if fork_server is not None and not joined:
            self._parents.append(fork_server.pid)
        self._closed = threading.Event()
        self._interrupted = False
        self._thread = threading.Thread(target=self._run, name="watch Ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, also if a signal interrupts this; if Ray is lost, the process ends."""
        self._interrupted = isinstance(sys.exception(), KeyboardInterrupt)
        try:
            if self._loss() is not None:
                self._thread.join()  # which ends the process
        finally:
            self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS if self._own else WATCH_SECONDS):
            if (why := self._loss()) is not None and not self._closed.is_set():
                _suspend(self._own)
                workers = self._workers()  # while their parents are known
                # A GCS that says that the node is lost ends this process: Ray's client then
                # recovers the node's objects without an object store, and calls ``_Exit(1)``.
                _kill(self._own)
                # A signal to all processes may reach this one last.
                until = time.monotonic() + WATCH_SECONDS
                while not self._asked() and time.monotonic() < until:
                    time.sleep(LOOK_SECONDS)
                self._end(why, workers)

    def _workers(self) -> list[psutil.Process]:
        return [worker for parent in self._parents for worker in _descendants(parent)]

    def _asked(self) -> bool:
        return self._interrupted or bool(stop_signals)

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

    def _end(self, why: str, workers: list[psutil.Process]) -> None:
        # Workers would end by themselves, but after the last words: one could open a run again.
        workers = [*workers, *self._workers()]
        _kill(workers)
        psutil.wait_procs(workers, timeout=WATCH_SECONDS)
        asked = self._asked()
        if not last_words:
            print("stopped" if asked else f"error: {why}", file=sys.stderr)
        for action in list(last_words):
            try:
                action(None if asked else why)
            except Exception:
                traceback.print_exc()
        os._exit(128 + (stop_signals or [signal.SIGINT])[0] if asked else 1)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _suspend(processes: Iterable[psutil.Process]) -> None:
    """Stop processes, so that they start no further ones."""
    for process in processes:
        with suppress(OSError):
            process.send_signal(signal.SIGSTOP)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def joins_cluster() -> bool:
    """Return whether ``RAY_ADDRESS`` names a cluster that is to be joined."""
    return os.environ.get("RAY_ADDRESS") not in (None, "", "local")


def opening() -> str:
    """Return what :func:`ray_session` is about to do, for a display of progress."""
    return "joining the Ray cluster" if joins_cluster() else "starting Ray"


def forks_workers() -> bool:
    """Return whether the workers of a local Ray are forks here."""
    return sys.platform == "linux" and not has_gpu()


@contextmanager
def ray_session(
    cpus: int | None = None, fork_server: ForkServer | None = None
) -> Iterator[dict[str, float]]:
    """Join the cluster at ``RAY_ADDRESS``, use the current runtime, or start a local one.

    At the end a runtime that existed before is left as it was. One started here is shut down with
    all its processes, even if this process is killed. A local cluster has ``cpus`` CPUs (None: all
    that this process may use), listens on localhost only, requires a token that only this process
    and its children know, writes nothing to the home directory, and has no dashboard. Its sockets
    and logs are in a temporary folder of this user alone, which goes with it, unless an error ends
    the session (see :func:`keep_session_logs`). On Linux without GPUs, its workers are forks of
    ``fork_server`` (None: of one that ends with the session).

    If this machine has a token (``RAY_AUTH_TOKEN``, ``~/.ray/auth_token``), an existing cluster
    receives it, as from Ray's own commands; set ``RAY_AUTH_MODE=disabled`` to join a cluster that
    requires none.

    Yields:
        The free resources: ``{"CPU": ..., "GPU": ...}``.

    Raises:
        RunError: The cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield _free_resources()
        return
    address, joins = os.environ.get("RAY_ADDRESS"), joins_cluster()
    # By default Ray hides all GPUs from an actor that holds none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with ExitStack() as stack:
        stack.callback(_restore, {name: os.environ.get(name) for name in _TOKEN_SETTINGS})
        stack.enter_context(without_messages())
        if not joins and fork_server is None and forks_workers():
            fork_server = stack.enter_context(ForkServer())
        folder = "" if joins else stack.enter_context(_temporary_folder())
        stack.callback(_end_ray)  # also after an interrupted start
        try:
            with _held_signals():
                if joins:
                    _join(str(address))
                else:
                    _start(cpus, fork_server, f"{folder}/r")  # Ray opens its own to all users
                # A signal before this callback would end Ray under a watch that takes it for lost.
                stack.callback(_Watch(joined=joins, fork_server=fork_server).close)
        except Exception as error:  # Ray raises a bare Exception if its processes do not start
            why = first_line(error).rstrip(".")
            if joins:
                raise RunError(
                    f"cannot join the cluster at RAY_ADDRESS={address}: {why}"
                ) from error
            if isinstance(error, psutil.AccessDenied):
                why = (
                    f"it may not look at other processes {why}; with a /proc that is mounted with "
                    "hidepid=1, use resources.backend=inline"
                )
            raise RunError(
                f"cannot start a local Ray: {why}; its logs: {folder}/{_LOGS}"
            ) from error
        yield _free_resources()


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yield a folder for a Ray of this process; Ray's own, /tmp/ray, is open to all users.

    It is in the first of :func:`~trishul_ray.storage.durable.temporary_folders` that is short
    enough for the paths of sockets.

    Raises:
        RunError: There is none.
    """
    places = temporary_folders()
    room = SOCKET_BYTES - len(_SOCKET)
    short = [place for place in places if len(os.fsencode(place)) <= room]
    with ExitStack() as stack:
        for place in short:
            with suppress(OSError):
                folder = stack.enter_context(scratch_folder("ray", Path(place)))
                break
        else:
            raise RunError(
                "cannot start a local Ray: its sockets need a temporary folder that can be written "
                f"and whose path has at most {room} bytes, and none of {join_limited(places, 9)} "
                "is one: set RAY_TMPDIR"
            )
        try:
            yield folder
        except Exception as error:
            if not isinstance(error, InputError):
                keep_logs(folder)
            raise
        with suppress(OSError):  # processes that are about to end would fill it again
            os.replace(f"{folder}/r", f"{folder}/over")


def keep_session_logs() -> None:
    """Keep the logs of a local Ray that this process has started for an hour after its end."""
    if started_here():
        keep_logs(session_folder().parents[1])


def _free_resources() -> dict[str, float]:
    """Return the free resources of the cluster; one that is all in use, which Ray omits, is 0."""
    free: dict[str, float] = ray.available_resources()
    return dict.fromkeys(ray.cluster_resources(), 0.0) | free


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _held_signals() -> Iterator[None]:
    """Deliver signals that arrive in the block, in which Ray starts, at its end.

    An exception of a handler in there would leave a connection that nothing can shut down, or would
    be lost in a hook around a fork. Ray's own handlers of SIGTERM are undone: one in Python, which
    exits at once, and one in C++, which prints a stack trace and aborts after three seconds, and
    whose removal at Ray's end would leave a second signal to kill this process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    own = {s: handler for s in signals if callable(handler := signal.getsignal(s))}
    held: list[int] = []
    for signum in own:
        signal.signal(signum, lambda signum, _: held.append(signum))
    try:
        with without_sigterm_handler() if signal.SIGTERM in own else nullcontext():
            yield
    finally:
        if signal.SIGTERM in own:
            uninstall_failure_handlers()
        for signum, handler in own.items():
            signal.signal(signum, handler)
        if held:
            signal.alarm(0)  # by which the handler in C++ would abort
            signal.raise_signal(held[0])


def _start(cpus: int | None, fork_server: ForkServer | None, folder: str) -> None:
    if not any(os.environ.get(name) for name in _TOKEN_SETTINGS):
        # Otherwise Ray writes one to the home directory, which may be read-only or shared.
        os.environ["RAY_AUTH_TOKEN"] = _process_token()
    # Ray starts workers at niceness 15: any other process on this machine would starve the clients.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Events of tasks are for the dashboard: without one, they would gather in the GCS.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    if fork_server is not None:  # forks do not replace workers that start before there is work
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # A forked worker has the signals of the fork server.
    deaf = _blocked_signals() if fork_server is not None else nullcontext()
    with listening_on_localhost(), without_monitors(), deaf:
        _init_twice(
            address="local", num_cpus=cpus or usable_cores(), include_dashboard=False,
            logging_level=logging.ERROR, log_to_driver=False, _temp_dir=folder,
            runtime_env={"py_executable": fork_server.py_executable} if fork_server else None,
        )  # fmt: skip
    remove_abandoned()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Let the processes that start in the block ignore requests to end, as Ray does for Ctrl-C.

    Slurm and systemd send SIGTERM to all processes. A raylet that ends by it says so to the GCS,
    and the GCS to this process, where Ray's client at once recovers the objects of the lost node,
    finds no object store, and calls ``_Exit(1)`` before Python has seen the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_ray() -> None:
    """Leave Ray; kill the processes of one that was started here, which do not hear a request."""
    started: list[psutil.Process] = []

    def find() -> None:
        own = own_processes()
        _suspend(own)
        started.extend(child for process in own for child in _descendants(process.pid))

    with without_grace(before=find):
        ray.shutdown()
    _kill(started)


def _init_twice(**options: Any) -> None:
    """Start Ray; once more if its processes were too slow, as on a machine under load."""
    before = set(psutil.Process().children())
    try:
        ray.init(**options)
        return
    except Exception as error:  # as Ray raises it
        if "timed out" not in str(error):
            raise
    _end_ray()
    _kill(set(psutil.Process().children()) - before)
    ray.init(**options)


def _join(address: str) -> None:
    _check_answers(address)
    send_token()
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


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
    nodes = possible_nodes()
    free, total = ray.available_resources(), total_resources(nodes)
    if held is not None:
        mine = {"CPU": held.actors * held.cpus, "GPU": held.actors * held.gpus}
        free = {k: min(free.get(k, 0.0) + mine[k], total.get(k, 0.0)) for k in mine}
    return plan_slices(experiment, free, total, gpu_bytes=least_gpu_memory(nodes))


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
