"""Open the MLflow store of runs: its address, its experiment, and its lock.

MLflow creates the schema of a SQLite store on first use, table by table, and does not support doing
so concurrently. Therefore, processes lock a file next to the database while opening it, and a new
database is renamed to its final name once it is complete.
"""

import contextlib
import json
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from trishul_ray.errors import InputError, first_line
from trishul_ray.runtime.lazy import mlflow
from trishul_ray.storage.durable import commit_file, make_folder
from trishul_ray.storage.redaction import MASK, redact

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.tracking import MlflowClient

#: Group of scores and losses. The capital places it first, since MLflow sorts in ASCII order.
SCORES = "Score/"
#: Name of a view of the list of runs, with these columns.
VIEW = "trishul"
_COLUMNS = (
    *(f"metrics.`{SCORES}{name}`" for name in ("accuracy", "f1", "loss")),
    "metrics.`total/uploaded_bytes`",
    *(f"params.`{name}`" for name in ("method.name", "method.lam", "partition.alpha", "seed")),
    "attributes.`Duration`",
)
_STATE = {"createdAt": 0, "state": json.dumps({"selectedColumns": _COLUMNS})}
#: Tags of an experiment. They make MLflow show training runs instead of language model
#: applications, and list the view in its menu.
_EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{VIEW}": json.dumps({"name": "Scores and settings", **_STATE}),
}
_VARIABLE = "MLFLOW_TRACKING_URI"
_SCHEMES = ("http://", "https://", "sqlite", "postgresql", "mysql", "mssql")
#: Environment variables that MLflow reads on import. They disable telemetry and printed addresses,
#: and limit how long an unavailable server blocks a run to about a minute.
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def tracking_uri(uri: str | None, runs: str) -> str:
    """Resolve the address of the store: ``uri``, MLFLOW_TRACKING_URI or ``<runs>/mlflow.db``.

    Raises:
        InputError: The address is not a SQLite file, a database or a server.
    """
    if uri is None:
        uri = os.environ.get(_VARIABLE) or None
    if uri is None:
        if "://" in runs and not runs.startswith("file://"):
            raise InputError(
                f"tracking.uri: storage.runs={runs!r} is remote and cannot contain a SQLite file; "
                f"set {_VARIABLE} to an MLflow server, or tracking.mlflow=false"
            )
        uri = f"{runs.removeprefix('file://')}/mlflow.db"
    if f"://{MASK}@" in uri:
        raise InputError(
            f"tracking.uri={uri!r}: credentials are not stored; set them again with tracking.uri "
            f"or {_VARIABLE}"
        )
    if uri.endswith(".db") and "://" not in uri:
        uri = f"sqlite:///{Path(uri).absolute()}"
    if not uri.startswith(_SCHEMES) or (uri.startswith("sqlite") and sqlite_file(uri) is None):
        raise InputError(
            f"tracking.uri={redact(uri)!r} must be a SQLite file (sqlite:///FILE.db), a server "
            "(http://HOST) or a database (postgresql://, mysql+pymysql://, mssql+pyodbc://)"
        )
    return uri


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a ``sqlite:///`` address, or None."""
    head, _, path = uri.partition("?")[0].partition(":///")
    is_file = head.startswith("sqlite") and path not in ("", ":memory:")
    return Path(path).absolute() if is_file else None


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def ui_command(uri: str) -> str:
    """Return the command that opens a store in a browser, or the address of a server."""
    if is_server(uri):
        return redact(uri)
    default = (
        uri == f"sqlite:///{Path(os.environ.get('TRISHUL_RUNS', 'runs'), 'mlflow.db').absolute()}"
    )
    return "trishul ui" if default else f"trishul ui --uri {shlex.quote(redact(uri))}"


def open_client(uri: str) -> "MlflowClient":
    """Create an MLflow client, and check that the store responds. The caller must hold its lock.

    Raises:
        InputError: The store cannot be opened.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    # Silence loggers that print pages for every new store, and errors that are also raised.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if (file := sqlite_file(uri)) is not None and not file.exists():
            new = file.with_name(f".{file.name}.new")
            new.unlink(missing_ok=True)  # left by a killed process
            try:
                SqlAlchemyStore(f"sqlite:///{new}", "mlruns").engine.dispose()
                commit_file(new, file)
            finally:
                new.unlink(missing_ok=True)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    except (mlflow.MlflowException, SQLAlchemyError, OSError, ImportError) as error:
        cause = redact(first_line(getattr(error, "orig", None) or error))[:300]
        message = f"tracking.uri={redact(uri)!r}: the MLflow store does not respond: {cause}"
        raise InputError(message) from error
    return client


def view_of(uri: str) -> str:
    """Return the URL fragment of the view of the only experiment, or of all experiments."""
    experiments = open_client(uri).search_experiments()
    found = [
        each.experiment_id for each in experiments if _EXPERIMENT_TAGS.keys() <= each.tags.keys()
    ]
    kind = "workflowType=machine_learning"  # otherwise MLflow shows language model applications
    if len(found) == 1:
        return f"#/experiments/{found[0]}/runs?{kind}&viewStateShareKey={VIEW}"
    return f"#/experiments?{kind}"


@contextlib.contextmanager
def opened(uri: str, name: str) -> "Iterator[tuple[MlflowClient, Experiment]]":
    """Open a store and the experiment ``name``, creating it if it does not exist.

    A SQLite file stays locked inside the context. Artifacts of a new experiment are stored in
    ``mlartifacts/`` next to the file.

    Raises:
        InputError: The store cannot be opened or written, or the experiment was deleted.
    """
    file = sqlite_file(uri)
    with contextlib.ExitStack() as stack:
        if file is not None:
            if file.is_dir():
                raise InputError(f"tracking.uri: {file} is a folder; choose another file")
            try:
                make_folder(file.parent)
                stack.enter_context(FileLock(f"{file}.lock", timeout=120, fallback_to_soft=False))
            except OSError as error:  # includes a timeout, if another process holds the lock
                raise InputError(f"tracking.uri: cannot write {file}: {error}") from error
        client = open_client(uri)
        try:
            if (found := client.get_experiment_by_name(name)) is None:
                artifacts = (file.parent / "mlartifacts").as_uri() if file else None
                with contextlib.suppress(mlflow.MlflowException):  # another process created it
                    client.create_experiment(name, artifacts, _EXPERIMENT_TAGS)
                found = client.get_experiment_by_name(name)
            if found is None or found.lifecycle_stage != "active":
                raise InputError(
                    f"tracking.experiment={name!r} was deleted in MLflow; restore it there or "
                    "choose another name"
                )
            yield client, found
        except mlflow.MlflowException as error:
            cause = redact(first_line(error))[:300]
            message = f"tracking.uri={redact(uri)!r}: MLflow rejected the request: {cause}"
            raise InputError(message) from error
