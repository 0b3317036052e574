"""The pages of MLflow: the address of a run's page, and the server that shows it."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from trishul_ray.errors import InputError, RunError, join_limited
from trishul_ray.runtime.lazy import mlflow
from trishul_ray.storage.redaction import redact
from trishul_ray.tracking.mlflow import ID_TAG
from trishul_ray.tracking.mlflow_store import TRAINING, VIEW, open_client, sqlite_file

#: MLflow's own port, which is tried first for its page.
FIRST_PORT = 5000

#: Characters that have a meaning in a pattern or end a text.
_NO_PATTERN = str.maketrans("", "", "'%_\\")


def page_of_run(uri: str, run: str) -> str:
    """Return the page of a run in a store, as the part of its address after the server's.

    Without a run, it is the list of runs, in the view :data:`VIEW` if the store has one experiment.
    ``run`` is the beginning of an id.

    Raises:
        InputError: The store or the run is not there, or several begin so.
    """
    file = sqlite_file(uri)
    if file is not None and not (file.is_file() and file.stat().st_size):
        raise InputError(f"{file} does not exist: no run has logged to it; name the folder of runs")
    client = open_client(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    wanted = f"tags.`{ID_TAG}` LIKE '{run.translate(_NO_PATTERN)}%'"
    found = client.search_runs(experiments, wanted)
    if not run:
        numbers = {each.info.experiment_id for each in found}
        if len(numbers) != 1:
            return f"/#/experiments?{TRAINING}" if numbers else "/"
        return f"/#/experiments/{numbers.pop()}/runs?{TRAINING}&viewStateShareKey={VIEW}"
    if not found:
        raise InputError(f"run {run!r} is not in {redact(uri)}")
    if len(ids := sorted({each.data.tags[ID_TAG] for each in found})) > 1:
        raise InputError(f"run {run!r}: several begin so: {join_limited(ids, 5)}")
    info = found[0].info
    return f"/#/experiments/{info.experiment_id}/runs/{info.run_id}?{TRAINING}"


def free_port(first: int = FIRST_PORT) -> int:
    """Return the first port from ``first`` that nothing listens to on localhost."""
    for port in range(first, 65536):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise InputError(f"no port on localhost is free from {first} on")


def serve_ui(uri: str, port: int, ready: Callable[[str], None]) -> None:
    """Run ``mlflow ui`` for a SQLite store on localhost until it is interrupted.

    ``ready`` is called with the address once it answers. MLflow's output is shown only if it does
    not start or ends by itself, which is a RunError. No process is left behind.
    """
    # Python and uvicorn would take mlflow.py or random.py in the working directory for a library.
    library = Path(str(mlflow.__file__)).parent.parent
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    stores = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_REGISTRY_STORE_URI": uri}
    command = [sys.executable, "-P", "-m", "mlflow", "ui"]  # every user can see its arguments
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", f"--log-level warning --app-dir {shlex.quote(str(library))}"]
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # In a session of its own: MLflow does not end its workers when it is ended itself.
        process = subprocess.Popen(
            command,
            env={**os.environ, **quiet, **stores, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{address}/health", timeout=1).close()
                    ready(address)
                    process.wait()
                time.sleep(0.2)
            log.seek(0)
            sys.stderr.writelines(map(redact, log.readlines()[-100:]))
            raise RunError(f"MLflow's page has ended with exit code {process.returncode}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
