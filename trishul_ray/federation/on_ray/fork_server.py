"""Fork the workers of a local Ray from a process that has already imported PyTorch.

Importing torch and transformers takes an actor about six CPU seconds and 330 MiB. A local cluster
starts many actors on few cores, so one process, the fork server, has imported them once, has run
nothing, and every worker is a fork of it that shares the memory of the libraries. Ray's own
preloading starts workers earlier, but each of them imports by itself (see
benchmarks/starting.py). Ray starts its workers with the command of ``runtime_env.py_executable``,
here this file as a script, which asks the fork server for a fork and ends, or becomes the worker
itself if there is no answer.

    driver -- starts --> fork server             raylet -- starts --> this file as a script
                              |  <-- arguments, environment, streams --  |
                              +-- fork --> worker (registers with the raylet by its own process id)

The fork server imports neither Ray, which reads its environment when it is imported, nor anything
that initializes a GPU. A command that has to import torch itself forks the server from itself, by
:func:`fork_early`; otherwise it is a new process. It ends with the process that started it.
"""

import gc
import json
import os
import random
import runpy
import secrets
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from importlib import import_module
from typing import NoReturn, Self

#: What a coordinator and a client import when their first run begins.
PRELOADED = (
    "trishul_ray.federation.server",
    "trishul_ray.federation.local",
    "transformers.modeling_utils",
)
#: Seconds between two looks of a worker at its raylet.
LOOK_SECONDS = 1.0


class ForkServer:
    """A process that forks the workers of a local Ray; a context manager, ready at once.

    Args:
        forked: Fork the server from this process, which has imported :data:`PRELOADED`, has no
            other threads, and has not imported Ray.

    Attributes:
        py_executable: The command for ``ray.init(runtime_env={"py_executable": ...})``.
        pid: The server's process id.
    """

    def __init__(self, *, forked: bool = False) -> None:
        name = f"trishul-{secrets.token_hex(8)}"
        # -I -S: it imports nothing but the standard library.
        self.py_executable = shlex.join([sys.executable, "-I", "-S", __file__, name])
        # In Linux's abstract namespace: no file is left behind.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen(128)
            # By the end of this pipe the server ends with this process.
            reader, self._pipe = os.pipe()
            start = _fork if forked else _spawn
            self.pid = start(listener, reader, self._pipe)
            os.close(reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server; its workers go on."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


_early: ForkServer | None = None


def fork_early() -> None:
    """Import what workers need, and fork the server of this process's first local Ray.

    Does nothing where a fork would not be safe: beside other threads, after Ray was imported, and
    on a machine with a GPU; nor if the process is to join a cluster.
    """
    global _early
    if os.environ.get("RAY_ADDRESS") not in (None, "", "local") or "ray" in sys.modules:
        return
    _preload()
    import torch

    if _early is None and threading.active_count() == 1 and torch.cuda.device_count() == 0:
        _early = ForkServer(forked=True)


def take_early() -> ForkServer | None:
    """Return the server of :func:`fork_early`, once."""
    global _early
    server, _early = _early, None
    return server


def _preload() -> None:
    for name in PRELOADED:
        import_module(name)


def _spawn(listener: socket.socket, reader: int, _: int) -> int:
    search = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(listener.fileno()), str(reader)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": search},
        pass_fds=[listener.fileno(), reader],
        start_new_session=True,  # Ctrl-C is for the driver
    )
    process.returncode = 0  # ForkServer.close waits for it
    return process.pid


def _fork(listener: socket.socket, reader: int, writer: int) -> int:
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        os.close(writer)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        _serve(listener, reader)
    finally:
        os._exit(1)  # never back into the caller's stack


def _serve(listener: socket.socket, pipe: int) -> NoReturn:
    """Fork a worker for every request, until the other end of a pipe is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end are no zombies
    gc.freeze()  # a collection in a worker would write to, and so copy, every shared page
    while pipe not in select.select([listener.fileno(), pipe], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if not _same_user(connection):
                continue
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            request = connection.makefile().read()
            if os.fork() == 0:
                listener.close()
                _work(connection, streams, **json.loads(request))
            for stream in streams:
                os.close(stream)
    os._exit(0)


def _work(
    connection: socket.socket,
    streams: list[int],
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
) -> NoReturn:
    """Run a worker's script in this fork."""
    try:
        os.setsid()  # Ray ends the process group of a worker together with the worker
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        random.seed()
        raylet = int(environment["RAY_RAYLET_PID"])
        threading.Thread(target=_end_with, args=(raylet,), daemon=True).start()
        connection.sendall(b"1")
        connection.close()
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _end_with(raylet: int) -> None:
    """End this process soon after its raylet: Ray may notice only after half a minute."""
    while os.path.exists(f"/proc/{raylet}"):
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a connection is this user's."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _ask(name: str, arguments: list[str]) -> bool:
    """Return whether the server forks a worker with the environment and streams of this process."""
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{name}")
            if not _same_user(connection):
                return False
            socket.send_fds(connection, [b"0"], [0, 1, 2])
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b"1"
    except OSError:
        return False


if __name__ == "__main__":
    if sys.argv[1].isdigit():  # the server, as a new process
        _preload()
        _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    elif not _ask(sys.argv[1], sys.argv[2:]):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
