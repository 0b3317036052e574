"""The MLflow store: its address and safe concurrent opening.

MLflow creates the schema of a SQLite store on first use, table by table, and cannot do so
concurrently: of four processes that open a new file together, three fail, and the file of a process
that is killed meanwhile never opens again. Hold :func:`store_lock`, a lock file beside the
database, while opening; a new database gets its name when it is complete.
"""

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from trishul_ray.errors import InputError
from trishul_ray.redaction import redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


#: Seconds to wait for another process that is creating or migrating a store.
LOCK_SECONDS = 120.0


def tracking_uri(uri: str | None, runs: str) -> str:
    """Return the MLflow tracking URI of a run.

    Args:
        uri: ``tracking.uri`` of the experiment; a bare path is a SQLite file. Without one, it is
            that of the environment variable ``MLFLOW_TRACKING_URI``.
        runs: ``storage.runs``; without any ``uri``, the store is ``<runs>/mlflow.db``.

    Raises:
        InputError: The store is a folder of files (which MLflow no longer writes) or an in-memory
            database; or there is no ``uri`` and ``runs`` is remote.
    """
    uri = uri if uri is not None else os.environ.get("MLFLOW_TRACKING_URI") or None
    if uri is None:
        if "://" in runs and not runs.startswith("file://"):
            raise InputError(
                f"tracking.uri: name an MLflow server, since storage.runs={runs!r} is remote and "
                "cannot hold a SQLite file (or set tracking.mlflow=false)"
            )
        return f"sqlite:///{Path(runs.removeprefix('file://')).absolute() / 'mlflow.db'}"
    scheme = urlsplit(uri).scheme
    if scheme == "file" or (not scheme and not uri.endswith(".db")):
        raise InputError(
            f"tracking.uri={uri!r}: MLflow no longer writes folders of files; "
            "name sqlite:///<file>.db or http(s)://<server>"
        )
    if not scheme:
        return f"sqlite:///{Path(uri).absolute()}"
    if scheme == "sqlite" and sqlite_file(uri) is None:
        raise InputError(f"tracking.uri={uri!r}: name a file, sqlite:///<path>.db")
    return uri


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a ``sqlite:///`` URI; None for other stores and in-memory databases."""
    head, _, path = uri.partition(":///")
    path = path.partition("?")[0]
    if head.partition("+")[0] != "sqlite" or not path or path == ":memory:":
        return None
    return Path(path).absolute()


def open_client(uri: str) -> "MlflowClient":
    """Return an MLflow client whose store exists and answers; the caller holds its lock.

    Raises:
        InputError: The store cannot be created, is not a database, or does not answer.
    """
    # MLflow reads these when it is first imported. Send no telemetry. Do not let a lost server
    # block a run for minutes, as the default of 7 retries of 120 s would. Do not let MLflow print
    # the address of the run: the run prints it.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    # Hide the page of "Running upgrade ..." that MLflow logs for every new store.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    file = sqlite_file(uri)
    new = file.with_name(f".{file.name}.new") if file is not None and not file.exists() else None
    try:
        if new is not None and file is not None:
            new.unlink(missing_ok=True)  # of a process that was killed
            _create_schema(f"sqlite:///{new}")
            new.replace(file)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)  # migrates the schema
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if new is not None:
            new.unlink(missing_ok=True)
        cause = (str(getattr(error, "orig", None) or error).splitlines() or [""])[0][:300]
        raise InputError(
            f"tracking.uri={redact(uri)!r}: the MLflow store does not answer: {redact(cause)}"
        ) from error
    return client


def _create_schema(uri: str) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # Without the client, whose stores live as long as the process.
    store = SqlAlchemyStore(uri, "mlruns")
    store.engine.dispose()


def is_outage(error: BaseException) -> bool:
    """Return whether an error of a store may be temporary: it does not answer, or it has a fault.

    False for a wrong password and for input that the store refuses.
    """
    from mlflow.exceptions import MlflowException

    cause = error.__cause__ if isinstance(error, InputError) else error
    temporary = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")
    return isinstance(cause, MlflowException) and cause.error_code in temporary


@contextlib.contextmanager
def store_lock(uri: str) -> Iterator[None]:
    """Hold the lock that serializes opening a SQLite store; do nothing for a server.

    Raises:
        InputError: The folder cannot be written, or another process keeps the lock for
            :data:`LOCK_SECONDS`.
    """
    file = sqlite_file(uri)
    if file is None:
        yield
        return
    lock = FileLock(f"{file}.lock", timeout=LOCK_SECONDS)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise InputError(
            f"tracking.uri: another process has held {file}.lock for {LOCK_SECONDS:.0f} s"
        ) from error
    except OSError as error:
        raise InputError(
            f"tracking.uri: cannot write in {file.parent}: {error.strerror}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def ui_command(uri: str, run: str = "") -> str:
    """Return the command that shows a store, or one run of it, in a browser; a server's address.

    Args:
        uri: Tracking URI, from :func:`tracking_uri`.
        run: Id of the run (of this package).
    """
    if uri.startswith(("http://", "https://")):
        return redact(uri)
    words = ["trishul", "ui", *([run] if run else [])]
    file, here = sqlite_file(uri), Path.cwd()
    usual = file is not None and uri == f"sqlite:///{file.parent / 'mlflow.db'}"
    if file is None or not usual or os.environ.get("MLFLOW_TRACKING_URI"):
        words += ["--uri", redact(uri)]
    elif file.parent != here / "runs" or os.environ.get("TRISHUL_RUNS"):
        folder = file.parent
        words += ["--runs", str(folder.relative_to(here) if here in folder.parents else folder)]
    return shlex.join(words)


def get_or_create_experiment(client: "MlflowClient", name: str, artifacts: Path | None) -> str:
    """Return the id of the MLflow experiment ``name``; create it if it does not exist.

    Args:
        client: Client of an opened store.
        name: Name of the experiment.
        artifacts: Folder for the artifacts of a new experiment; None leaves it to the server.

    Raises:
        InputError: The experiment was deleted in MLflow.
    """
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = None if artifacts is None else artifacts.absolute().as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)  # another process was faster
    if experiment is None or experiment.lifecycle_stage != "active":
        raise InputError(
            f"tracking.experiment={name!r} was deleted in MLflow: restore it there or choose "
            "another name"
        )
    return str(experiment.experiment_id)
