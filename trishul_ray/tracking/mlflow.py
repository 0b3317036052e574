"""Runs in MLflow: the store, one run per experiment, and the parent run of a sweep.

An experiment has one run, however often it is stopped and resumed. All calls go through
``MlflowClient`` with an explicit run id. There is no active run and no global tracking URI, so that
one process can hold any number of runs. A run is found again by a tag that the request that creates
it sets, so a driver that is killed at any moment continues its run.

MLflow creates the schema of a SQLite store on first use, table by table, and cannot do so
concurrently: of four processes that open a new file together, three fail, and the file of a process
that is killed meanwhile never opens again. Hold :func:`store_lock`, a lock file beside the
database, while opening; a new database gets its name when it is complete.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import tenacity
from filelock import FileLock, Timeout

from trishul_ray.errors import InputError, RunError, first_line, first_of
from trishul_ray.lazy import mlflow
from trishul_ray.redaction import MASK, is_secret_name, redact
from trishul_ray.storage import Store

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Metric, Run, RunTag
    from mlflow.tracking import MlflowClient

ATTEMPT_TAG = "trishul.attempt"
#: Tag of a run: the id of its experiment.
ID_TAG = "trishul.id"
#: Tag of a deleted run: the attempt that has replaced it.
REPLACED_TAG = "trishul.replaced_by"
#: Tag of the run of a cell that early stopping ended: after which round, at which score.
STOPPED_TAG = "trishul.stopped"
#: Beginning of the tag of the run of a cell that names a sweep; the value is the profile.
SWEEP_TAG = "sweep."
PARENT_TAG = "mlflow.parentRunId"
#: Tag of a short run in a sweep: the MLflow run of the same cell, which has everything.
SHARED_TAG = "trishul.shared_run"
#: Tag of a short run: the id of its experiment, whose run it is not.
SHARED_ID_TAG = "trishul.shared_id"
#: Tag of a sweep's cell: its name.
CELL_TAG = "cell"
#: Beginning of the tags of a cell's labels, by axis. They are parameters, too: MLflow compares runs
#: by the first that differ, in the order of names.
AXIS_TAG = "axis."
#: Group of scores and losses. MLflow shows groups in ASCII order, and metrics in no group after
#: all groups: a capital comes first.
SCORES = "Score/"
#: Metric logged last in every round: a round that has it was logged completely.
ROUND_METRIC = "round"

#: Seconds to wait for another process that is creating or migrating a store.
LOCK_SECONDS = 120.0
#: Seconds for which a server that has answered before may be gone. It takes a minute to start.
OUTAGE_SECONDS = 300.0

#: Rounds that end within so many seconds of the last request are sent together: a SQLite store
#: takes 20 ms for a request of any size, which is much beside a round of a small model.
ROUNDS_SECONDS = 1.0

#: Name of the view of the list of runs that :func:`page_of_run` opens.
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
#: What MLflow's page needs to know in its address: it opens as one of language model applications.
_TRAINING = "workflowType=machine_learning"

#: MLflow's own port, which is tried first for its page.
FIRST_PORT = 5000

#: The variable that names a store where no field does, and the kinds of stores that there are.
_VARIABLE = "MLFLOW_TRACKING_URI"
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
#: Packages by the names of modules that drive databases, where these differ.
_DRIVERS = {"psycopg2": "psycopg2-binary", "psycopg": "psycopg[binary]", "MySQLdb": "mysqlclient"}
#: Characters that have a meaning in a pattern or end a text.
_NO_PATTERN = str.maketrans("", "", "'%_\\")

_PARAM_VALUE_LIMIT = 6000  # MLflow's MAX_PARAM_VAL_LENGTH
_TAG_VALUE_LIMIT = 5000  # the smallest limit among MLflow's stores
_KEY_LIMIT = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000

#: MLflow reads these when it is first imported. It sends no telemetry, does not let a lost server
#: block a run for minutes, as its 7 retries of 120 s would, and does not print the run's address.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}

Status = Literal["FINISHED", "FAILED", "KILLED"]
Scalar = str | int | float | bool | None
T = TypeVar("T")


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
            new.replace(file)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)  # migrates the schema
    except (mlflow.MlflowException, SQLAlchemyError, OSError) as error:
        if new is not None:
            new.unlink(missing_ok=True)
        cause = redact((str(getattr(error, "orig", None) or error).splitlines() or [""])[0])
        fault = _other_version(uri, cause) or f"the MLflow store does not answer: {cause[:300]}"
        raise InputError(f"{_as_set(uri)}: {fault}") from error
    except ImportError as error:
        module = error.name or first_line(error)
        package = shlex.quote(_DRIVERS.get(module, module))
        raise InputError(
            f"{_as_set(uri)}: this database needs a package that is not installed: "
            f"pip install {package}"
        ) from error
    return client


def _other_version(uri: str, cause: str) -> str:
    """Return what to do about a database of another version of MLflow; empty if it is not that."""
    found = re.search(r"database schema \(found version (\w+)", cause)
    if found is None:
        return ""
    steps = Path(str(mlflow.__file__)).parent / "store" / "db_migrations" / "versions"
    if any(steps.glob(f"{found[1]}_*.py")):
        return (
            f"its database is of an earlier MLflow than {mlflow.__version__}: back it up, then run "
            f"mlflow db upgrade {shlex.quote(redact(uri))}"
        )
    return (
        f"its database is of a newer MLflow than {mlflow.__version__}, which cannot read it: "
        "pip install --upgrade mlflow, or name another store"
    )


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


@contextlib.contextmanager
def _opened(uri: str, name: str) -> "Iterator[tuple[MlflowClient, Experiment]]":
    """Open a store and its experiment of this name, and keep the store's lock.

    An InputError says that the store does not answer or cannot be written, or that the experiment
    was deleted.
    """
    with store_lock(uri):
        client = open_client(uri)
        with _refusals(uri):
            yield client, get_or_create_experiment(client, name, sqlite_file(uri))


@contextlib.contextmanager
def _refusals(uri: str) -> Iterator[None]:
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


def _all_runs(client: "MlflowClient", experiment: "Experiment", wanted: str) -> "list[Run]":
    """Return the runs that MLflow's filter finds, the oldest first."""
    runs: list[Run] = []
    token: str | None = None
    while token is None or token:
        page = client.search_runs(
            [experiment.experiment_id], wanted, order_by=["start_time ASC"], page_token=token
        )
        runs += page
        token = page.token or ""
    return runs


