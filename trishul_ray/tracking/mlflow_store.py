"""Stores of MLflow: their addresses, how to open one, its experiments.

MLflow creates the schema of a SQLite store on first use, table by table, and cannot do so
concurrently: of four processes that open a new file together, three fail, and the file of a process
that is killed meanwhile never opens again. Hold :func:`store_lock`, a lock file beside the
database, while opening; a new database gets its name when it is complete.
"""

import contextlib
import json
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from trishul_ray.errors import InputError, first_line
from trishul_ray.runtime.lazy import mlflow
from trishul_ray.storage.durable import make_folder, put_in_place
from trishul_ray.storage.redaction import MASK, redact

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.tracking import MlflowClient

#: Group of scores and losses. MLflow shows groups in ASCII order, and metrics in no group after
#: all groups: a capital comes first.
SCORES = "Score/"

#: Seconds to wait for another process that is creating or migrating a store.
LOCK_SECONDS = 120.0

#: Name of a view of the list of runs, which the page of a store opens.
VIEW = "trishul"
#: Columns of that view, for as far as the runs have them; the scores are tasks' headlines.
_COLUMNS = (
    *(f"metrics.`{SCORES}{name}`" for name in ("accuracy", "f1", "loss")),
    *(f"params.`{name}`" for name in ("method.name", "method.lam", "partition.alpha", "seed")),
    "attributes.`Duration`",
)
#: Tags of an experiment: its page is one of training runs, not of language model applications, and
#: has a view, in the form in which MLflow saves those of its menu *Views*.
_EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{VIEW}": json.dumps(
        {
            "name": "Scores and settings",
            "createdAt": 0,
            "state": json.dumps({"selectedColumns": _COLUMNS}),
        }
    ),
}
#: Part of the address of MLflow's page, which otherwise shows language model applications.
TRAINING = "workflowType=machine_learning"


#: The variable that names a store where no field does, and the kinds of stores that there are.
_VARIABLE = "MLFLOW_TRACKING_URI"
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
#: Packages by the names of modules that drive databases, where these differ.
_DRIVERS = {"psycopg2": "psycopg2-binary", "psycopg": "psycopg[binary]", "MySQLdb": "mysqlclient"}

#: MLflow reads these when it is first imported. It sends no telemetry, does not let a lost server
#: block a run for minutes, as its 7 retries of 120 s would, and does not print the run's address.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def tracking_uri(uri: str | None, runs: str) -> str:
    """Return the MLflow tracking URI of a run.

    ``uri`` is ``tracking.uri`` of the experiment (a bare path is a SQLite file), else that of the
    environment variable ``MLFLOW_TRACKING_URI``, else ``<runs>/mlflow.db``.

    Raises:
        InputError: The store is neither a database nor a server, or an in-memory database; or there
            is no ``uri`` and ``runs`` is remote.
    """
    named = os.environ.get(_VARIABLE) or None
    if uri is None or (named is not None and uri == redact(named)):  # as a run has written it
        uri = named
    if uri is not None and f"://{MASK}@" in uri:
        raise InputError(
            f"tracking.uri={uri!r}: {MASK} is in the place of credentials, which are never "
            f"written; name them again, by tracking.uri or {_VARIABLE}"
        )
    if uri is None:
        if "://" in runs and not runs.startswith("file://"):
            raise InputError(
                f"tracking.uri: name an MLflow server, since storage.runs={runs!r} is remote and "
                "cannot hold a SQLite file (or set tracking.mlflow=false)"
            )
        return sqlite_uri(Path(runs.removeprefix("file://")).absolute() / "mlflow.db")
    scheme = urlsplit(uri).scheme
    if not scheme and uri.endswith(".db"):
        return sqlite_uri(Path(uri).absolute())
    if scheme.partition("+")[0] not in _SCHEMES:
        raise InputError(
            f"{_as_set(uri)}: name sqlite:///<file>.db, http(s)://<server>, or a postgresql://, "
            "mysql+pymysql:// or mssql+pyodbc:// database (MLflow no longer writes folders of "
            "files, and a server of Databricks is not supported)"
        )
    if scheme == "sqlite" and sqlite_file(uri) is None:
        raise InputError(f"{_as_set(uri)}: name a file, sqlite:///<path>.db")
    return uri


def _as_set(uri: str) -> str:
    """Return a URI, without credentials, with the variable or the field that has set it."""
    name = _VARIABLE if os.environ.get(_VARIABLE) == uri else "tracking.uri"
    return f"{name}={redact(uri)!r}"


def sqlite_uri(file: Path) -> str:
    """Return the URI of a SQLite file; an InputError for a path that would be read as another."""
    if wrong := {"?", "%"} & {*str(file)}:
        raise InputError(
            f"tracking.uri: MLflow reads {' and '.join(sorted(wrong))} in the path {file} as "
            "something else; choose another folder, or set tracking.mlflow=false"
        )
    return f"sqlite:///{file}"


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a ``sqlite:///`` URI; None for other stores and in-memory databases."""
    head, _, path = uri.partition(":///")
    path = path.partition("?")[0]
    if head.partition("+")[0] != "sqlite" or not path or path == ":memory:":
        return None
    return Path(path).absolute()


