"""A cluster that `ray up` started: its file, the tunnel to it, what its autoscaler waits for.

Its dashboard listens on localhost of its head; Ray's commands open the SSH connections to it.
"""

import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from trishul_ray.errors import InputError, RunError
from trishul_ray.storage.redaction import redact

#: Seconds in which a tunnel must be open, and in which the head must say how it is.
TUNNEL_SECONDS, STATUS_SECONDS = 60.0, 60.0

_DASHBOARD_PORT = 8265


def results_of(file: Path) -> str | None:
    """Return where the nodes of a cluster file store runs: the argument of setup-node.sh.

    A file that cannot be read, or is no cluster file, is an InputError.
    """
    try:
        config: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cluster file {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise InputError(f"cluster file {file}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or "cluster_name" not in config:
        raise InputError(f"cluster file {file}: it has no cluster_name; see cluster/aws.yaml")
    for command in config.get("setup_commands") or ():
        for script, place in itertools.pairwise(shlex.split(str(command))):
            if Path(script).name == "setup-node.sh":
                return f"{place.rstrip('/')}/runs"
    return None


@contextmanager
def open_tunnel(file: Path) -> Iterator[str]:
    """Yield the address on this machine of a cluster's dashboard, by `ray dashboard`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["dashboard", str(file), "--port", str(port), "--remote-port", str(_DASHBOARD_PORT)]
    with tempfile.TemporaryFile("w+") as log:
        tunnel = subprocess.Popen(
            [*_ray(), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + TUNNEL_SECONDS
            while not _answers(port):
                if tunnel.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    lines = [line.strip() for line in log if line.strip()]
                    why = redact(lines[-1]) if lines else "ssh does not answer"
                    raise RunError(f"no tunnel to the cluster of {file}: {why}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(tunnel.pid, signal.SIGTERM)
            tunnel.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def shortages(file: Path) -> list[str]:
    """Return what the autoscaler of a cluster waits for and what failed, one line each.

    Ray keeps this to itself: it is in no log that a user reads, and not on the dashboard.
    """
    words = [*_ray(), "exec", str(file), "ray status --verbose"]
    try:
        reply = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STATUS_SECONDS
        )
    except subprocess.TimeoutExpired:
        return ["the head does not answer"]
    return read_shortages(reply.stdout)


def read_shortages(status: str) -> list[str]:
    """Return the pending and failed nodes in the output of ``ray status --verbose``."""
    found = []
    section = ""
    for line in status.splitlines():
        if heading := re.fullmatch(r"([A-Z][\w ]*):\s*", line):
            section = heading[1]
        elif not line.startswith(" "):
            section = ""
        elif section in ("Pending", "Recent failures") and not line.strip().startswith("(no "):
            found.append(f"{section.lower()}: {redact(line.strip())}")
    return found


def _ray() -> list[str]:
    return [str(Path(sys.executable).with_name("ray"))]