def _runs_of(client: "MlflowClient", experiment: "Experiment", attempt: str) -> "list[Run]":
    return _all_runs(client, experiment, f"tags.`{ATTEMPT_TAG}` = '{attempt}'")


def has_finished(uri: str, experiment_name: str, attempt: str) -> bool:
    """Return whether the run of an attempt has finished in an experiment of a store."""
    with _opened(uri, experiment_name) as (client, experiment):
        found = _runs_of(client, experiment, attempt)
    return any(run.info.status == "FINISHED" for run in found)


def has_finished_in(file: Path, attempt: str) -> bool:
    """Return whether the run of an attempt has finished in a SQLite store, read without MLflow.

    False if the file is missing, busy, or not such a store.
    """
    wanted = (
        "select 1 from tags join runs using (run_uuid) where tags.key = ? and tags.value = ?"
        " and runs.status = 'FINISHED' and runs.lifecycle_stage = 'active'"
    )
    return bool(_read(file, wanted, (ATTEMPT_TAG, attempt)))


def _read(file: Path, query: str, values: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return the rows of a query; none if the database is missing, busy, or not MLflow's."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=1)
        ) as database:
            return database.execute(query, values).fetchall()
    except sqlite3.Error:
        return []


def replace_run(uri: str, experiment_name: str, attempt: str, by: str) -> None:
    """Delete the runs of an attempt, with the tag that another one replaces them."""
    with _opened(uri, experiment_name) as (client, experiment):
        for run in _runs_of(client, experiment, attempt):
            client.set_tag(run.info.run_id, REPLACED_TAG, by)
            client.delete_run(run.info.run_id)


def place_of(uri: str, experiment_name: str) -> list[str]:
    """Return where a run is logged, without credentials; see :attr:`Tracker.place`."""
    return [redact(uri), experiment_name]


def is_outage(error: BaseException) -> bool:
    """Return whether an error of a store may be temporary: it does not answer, or it has a fault.

    False for a wrong password and for input that the store refuses.
    """
    cause = error.__cause__ if isinstance(error, InputError) else error
    # BAD_REQUEST says that the server's database gave up, e.g. on a request that timed out and was
    # sent again while the first went on. Input that it refuses is INVALID_PARAMETER_VALUE.
    temporary = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "BAD_REQUEST")
    return isinstance(cause, mlflow.MlflowException) and cause.error_code in temporary