def is_server(uri: str) -> bool:
    """Return whether a store is a server, which is reached over HTTP."""
    return uri.startswith(("http://", "https://"))


def ui_command(uri: str, run: str = "") -> str:
    """Return the command that shows a store, or one run of it, in a browser; a server's address."""
    if is_server(uri):
        return redact(uri)
    words = ["trishul", "ui", *([run] if run else [])]
    file, here = sqlite_file(uri), Path.cwd()
    usual = file is not None and uri == sqlite_uri(file.parent / "mlflow.db")
    if file is None or not usual or os.environ.get("MLFLOW_TRACKING_URI"):
        words += ["--uri", redact(uri)]
    elif file.parent != here / "runs" or os.environ.get("TRISHUL_RUNS"):
        folder = file.parent
        words += ["--runs", str(folder.relative_to(here) if here in folder.parents else folder)]
    return shlex.join(words)


def open_client(uri: str) -> "MlflowClient":
    """Return an MLflow client whose store exists and answers; the caller holds its lock.

    Raises:
        InputError: The store cannot be created, is not a database, is one of another version of
            MLflow, does not answer, or needs a package that is not installed.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
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
            # Without the client, whose stores live as long as the process.
            SqlAlchemyStore(sqlite_uri(new), "mlruns").engine.dispose()
            put_in_place(new, file)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)  # migrates the schema
    except (mlflow.MlflowException, SQLAlchemyError, OSError) as error:
        if new is not None:
            new.unlink(missing_ok=True)
        cause = redact((str(getattr(error, "orig", None) or error).splitlines() or [""])[0])
        fault = f"the MLflow store does not answer: {cause[:300]}"
        if "database schema (found version" in cause:
            fault = (
                f"its database is not of MLflow {mlflow.__version__}: back it up, then run mlflow "
                f"db upgrade {shlex.quote(redact(uri))}; one of a newer MLflow needs pip install "
                "--upgrade mlflow, or name another store"
            )
        raise InputError(f"{_as_set(uri)}: {fault}") from error
    except ImportError as error:
        module = error.name or first_line(error)
        package = shlex.quote(_DRIVERS.get(module, module))
        raise InputError(
            f"{_as_set(uri)}: this database needs a package that is not installed: "
            f"pip install {package}"
        ) from error
    return client


@contextlib.contextmanager
def store_lock(uri: str) -> Iterator[None]:
    """Hold the lock that serializes opening a SQLite store; do nothing for a server.

    A folder that cannot be written is an InputError, as is a lock that stays taken.
    """
    file = sqlite_file(uri)
    if file is None:
        yield
        return
    lock = FileLock(f"{file}.lock", timeout=LOCK_SECONDS)
    try:
        make_folder(file.parent)
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


@contextlib.contextmanager
def opened(uri: str, name: str) -> "Iterator[tuple[MlflowClient, Experiment]]":
    """Open a store and its experiment of this name, and keep the store's lock.

    An InputError says that the store does not answer or cannot be written, or that the experiment
    was deleted.
    """
    with store_lock(uri):
        client = open_client(uri)
        with refusals(uri):
            yield client, get_or_create_experiment(client, name, sqlite_file(uri))


@contextlib.contextmanager
def refusals(uri: str) -> Iterator[None]:
    """Raise what a store that has answered refuses as an InputError."""
    try:
        yield
    except mlflow.MlflowException as error:
        cause = redact(first_line(error))[:300]
        raise InputError(f"{_as_set(uri)}: the MLflow store refuses: {cause}") from error


def get_or_create_experiment(
    client: "MlflowClient", name: str, database: Path | None
) -> "Experiment":
    """Return the MLflow experiment ``name``; create it if it does not exist.

    The artifacts of a new one go to ``mlartifacts/`` beside the database, or are left to a server.
    It is marked as one of training runs, and has the view :data:`VIEW`. A deleted one is an
    InputError.
    """
    if (experiment := client.get_experiment_by_name(name)) is None:
        artifacts = (database.parent / "mlartifacts").absolute().as_uri() if database else None
        try:
            client.create_experiment(name, artifact_location=artifacts, tags=_EXPERIMENT_TAGS)
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was faster
                raise
        experiment = client.get_experiment_by_name(name)
    if experiment is None or experiment.lifecycle_stage != "active":
        raise InputError(
            f"tracking.experiment={name!r} was deleted in MLflow: restore it there or choose "
            "another name"
        )
    for key, value in _EXPERIMENT_TAGS.items():
        if key not in experiment.tags:  # that of an earlier version
            client.set_experiment_tag(experiment.experiment_id, key, value)
    return experiment


def place_of(uri: str, experiment_name: str) -> list[str]:
    """Return where a run is logged, without credentials; see :attr:`Tracker.place`."""
    return [redact(uri), experiment_name]
