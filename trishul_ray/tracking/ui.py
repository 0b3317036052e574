"""MLflow's page of a local store, served on localhost: the implementation of ``trishul ui``."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress

from trishul_ray.errors import InputError, RunError
from trishul_ray.redaction import redact
from trishul_ray.tracking.store import open_client, sqlite_file, store_lock
from trishul_ray.tracking.sweep_run import ID_TAG

#: The first port that is tried, which is MLflow's own, and how many after it.
FIRST_PORT = 5000
PORTS = 100
#: Seconds for which the page may take to start.
START_SECONDS = 120.0


def page_of_run(uri: str, run: str) -> str:
    """Return the page of a run in a store, as the part of its address after the server's.

    Args:
        uri: Tracking URI, from :func:`trishul_ray.tracking.store.tracking_uri`.
        run: Id of the run (of this package); empty for the page of all runs.

    Raises:
        InputError: There is no such store, it does not answer, or the run is not in it.
    """
    file = sqlite_file(uri)
    if file is not None and not file.is_file():
        raise InputError(f"{file} does not exist: no run has logged to it; name the folder of runs")
    if not run:
        return "/"
    with store_lock(uri):
        client = open_client(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    quoted = run.replace("'", "")
    found = client.search_runs(experiments, f"tags.`{ID_TAG}` = '{quoted}'", max_results=1)
    if not found:
        raise InputError(f"run {run!r} is not in {redact(uri)}")
    return f"/#/experiments/{found[0].info.experiment_id}/runs/{found[0].info.run_id}"


def free_port(first: int = FIRST_PORT) -> int:
    """Return the first free port on localhost from ``first``.

    Raises:
        InputError: The next :data:`PORTS` are all in use.
    """
    for port in range(first, min(first + PORTS, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise InputError(f"no port on localhost is free from {first} on")


def serve(uri: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page of a store on localhost until interrupted; leave no process behind.

    Args:
        uri: Tracking URI of a store that is no server.
        port: A free port.
        ready: Called with the address, once it answers.

    Raises:
        RunError: The page does not start, or ends by itself.
    """
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    # In a session of its own: MLflow does not end its workers when it is ended itself.
    # Its lines go to standard error.
    process = subprocess.Popen(
        command, env={**os.environ, **quiet}, start_new_session=True, stdout=2
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunError("MLflow's page did not start; see the lines above")
            time.sleep(0.2)
        ready(address)
        code = process.wait()
        raise RunError(f"MLflow's page has ended with exit code {code}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=1).close()
    except OSError:
        return False
    return True
