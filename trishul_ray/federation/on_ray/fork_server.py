"""Fork the workers of a local Ray from a process that has already imported PyTorch.

Importing torch and transformers takes an actor about seven CPU seconds and some hundred megabytes.
A local cluster starts many actors on few cores, so one process, the fork server, has imported them
once, has run nothing, and every worker is a fork of it: it starts in about a second and shares the
memory of the libraries. Ray starts its workers with the command of ``runtime_env.py_executable``,
here ``fork_worker.py``, which asks the fork server for the fork and starts the worker itself, as
Ray would, if there is no answer.

    driver -- starts --> fork server            raylet -- starts --> fork_worker.py
                              |  <-- arguments, environment, descriptors --  |
                              +-- fork --> worker (registers with the raylet by its own process id)

The fork server imports neither Ray, which reads its environment when it is imported, nor anything
that initializes a GPU. A command that has to import torch itself forks the server from itself, by
:func:`fork_early`; otherwise it is a new process. It ends with the process that started it.
"""

import atexit
import fcntl
import gc
import json
import os
import random
import runpy
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
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from trishul_ray.files import scratch_folder

#: What a coordinator and a client import when their first run begins.
PRELOADED = (
    "trishul_ray.federation.server",
    "trishul_ray.federation.local",
    "transformers.modeling_utils",
)
#: Seconds in which a fork server must end when it is closed.
END_SECONDS = 10.0


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
        # The folder is private: whoever can connect to the socket can run code.
        self._folder = ExitStack()
        path = f"{self._folder.enter_context(scratch_folder('fork'))}/socket"
        script = Path(__file__).with_name("fork_worker.py")
        # -I -S: it imports nothing but the standard library.
        words = [sys.executable, "-I", "-S", str(script), path, sys.executable]
        self.py_executable = shlex.join(words)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(128)
        # By the end of this pipe the server ends with this process.
        reader, self._pipe = os.pipe()
        self.pid = _fork(listener, reader, self._pipe) if forked else _spawn(listener, reader)
        os.close(reader)
        listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server; its workers go on."""
        if self._pipe < 0:
            return
        os.close(self._pipe)
        self._pipe = -1
        end = time.monotonic() + END_SECONDS
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)
        self._folder.close()


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
        atexit.register(_early.close)


def take_early() -> ForkServer | None:
    """Return the server of :func:`fork_early`, once; the caller closes it."""
    global _early
    server, _early = _early, None
    return server


def _preload() -> None:
    for name in PRELOADED:
        import_module(name)


def _spawn(listener: socket.socket, reader: int) -> int:
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
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        with open(os.devnull, "r+b") as nothing:
            for descriptor in (0, 1, 2):
                os.dup2(nothing.fileno(), descriptor)
        _end_with(reader)
        _serve(listener)
    finally:
        os._exit(1)  # never back into the caller's stack


def _end_with(pipe: int) -> None:
    """Let the kernel end this process when the other end of a pipe is closed, whatever it does."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was closed before
        os._exit(1)


def _serve(listener: socket.socket) -> NoReturn:
    """Fork a worker for every request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end are no zombies
    gc.freeze()  # a collection in a worker would write to, and so copy, every shared page
    while True:
        connection, _ = listener.accept()
        # A request that was cut off is started by Ray's own means, or not at all.
        with suppress(OSError, ValueError, struct.error):
            _answer(connection, listener)
        connection.close()


def _answer(connection: socket.socket, listener: socket.socket) -> None:
    header, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
    with connection.makefile("rb") as content:
        request = json.loads(content.read(*struct.unpack("!I", header)))
    if os.fork() == 0:
        code = 1
        try:
            listener.close()
            code = _work(connection, descriptors, **request)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for descriptor in descriptors:
        os.close(descriptor)


def _work(
    connection: socket.socket,
    descriptors: list[int],
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
) -> int:
    """Run a worker's script in this fork, and return its exit code."""
    os.setsid()  # Ray ends the process group of a worker together with the worker
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, pipe = descriptors
    _end_with(pipe)  # with fork_worker.py, and so with the raylet
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    random.seed()
    connection.send(b"1")  # and is open until this process ends: fork_worker.py ends with it
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    _preload()
    _serve(socket.socket(fileno=int(sys.argv[1])))