def _retrying(patience: float) -> tenacity.Retrying:
    """Return what calls a function again while a server is gone, for ``patience`` seconds."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_outage),
        wait=tenacity.wait_exponential(multiplier=1, max=10),
        stop=tenacity.stop_before_delay(patience),
        reraise=True,
    )


def _patience(uri: str) -> float:
    return OUTAGE_SECONDS if is_server(uri) else 0.0


class Connection:
    """MLflow's client of a store, which may be gone for a while: a server is waited for, once.

    ``patience`` is for how many seconds it may be gone from now on.
    """

    def __init__(self, client: "MlflowClient", uri: str) -> None:
        self.client, self.uri, self.patience = client, uri, _patience(uri)

    def wait_for(self, action: Callable[[], T]) -> T:
        """Return what a call returns, however long a server that is gone may be waited for."""
        try:
            return _retrying(self.patience)(action)
        except mlflow.MlflowException as error:
            if is_outage(error):
                self.patience = 0.0
            raise


class Tracker:
    """Receives what a run logs, and discards it: the tracker of ``tracking.mlflow=false``.

    Attributes:
        run_id: Id of the tracking run, if there is one.
        place: The tracking URI, without credentials, and the experiment's name, if there are any.
    """

    run_id: str | None = None
    place: list[str] | None = None

    def log_round(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round, unless the round is logged already."""

    def log_totals(
        self, step: int, metrics: Mapping[str, float], tags: Mapping[str, Scalar]
    ) -> None:
        """Log metrics of the whole run, at its last round, and tags."""

    def log_data(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
    ) -> None:
        """Log the rows that the run reads as a dataset input, once, however often it is resumed.

        ``digest`` has at most 36 characters; ``profile`` holds facts about the rows.
        """

    def log_artifacts(self, folder: Path | str) -> None:
        """Log every file of a local folder; raise InputError if it is not a folder."""

    def finish(self, status: Status = "FINISHED", *, keep_end: bool = False) -> list[str]:
        """End the run; return what the tracking store did not accept.

        With ``keep_end``, a run that had finished before it was opened keeps the time of its end.
        """
        return []

    def ui_command(self, run: str = "") -> str | None:
        """Return the command, or the address, that shows the run with this id in a browser."""
        return None


