"""Start a Ray worker as a fork of the fork server (see fork_server.py).

    python -I -S fork_worker.py SOCKET PYTHON SCRIPT [ARGUMENT ...]

Waits until the worker ends. If the raylet ends before, so does the worker: Ray itself notices that
only once a worker has connected, or after half a minute. Without an answer from the server, which
ends with the driver, the worker is a child of this process.
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> None:
    """Ask the server for a worker with the arguments, environment and descriptors of this one."""
    path, python, *arguments = sys.argv[1:]
    parent = os.getppid()
    reader, _ = os.pipe()  # by its end the worker notices the end of this process
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "directory": os.getcwd(),
        }
        content = json.dumps(request).encode()
        socket.send_fds(connection, [struct.pack("!I", len(content))], [0, 1, 2, reader])
        connection.sendall(content)
        forked = connection.recv(1) == b"1"
    except OSError:
        forked = False
    # The raylet may have ended before this process could ask for its parent.
    raylet = int(os.environ.get("RAY_RAYLET_PID", parent))
    child = None if forked else start_child(python, arguments)
    while os.getppid() == parent and is_alive(raylet):
        if child is None and select.select([connection], [], [], 1.0)[0]:
            break
        if child is not None:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                sys.exit(os.waitstatus_to_exitcode(status))
            time.sleep(0.2)


def start_child(python: str, arguments: list[str]) -> int:
    """Start a worker that the kernel ends with this process, and return its process id."""
    this = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()  # Ray ends the process group of a worker together with the worker
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == this:
            os.execv(python, [python, *arguments])
        os._exit(1)
    return child


def is_alive(pid: int) -> bool:
    """Return whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    main()
