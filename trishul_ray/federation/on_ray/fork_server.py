"""Fork the workers of a local Ray from a process that has already imported PyTorch.

An actor that imports torch and transformers takes five CPU seconds and 320 MiB. Therefore one
process, the fork server, imports them once, and every worker is a fork of it that shares the memory
of the libraries: 0.3 CPU seconds and 80 MiB (benchmarks/starting.py). Ray starts its workers with
the command in ``runtime_env.py_executable``. Here the command runs this file as a script, which
requests a fork from the fork server and exits. Without a response, it becomes the worker itself if
its raylet is alive.

    driver -- starts --> fork server             raylet -- starts --> this file as a script
                              |  <-- arguments, environment, streams --  |
                              +-- fork --> worker (registers with the raylet by its own process id)

The fork server does not import Ray, which reads its environment on import, or anything that
initializes a GPU.
"""

import atexit
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
from importlib import import_module
from typing import Self

#: Modules that a coordinator and a client import when their first run starts.
PRELOADED = (
    "trishul_ray.federation.server",
    "trishul_ray.federation.worker.local",
    "trishul_ray.models.attention",
)
#: Seconds between two checks of a worker that its raylet is alive.
LOOK_SECONDS = 1.0
#: Seconds for destructors at exit. Those of Ray 2.60 may wait for a lock that their thread already
#: has (PostingPublisher).
EXIT_SECONDS = 5


class ForkServer:
    """A process that forks the workers of a local Ray; a context manager, ready immediately.

    Attributes:
        py_executable: The command for ``ray.init(runtime_env={"py_executable": ...})``.
        pid: The server's process id.
    """

    def __init__(self) -> None:
        name = f"trishul-{secrets.token_hex(8)}"
        # -I -S: it imports only the standard library.
        self.py_executable = shlex.join([sys.executable, "-I", "-S", __file__, name])
        search = os.pathsep.join(entry for entry in sys.path if entry)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")  # in Linux's abstract namespace, which leaves no file behind
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno())],
                stdin=subprocess.PIPE,  # the server exits when this process closes it
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": search},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is only for the driver
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate the fork server; its workers continue."""
        with self._process:
            self._process.kill()


def _serve(listener: socket.socket) -> list[str]:
    """Fork a worker for every request, and return the worker's arguments in the worker.

    The server itself exits when its standard input is closed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Prevent workers from becoming zombies.
    gc.freeze()  # A collection in a worker would write to, and so copy, every shared page.
    while 0 not in select.select([listener.fileno(), 0], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if not _same_user(connection):
                continue
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            request = connection.makefile().read()
            if os.fork() == 0:
                listener.close()
                arguments = _become(streams, **json.loads(request))
                connection.sendall(b"1")
                # Only after the response; otherwise a worker could start that nothing terminates.
                raylet = os.environ["RAY_RAYLET_PID"]
                threading.Thread(target=_end_with, args=(raylet,), daemon=True).start()
                atexit.register(signal.alarm, EXIT_SECONDS)
                return arguments
            for stream in streams:
                os.close(stream)
    sys.exit()


def _become(
    streams: list[int], arguments: list[str], environment: dict[str, str], directory: str
) -> list[str]:
    """Apply the streams, environment and directory of a worker."""
    os.setsid()  # Ray terminates the process group of a worker together with the worker.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    random.seed()
    gc.enable()
    return arguments


def _end_with(raylet: str) -> None:
    """Terminate this process soon after its raylet; Ray may notice only after half a minute."""
    while _lives(raylet):
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _lives(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a connection belongs to this user."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _ask(name: str, arguments: list[str]) -> bool:
    """Request a fork with the environment and streams of this process; return its success."""
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
    if sys.argv[1].isdigit():  # the server, and then each worker
        gc.disable()  # Imported modules stay; garbage collection would take a fifth of the time.
        for module in PRELOADED:
            import_module(module)
        sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif not _ask(sys.argv[1], sys.argv[2:]) and _lives(os.environ.get("RAY_RAYLET_PID", "self")):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