class MlflowRun(Tracker):
    """A run in an MLflow store. Create it with :meth:`open`.

    A store that fails while the run goes on does not stop it: what it has not taken is kept, in
    order, and sent with what is logged later, at the latest by :meth:`finish`, which waits for a
    server that is gone, and lists what the store did not accept.
    """

    def __init__(
        self,
        store: Connection,
        experiment: "Experiment",
        run: "Run",
        logged: set[int] | None = None,
    ) -> None:
        self._store = store
        self._experiment = experiment
        self._known = run.data.params
        self._values = run.data.metrics  # as they were when it was opened
        self._ended = run.info.end_time if run.info.status == "FINISHED" else None
        self._id: str = run.info.run_id
        self.run_id = self._id
        self.place = place_of(store.uri, experiment.name)
        self._logged = logged  # None: the store is asked
        self._rounds: dict[int, dict[str, float]] = {}
        self._rounds_sent = -math.inf
        self._unsent: deque[tuple[str, Callable[[], object]]] = deque()
        self._rejected: list[str] = []
        self._next_try = -math.inf  # when a store that did not answer is asked again

    @classmethod
    def open(
        cls,
        uri: str,
        experiment_name: str,
        attempt: str,
        run_name: str,
        params: Mapping[str, Scalar],
        tags: Mapping[str, Scalar] | None = None,
        parent_run: str | None = None,
    ) -> Self:
        """Find the run of an attempt, or create it; ``parent_run`` is that of its sweep.

        Secrets in parameters and tags are masked or omitted, long values cut. MLflow allows no
        change of a parameter: changed ones go into the tag ``trishul.resumed_with``.

        Raises:
            InputError: The store does not answer or cannot be written, or the experiment was
                deleted.
        """
        if not attempt or not attempt.isascii() or "'" in attempt or "\\" in attempt:
            raise InputError(f"attempt={attempt!r}: use ASCII letters, digits, '-', '_', '.', ':'")
        all_tags = _public(tags or {}, _TAG_VALUE_LIMIT) | {ATTEMPT_TAG: attempt}
        if parent_run is not None:
            all_tags[PARENT_TAG] = parent_run
        # The run of a sweep has found the server before: it is gone for a while, not misspelt.
        retrying = _retrying(0.0 if parent_run is None else _patience(uri))
        self = retrying(cls._find_or_create, uri, experiment_name, attempt, run_name, all_tags)
        with _refusals(uri):
            retrying(self._log_params, _public(params, _PARAM_VALUE_LIMIT))
        return self

    @classmethod
    def _find_or_create(
        cls, uri: str, experiment_name: str, attempt: str, run_name: str, tags: Mapping[str, str]
    ) -> Self:
        # Keep the lock from the search to the creation: two drivers of one attempt share a run.
        with _opened(uri, experiment_name) as (client, experiment):
            found = _runs_of(client, experiment, attempt)
            if not found:
                number = experiment.experiment_id
                run = client.create_run(number, tags=dict(tags), run_name=run_name)
                return cls(Connection(client, uri), experiment, run, logged=set())
            run = found[0]
            if run.info.status != "RUNNING":
                client.update_run(run.info.run_id, status="RUNNING")
        return cls(Connection(client, uri), experiment, run)

    def _log_params(self, params: Mapping[str, str]) -> None:
        client, known = self._store.client, self._known
        new = [(key, value) for key, value in params.items() if key not in known]
        for batch in _batches(new, _PARAMS_PER_BATCH):
            client.log_batch(self._id, params=[mlflow.entities.Param(*each) for each in batch])
        changed = {k: v for k, v in params.items() if k in known and known[k] != v}
        if changed:
            text = json.dumps(changed, sort_keys=True)
            client.set_tag(self._id, "trishul.resumed_with", text[:_TAG_VALUE_LIMIT])

    def log_round(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round: now, or with a later one if rounds are short.

        A process that is killed loses those that wait: the next one logs them from the checkpoint.
        """
        self._rounds.setdefault(step, dict(metrics))
        if time.monotonic() - self._rounds_sent >= ROUNDS_SECONDS:
            self._send_rounds()

    def _send_rounds(self, totals: "Sequence[Metric]" = (), tags: "Sequence[RunTag]" = ()) -> None:
        """Send the rounds that wait, and what is known of the whole run, in one request."""
        rounds, self._rounds = self._rounds, {}
        if not rounds and not totals and not tags:
            return
        words = []
        if rounds:
            first, last = min(rounds), max(rounds)
            words = [f"round {first}" if first == last else f"rounds {first} to {last}"]
            self._rounds_sent = time.monotonic()
        words += ["totals"] * bool(totals or tags)
        self._log(" and ".join(words), partial(self._log_rounds, rounds, totals, tags))

    def _log_rounds(
        self,
        rounds: Mapping[int, Mapping[str, float]],
        totals: "Sequence[Metric]",
        tags: "Sequence[RunTag]",
    ) -> None:
        new = rounds.keys() - self.logged_steps()
        points = [
            point
            for step in sorted(new)
            for point in _points({**rounds[step], ROUND_METRIC: step}, step)
        ]
        for batch in _batches([*points, *totals], _METRICS_PER_BATCH) or [()] * bool(tags):
            self._store.client.log_batch(self._id, metrics=batch, tags=tags)
        self.logged_steps().update(new)

    def logged_steps(self) -> set[int]:
        """Return the rounds that this process or an earlier one has logged completely."""
        if self._logged is None:
            history = self._store.client.get_metric_history(self._id, ROUND_METRIC)
            self._logged = {int(point.step) for point in history}
        return self._logged

    def log_totals(
        self, step: int, metrics: Mapping[str, float], tags: Mapping[str, Scalar]
    ) -> None:
        """Log metrics of the whole run, at its last round, and tags."""
        public = _public(tags, _TAG_VALUE_LIMIT)
        marks = [mlflow.entities.RunTag(name, value) for name, value in public.items()]
        # Those that a process which was killed has logged are there already.
        new = {name: value for name, value in metrics.items() if self._values.get(name) != value}
        self._send_rounds(_points(new, step), marks)

    def log_data(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
    ) -> None:
        """Log a dataset input, which MLflow adds only once."""
        dataset = mlflow.entities.Dataset(
            name=name,
            digest=digest,
            source_type=source.partition(":")[0],
            source=json.dumps({"source": redact(source)}),
            profile=json.dumps(dict(profile)),
        )
        marks = [mlflow.entities.InputTag("mlflow.data.context", context)]
        inputs = [mlflow.entities.DatasetInput(dataset, marks)]
        client = self._store.client
        self._log(f"dataset {name}", lambda: client.log_inputs(self._id, datasets=inputs))

    def log_artifacts(self, folder: Path | str) -> None:
        """Log every file of a local folder; raise InputError if it is not a folder."""
        if not Path(folder).is_dir():
            raise InputError(f"artifacts: {folder} is not a folder")

        def upload() -> None:
            if not Path(folder).is_dir():  # it was temporary, and the store was gone for too long
                raise FileNotFoundError(folder)
            self._store.client.log_artifacts(self._id, str(folder))

        self._log(f"folder {folder}", upload, wait=True)

    def finish(self, status: Status = "FINISHED", *, keep_end: bool = False) -> list[str]:
        """End the run with ``status``; return what the store did not accept, e.g. ``round 3``.

        A run that was stopped (``KILLED``) does not wait for a server.
        """
        if status == "KILLED":
            self.stop_waiting()
        client = self._store.client
        ended = self._ended if keep_end else None
        end = partial(client.set_terminated, self._id, status, ended)
        self._log(f"status {status}", end, wait=True)
        rejected, self._rejected = self._rejected, []
        return [*rejected, *(what for what, _ in self._unsent)]

    def stop_waiting(self) -> None:
        """From now on, give up at once what a server that is gone does not accept."""
        self._store.patience = 0.0

    def ui_command(self, run: str = "") -> str:
        """Return the command that shows the run with this id, or its address on a server."""
        page = f"#/experiments/{self._experiment.experiment_id}/runs/{self._id}?{_TRAINING}"
        uri = self._store.uri
        return f"{redact(uri).rstrip('/')}/{page}" if is_server(uri) else ui_command(uri, run)

    def _log(self, what: str, action: Callable[[], object], *, wait: bool = False) -> None:
        """Send all that is not sent, and this, in order; note ``what`` the store refuses."""
        self._send_rounds()
        self._unsent.append((what, action))
        if not wait and time.monotonic() < self._next_try:
            return
        while self._unsent:
            what, action = self._unsent[0]
            began = time.monotonic()
            try:
                self._store.wait_for(action) if wait else action()
            except (mlflow.MlflowException, OSError) as error:
                if is_outage(error):
                    # A server that hangs takes minutes to give up on: a tenth of the run's time.
                    self._next_try = time.monotonic() + 10 * (time.monotonic() - began)
                    return
                code = getattr(error, "error_code", None)
                gone = "'active' state" in str(error)  # the run was deleted in MLflow
                if what.startswith("round") and code == "INVALID_PARAMETER_VALUE" and not gone:
                    raise  # a metric's name is invalid: a bug here, not a fault of the store
                self._rejected.append(f"{what} ({redact(first_line(error))})")
            self._unsent.popleft()


class SweepRun(MlflowRun):
    """The run of one sweep, the parent of the runs of its cells. Create it with :meth:`open`.

    A cell's run is found by the tag ``sweep.<name>`` with the sweep's profile as value. A run that
    another sweep or a single run has logged keeps its parent, and gets that tag, too. As MLflow
    shows a run below one parent, this sweep then gets a short run in its place: with this sweep's
    labels as name, parameters and tags, the parameters and scores of the cell, and the tag
    :data:`SHARED_TAG`, but without :data:`ID_TAG`, by which every experiment has one run.
    """

    def settle(
        self,
        cells: Mapping[str, Mapping[str, str]],
        finished: Mapping[str, str | None],
        failed: Callable[[str], bool],
        records: Callable[[str], Sequence[Mapping[str, float]] | None],
        stopped: Mapping[str, str] = MappingProxyType({}),
    ) -> list[str]:
        """Bring the runs of all cells into line with their results, once no cell is running.

        A run that is still open is completed if its cell has finished (its process was killed after
        it had written the result), and otherwise ends as ``FAILED`` or ``KILLED``; so does one that
        ended as ``FAILED`` although its cell did not fail. Cells that were logged by another sweep
        or a single run get the tag of this sweep, which gets a short run for each.

        ``cells`` are the tags of each cell, ``finished`` the MLflow run of each finished one, as in
        its result, and ``stopped`` why early stopping ended one, all by id. ``failed`` tells
        whether a cell has failed, and ``records`` gives its rounds, or None if it has not finished.
        Returns what the tracking store did not accept.
        """
        rejected: list[str] = []
        try:
            children = self._store.wait_for(self._children)
        except mlflow.MlflowException as error:
            return [first_line(error)]
        for id, child in children.items():
            if child.info.status not in ("RUNNING", "FAILED"):
                continue
            ended: Status = "FAILED" if id in cells and failed(id) else "KILLED"
            # A run that is interrupted may see its actors end first, and take that for a failure.
            if child.info.status == "FAILED" and (id not in cells or ended == "FAILED"):
                continue
            run = MlflowRun(self._store, self._experiment, child)
            rounds = records(id) if id in cells else None
            for each in rounds or ():
                metrics = {name: value for name, value in each.items() if name != "round"}
                run.log_round(int(each["round"]), metrics)
            missing = run.finish("FINISHED" if rounds is not None else ended)
            rejected += [f"{what} of {child.info.run_name}" for what in missing]
        for id in stopped.keys() & children.keys():
            self._add_tags(children[id].info.run_id, {STOPPED_TAG: stopped[id]})
        for id, found in finished.items():
            if id not in children and found is not None:
                marks = {k: v for k, v in cells[id].items() if k.startswith(SWEEP_TAG)}
                self._add_tags(found, marks)
        return rejected

    def add_shared(
        self,
        cells: Mapping[str, Mapping[str, str]],
        records: Callable[[str], Sequence[Mapping[str, float]] | None],
    ) -> list[str]:
        """Give this sweep a short run for each finished cell whose run is not below its own.

        ``cells`` are the tags of each cell, and ``records`` gives its rounds, both by id. The short
        run of a cell that was run afresh since is replaced. Returns what the tracking store did not
        accept.
        """
        try:
            with _refusals(self._store.uri):
                runs, shorts = self._store.wait_for(partial(self._cells_and_shorts, cells))
                for id, tags in cells.items():
                    whole, short = runs.get(id), shorts.get(id)
                    below = whole is not None and whole.data.tags.get(PARENT_TAG) == self._id
                    current = (
                        whole is not None
                        and short is not None
                        and (
                            short.data.tags[SHARED_TAG] == whole.info.run_id
                            and short.info.status == "FINISHED"
                        )
                    )
                    if short is not None and (below or not current):
                        self._store.client.delete_run(short.info.run_id)
                    if whole is None or below or current:
                        continue
                    if whole.info.status == "FINISHED" and (rounds := records(id)) is not None:
                        self._add_short(id, whole, tags, rounds)
        except (mlflow.MlflowException, InputError) as error:
            return [f"runs of shared cells ({redact(first_line(error))})"]
        return []

    def _add_short(
        self,
        id: str,
        whole: "Run",
        tags: Mapping[str, str],
        rounds: Sequence[Mapping[str, float]],
    ) -> None:
        marks = {
            **{k: v for k, v in tags.items() if not k.startswith(SWEEP_TAG)},
            PARENT_TAG: self._id,
            SHARED_TAG: whole.info.run_id,
            SHARED_ID_TAG: id,
            "mlflow.note.content": "Scores of a run that this sweep shares. All of it: "
            f"[{whole.info.run_name}](#/experiments/{self._experiment.experiment_id}/runs/"
            f"{whole.info.run_id}?{_TRAINING})",
        }
        axes = {k: v for k, v in tags.items() if k.startswith(AXIS_TAG)}
        params = {k: v for k, v in whole.data.params.items() if not k.startswith(AXIS_TAG)}
        client, began = self._store.client, whole.info.start_time
        number, name = self._experiment.experiment_id, tags.get(CELL_TAG, whole.info.run_name)
        short = client.create_run(number, began, _public(marks, _TAG_VALUE_LIMIT), name)
        run = MlflowRun(self._store, self._experiment, short, logged=set())
        run._log_params({**_public(axes, _PARAM_VALUE_LIMIT), **params})
        points = [
            point
            for each in rounds
            for point in _points(
                {k: v for k, v in each.items() if k.startswith(SCORES)}, int(each["round"])
            )
        ]
        for batch in _batches(points, _METRICS_PER_BATCH):
            client.log_batch(run._id, metrics=batch)
        client.set_terminated(run._id, "FINISHED", whole.info.end_time)

    def _cells_and_shorts(
        self, cells: Mapping[str, Mapping[str, str]]
    ) -> "tuple[dict[str, Run], dict[str, Run]]":
        """Return the runs of this sweep's cells, and the short ones below it, by experiment id."""
        client, experiment = self._store.client, self._experiment
        below = _all_runs(client, experiment, f"tags.`{PARENT_TAG}` = '{self._id}'")
        shorts = {
            run.data.tags[SHARED_ID_TAG]: run for run in below if SHARED_ID_TAG in run.data.tags
        }
        runs = self._children()
        for id in cells.keys() - runs.keys():  # logged from its files, for another sweep
            for run in _all_runs(client, experiment, f"tags.`{ID_TAG}` = '{id}'"):
                runs[id] = run
        return runs, shorts

    def close(self, counts: Mapping[str, int], status: Status) -> list[str]:
        """Log how many cells are in which state, and end the run; return what was not accepted."""
        self.log_totals(0, {}, {f"cells.{name}": count for name, count in counts.items()})
        return self.finish(status)

    def _children(self) -> "dict[str, Run]":
        """Return the runs of this sweep's cells, by the id of their experiment."""
        client = self._store.client
        tags = client.get_run(self._id).data.tags
        marked = f"tags.`{SWEEP_TAG}{tags['sweep']}` = '{tags['profile']}'"
        runs = _all_runs(client, self._experiment, marked)
        return {run.data.tags[ID_TAG]: run for run in runs if ID_TAG in run.data.tags}

    def _add_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Add the tags that a run does not have; nothing if it was logged to another store."""

        def add() -> None:
            run = self._store.client.get_run(run_id)
            for key in tags.keys() - run.data.tags.keys():
                self._store.client.set_tag(run_id, key, tags[key])

        with contextlib.suppress(mlflow.MlflowException):
            self._store.wait_for(add)


@dataclass(frozen=True)
class SweepTracking:
    """The MLflow run of a sweep, the same one at every call.

    Attributes:
        uri: Address of the MLflow store.
        experiment: Name of the MLflow experiment.
        runs: Folder of the sweep's runs.
        tags: ``sweep``, its name, ``profile``, and what else is noted.
        params: Labels of its axes.
        cells: Ids of its cells if the sweep has no name of its own.
    """

    uri: str
    experiment: str
    runs: Store
    tags: Mapping[str, str]
    params: Mapping[str, str]
    cells: tuple[str, ...]

    def open(self) -> SweepRun:
        """Create the run, or open it.

        Raises:
            InputError: The tracking store cannot be used.
        """
        name = f"{self.tags['sweep']}-{self.tags['profile']}"
        return SweepRun.open(
            self.uri, self.experiment, f"sweep-{self._key}", name, self.params, self.tags
        )

    @property
    def command(self) -> str:
        """The command that shows the store in a browser, or its address."""
        return ui_command(self.uri)

    def note(self, results: Mapping[str, str]) -> None:
        """Note beside the runs that the store has these results, checksums by id."""
        self._notes.write(f"{self._key}.json", json.dumps(self._logged(results)).encode())

    def has(self, results: Mapping[str, str]) -> bool:
        """Return whether the store has these results, as :meth:`note` noted.

        A file must have the sweep's run: it may be another file by now. A server is not asked.
        """
        file = sqlite_file(self.uri)
        try:
            noted = json.loads(self._notes.read(f"{self._key}.json"))
        except (FileNotFoundError, ValueError):
            return False
        return noted == self._logged(results) and (
            file is None or has_finished_in(file, f"sweep-{self._key}")
        )

    def _logged(self, results: Mapping[str, str]) -> dict[str, object]:
        place = {"uri": redact(self.uri), "experiment": self.experiment}
        return {**place, "results": dict(results), "shared": True}  # as add_shared logs them

    @property
    def _notes(self) -> Store:
        return self.runs.child("sweeps")

    @property
    def _key(self) -> str:
        names = [self.tags["sweep"], self.tags["profile"], self.runs.uri, *self.cells]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _points(metrics: Mapping[str, float], step: int) -> "list[Metric]":
    now = int(time.time() * 1000)
    return [mlflow.entities.Metric(key, float(value), now, step) for key, value in metrics.items()]


def _batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _public(fields: Mapping[str, Scalar], limit: int) -> dict[str, str]:
    """Return fields as MLflow accepts them, without secrets."""
    public = {}
    for key, value in fields.items():
        if is_secret_name(key):
            continue
        name = "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in key)[:_KEY_LIMIT]
        text = redact(str(value))
        public[name] = text if len(text) <= limit else text[: limit - 1] + "…"
    return public


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


def page_of_run(uri: str, run: str) -> str:
    """Return the page of a run in a store, as the part of its address after the server's.

    Without a run, it is the list of runs, in the view :data:`VIEW` if the store has one experiment.
    A store or run that is not there is an InputError. A SQLite store is read without MLflow, which
    would write into its folder.
    """
    file = sqlite_file(uri)
    if file is not None and not file.is_file():
        raise InputError(f"{file} does not exist: no run has logged to it; name the folder of runs")
    if not run:
        found = {one.experiment for one in _listed(uri, "")}
        if len(found) != 1:
            return f"/#/experiments?{_TRAINING}" if found else "/"
        return f"/#/experiments/{found.pop()}/runs?{_TRAINING}&viewStateShareKey={VIEW}"
    listed = _listed(uri, run)
    if not listed:
        raise InputError(f"run {run!r} is not in {redact(uri)}")
    if len(ids := sorted({one.id for one in listed})) > 1:
        raise InputError(f"run {run!r}: several begin so: {first_of(ids, 5)}")
    return f"/#/experiments/{listed[0].experiment}/runs/{listed[0].run}?{_TRAINING}"


class _Listed(NamedTuple):
    """A run of a store: the ids of its experiment here, in MLflow, and of its MLflow experiment."""

    id: str
    run: str
    experiment: str


def _listed(uri: str, beginning: str) -> list[_Listed]:
    """Return the runs of a store whose id begins so, the newest first."""
    file, wanted = sqlite_file(uri), beginning.translate(_NO_PATTERN)
    if file is None:
        client = open_client(uri)
        with _refusals(uri):
            numbers = [each.experiment_id for each in client.search_experiments()]
            found = client.search_runs(numbers, f"tags.`{ID_TAG}` LIKE '{wanted}%'")
        return [
            _Listed(run.data.tags[ID_TAG], run.info.run_id, run.info.experiment_id) for run in found
        ]
    rows = _read(
        file,
        "select tags.value, run_uuid, experiment_id from tags join runs using (run_uuid)"
        " where tags.key = ? and tags.value like ? and runs.lifecycle_stage = 'active'"
        " order by runs.start_time desc",
        (ID_TAG, f"{wanted}%"),
    )
    return [_Listed(id, run, str(experiment)) for id, run, experiment in rows]


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

    ``ready`` is called with the address once it answers. What MLflow says before is shown only if
    it does not start. No process is left behind. A server that does not start, or ends by itself,
    is a RunError.
    """
    # Python and uvicorn would take mlflow.py or random.py in the working directory for a library.
    library = Path(str(mlflow.__file__)).parent.parent
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    stores = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_REGISTRY_STORE_URI": uri}
    command = [sys.executable, "-P", "-m", "mlflow", "ui"]  # every user can see its arguments
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", f"--log-level warning --app-dir {shlex.quote(str(library))}"]
    # In a session of its own: MLflow does not end its workers when it is ended itself.
    process = subprocess.Popen(
        command,
        env={**os.environ, **quiet, **stores, "PYTHONSAFEPATH": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    early: deque[str] = deque(maxlen=100)
    answers = Event()

    def relay() -> None:
        for line in process.stdout or ():
            if answers.is_set():
                sys.stderr.write(line)
            else:
                early.append(line)

    reader = Thread(target=relay, daemon=True)
    reader.start()
    address = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=1).close()
                answers.set()
                ready(address)
                process.wait()
            time.sleep(0.2)
        reader.join(timeout=1)
        sys.stderr.writelines(map(redact, early if not answers.is_set() else ()))
        raise RunError(f"MLflow's page has ended with exit code {process.returncode}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
