"""Start a local Ray, or join a cluster."""

import logging
import math
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import ray

from trishul_ray.errors import InputError, RunError, first_line
from trishul_ray.federation.on_ray.fork_server import ForkServer
from trishul_ray.federation.on_ray.without_monitors import without_monitors
from trishul_ray.runtime.device import has_nvidia_driver, usable_cores
from trishul_ray.storage.durable import (
    keep_logs,
    remove_abandoned,
    scratch_folder,
    temporary_folders,
)

#: Seconds within which a cluster must accept a connection.
CONNECT_SECONDS = 10.0
#: Maximum length in bytes of a folder for Ray: the path of a socket has at most 103 to 107 bytes.
FOLDER_BYTES = 8
#: Maximum duration of a start of Ray after a signal: Docker kills after ten seconds.
STUCK_SECONDS = 8.0
#: A second signal within this time belongs to the first: ``timeout`` and Slurm send two at once.
REPEAT_SECONDS = 1.0
#: Seconds between two checks for signals of other threads.
LOOK_SECONDS = 0.1
#: Variables that configure the token of Ray, in addition to ~/.ray/auth_token.
_TOKEN_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: The same for all clusters that this process starts, because Ray reads it only once.
_TOKEN = secrets.token_hex(32)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def joins_cluster() -> bool:
    """Return whether ``RAY_ADDRESS`` is the address of a cluster to join."""
    return os.environ.get("RAY_ADDRESS") not in (None, "", "local")


def opening() -> str:
    """Return the next action of :func:`ray_session`, for a progress display."""
    return "joining the Ray cluster" if joins_cluster() else "starting Ray"


def forks_workers() -> bool:
    """Return whether the workers of a local Ray are forks: on Linux without a GPU.

    An import of torch may initialize a GPU, which must not happen before a fork.
    """
    has_gpu = has_nvidia_driver() or os.path.exists("/dev/kfd")  # NVIDIA or AMD
    return sys.platform == "linux" and not has_gpu


@contextmanager
def ray_session(
    cpus: int | None = None, fork_server: ForkServer | None = None
) -> Iterator[dict[str, float]]:
    """Join the cluster at ``RAY_ADDRESS``, use the current Ray, or start a local one.

    A Ray that was already running is not shut down. A local Ray ends with all its processes, even
    if this process is killed. It has ``cpus`` CPUs (by default the number that this process may
    use), and requires a token that is known only to this process and its children. Its files are in
    a temporary folder of this user, which is removed, or kept for an hour after an error. The
    workers are forks of ``fork_server`` (by default a new one) if :func:`forks_workers`.

    Yields:
        The free resources, such as ``{"CPU": 4.0, "GPU": 1.0}``.

    Raises:
        InputError: This machine cannot run a local Ray.
        RunError: The cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield ray.available_resources()
        return
    # By default Ray hides all GPUs from an actor that reserves none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with ExitStack() as stack:
        try:
            if joins_cluster():
                address = os.environ["RAY_ADDRESS"]
                action = f"cannot join the cluster at RAY_ADDRESS={address}"
                remedy = (
                    "; unset RAY_ADDRESS to run on this machine; if the cluster requires a token, "
                    "set RAY_AUTH_MODE=token"
                )
                _check_answers(address)
                stack.callback(_end_ray)
                with _held_signals(), _ends_if_stuck():
                    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            else:
                action = "cannot start a local Ray"
                _check_loopback()
                folder = stack.enter_context(_temporary_folder())
                remedy = f"; its logs: {folder}/r/session_latest/logs"
                if fork_server is None and forks_workers():
                    fork_server = stack.enter_context(ForkServer())
                stack.callback(_end_ray)  # Also after an interrupted start.
                _start(cpus or usable_cores(), fork_server, f"{folder}/r")
        except (InputError, RunError):
            raise
        except Exception as error:  # Ray raises a bare Exception if its processes do not start.
            why = first_line(error).rstrip(".")
            raise RunError(f"{action}: {why}{remedy}") from error
        yield ray.available_resources()


def _start(cpus: int, fork_server: ForkServer | None, folder: str) -> None:
    if not any(os.environ.get(name) for name in _TOKEN_SETTINGS):
        # Otherwise Ray writes a token to the home directory, which may be read-only or shared.
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
    # Ray starts workers at niceness 15, so that any other process of this machine would starve
    # them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Only a dashboard reads the events of tasks.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Without a dashboard, the metrics of Ray are not read.
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    if fork_server is not None:  # Forks do not replace workers that start before there are tasks.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with _held_signals(), _ends_if_stuck(), without_monitors():
        ray.init(
            address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=folder,
            logging_level=logging.ERROR, log_to_driver=False,
            runtime_env={"py_executable": fork_server.py_executable} if fork_server else None,
        )  # fmt: skip
    remove_abandoned()


@contextmanager
def _held_signals() -> Iterator[Callable[[], None]]:
    """Deliver signals that arrive in this context at its end, to the previous handlers.

    An exception of a handler would interrupt Ray's own start. Ray also sets handlers when it starts
    and when it shuts down: they exit, or abort after three seconds. Processes that start in this
    context inherit the blocked signals. Thus the raylet outlives a signal to all processes of a job
    (Slurm, systemd); otherwise Ray would terminate this process with exit code 1.

    Yields:
        A function that replaces Ray's handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    received: list[int] = []

    def hold() -> None:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda signum, _: received.append(signum))

    hold()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield hold
    except SystemExit as exit_:
        # A native thread, such as OpenBLAS's, received the signal, and Ray's handler handled it.
        if exit_.code not in _SIGNALS:
            raise
        received.append(exit_.code)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for signum in received:
            signal.raise_signal(signum)


