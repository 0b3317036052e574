"""The place MLflow writes to: opened safely by any number of processes at once.

MLflow creates a SQLite schema on first use and cannot do so twice at a time: of four processes
that open a fresh file together, three fail. One lock file beside the database settles it.
"""

import contextlib
import itertools
import logging
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


MASK = "***"


# Words of a field's name that say that its value is a secret; "tokens" or "tokenizer" do not.
_SECRET_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "pwd", "credential", "credentials", "apikey"}
)


_SECRET_PAIRS = frozenset({"api_key", "access_key", "secret_key", "private_key"})


_USERINFO = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)[^/@\s]+@")


_QUERY = re.compile(
    r"(?P<name>[?&;][\w.-]*(?:token|secret|password|signature|credential|api_?key|access_key|sig)"
    r"[\w.-]*=)[^&;\s]+",
    re.IGNORECASE,
)


_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsu]_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|sk-[A-Za-z0-9_-]{20,}|dapi[0-9a-f]{32})\b"
)


def names_secret(key: str) -> bool:
    """Whether a field of this name holds a secret, judging by the words of the name."""
    words = [word for word in re.split(r"[^a-z0-9]+", key.lower()) if word]
    pairs = {f"{a}_{b}" for a, b in itertools.pairwise(words)}
    return not _SECRET_WORDS.isdisjoint(words) or not _SECRET_PAIRS.isdisjoint(pairs)


def redact(text: str) -> str:
    """``text`` with credentials in URIs, secret query values and well-known tokens masked."""
    text = _USERINFO.sub(rf"\g<scheme>{MASK}@", text)
    text = _QUERY.sub(rf"\g<name>{MASK}", text)
    return _KNOWN.sub(MASK, text)


#: A store that is being created or migrated by another process is waited for this long.
LOCK_SECONDS = 120.0


def tracking_uri(uri: str | None, runs: str) -> str:
    """The MLflow tracking URI of a run.

    Args:
        uri: what the experiment names (``tracking.uri``); a bare path is taken for a SQLite file.
        runs: the folder of all runs; the default store is ``<runs>/mlflow.db``.

    Raises:
        InputError: the store is a folder of files (which MLflow no longer writes), an in-memory
            database, or no store is named and ``runs`` is remote.
    """
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
    """The file behind a ``sqlite:///`` URI; None for other stores and in-memory databases."""
    head, _, path = uri.partition(":///")
    path = path.partition("?")[0]
    if head.partition("+")[0] != "sqlite" or not path or path == ":memory:":
        return None
    return Path(path).absolute()


def open_client(uri: str) -> "MlflowClient":
    """An MLflow client whose store exists and answers.

    Raises:
        InputError: the store cannot be created, is not a database, or does not answer.
    """
    # Set before MLflow is first imported, which is when it reads them. Telemetry would phone
    # home; the default of 7 retries of 120 s would hold a run for minutes on a lost server. The
    # address of the run, which MLflow would print between our lines, the run prints itself.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    # A page of "Running upgrade ..." on every fresh store tells a researcher nothing.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    file = sqlite_file(uri)
    made_here = file is not None and not file.exists()
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)  # creates or migrates the schema
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if made_here and file is not None:
            file.unlink(missing_ok=True)  # half a schema, as on a full disk
        cause = (str(getattr(error, "orig", None) or error).splitlines() or [""])[0][:300]
        raise InputError(
            f"tracking.uri={redact(uri)!r}: the MLflow store does not answer: {redact(cause)}"
        ) from error
    return client


def store_lock(uri: str) -> contextlib.AbstractContextManager[object]:
    """Holds every other opener of a SQLite store back; does nothing for a server.

    Raises:
        InputError: the folder cannot be written, or another process keeps the lock for
            :data:`LOCK_SECONDS`.
    """
    file = sqlite_file(uri)
    return contextlib.nullcontext() if file is None else _locked(file)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
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


def ui_command(uri: str) -> str:
    """How a person opens the store: a command to paste, or the server's address."""
    if uri.startswith(("http://", "https://")):
        return redact(uri)
    return f"mlflow ui --backend-store-uri {shlex.quote(redact(uri))} --host 127.0.0.1"


def experiment_id(client: "MlflowClient", name: str, artifacts: Path | None) -> str:
    """The id of the MLflow experiment called ``name``, created if there is none.

    Args:
        client: an opened client.
        name: the experiment's name.
        artifacts: where a new experiment's artifacts go; None leaves it to the server.

    Raises:
        InputError: the experiment was deleted in MLflow.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        location = None if artifacts is None else artifacts.absolute().as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another driver was faster
    if found is None or found.lifecycle_stage != "active":
        raise InputError(
            f"tracking.experiment={name!r} was deleted in MLflow: restore it there or choose "
            "another name"
        )
    return str(found.experiment_id)