@contextmanager
def _ends_if_stuck() -> Iterator[None]:
    """Terminate this process if a context with held signals does not end after a signal.

    This happens :data:`STUCK_SECONDS` after the signal, or on another signal that arrives at least
    :data:`REPEAT_SECONDS` later: nothing else interrupts Ray's C++ code. Ray's processes end with
    this process.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform != "linux":
        yield
        return
    signals = {number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    taken: list[int] = []
    ended = threading.Event()
    reader, writer = socket.socketpair()  # Python writes signals that native threads receive.
    writer.setblocking(False)

    def watch() -> None:
        first, stop = math.inf, 0
        while not ended.is_set():
            if info := signal.sigtimedwait(signals, LOOK_SECONDS):  # This thread blocks them.
                taken.append(info.si_signo)
                writer.send(bytes([info.si_signo]))
            new = signals & {*reader.recv(64)} if select.select([reader], [], [], 0)[0] else set()
            waited = time.monotonic() - first
            if waited > STUCK_SECONDS or (new and waited > REPEAT_SECONDS):
                os._exit(128 + stop)
            if new and first == math.inf:
                first, stop = time.monotonic(), min(new)

    watcher = threading.Thread(target=watch)
    with reader, writer:
        watcher.start()
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            ended.set()
            watcher.join()
            for number in taken:
                signal.raise_signal(number)  # The signal is pending until this thread unblocks it.


def _end_ray() -> None:
    """Shut Ray down, and replace its handlers as soon as it has set them.

    Ray then waits for its processes. Without a handler, a second signal would kill this process.
    """
    with _held_signals() as hold:
        ending = threading.Thread(target=ray.shutdown)
        ending.start()
        while ending.is_alive():
            ending.join(0.01)
            hold()


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yield a folder for a Ray of this process; Ray's default, /tmp/ray, is open to all users.

    Raises:
        RunError: No temporary folder has a path that is short enough for a socket.
    """
    places = [place for place in temporary_folders() if len(os.fsencode(place)) <= FOLDER_BYTES]
    place = next((place for place in places if os.access(place, os.W_OK)), None)
    if place is None:
        raise RunError(
            "cannot start a local Ray: its sockets need a writable temporary folder with a path of "
            f"at most {FOLDER_BYTES} bytes; set RAY_TMPDIR"
        )
    with scratch_folder("ray", Path(place)) as folder:
        try:
            yield folder
        except Exception as error:
            if not isinstance(error, InputError):
                keep_logs(folder)
            raise
        with suppress(OSError):  # Processes that are about to exit would write to it again.
            os.replace(f"{folder}/r", f"{folder}/over")


def _check_answers(address: str) -> None:
    """Fail immediately if nothing listens at an address; Ray retries for minutes."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), CONNECT_SECONDS).close()


def _check_loopback() -> None:
    """Raise an InputError if 127.0.0.1 cannot be used; Ray retries for a quarter of an hour."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), CONNECT_SECONDS).close()
    except OSError as error:
        why = f"127.0.0.1 cannot be used ({first_line(error)})"
        raise InputError(f"cannot start a local Ray: {why}; set resources.backend=inline") from None
