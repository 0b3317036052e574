"""One MLflow run per experiment, however often the experiment is stopped and resumed.

All calls go through ``MlflowClient`` with an explicit run id. There is no active run and no global
tracking URI, so that one process can hold any number of runs. A run is found again by a tag that
the request that creates it sets, so a driver that is killed at any moment continues its run.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import tenacity

from trishul_ray.errors import InputError, first_line
from trishul_ray.redaction import is_secret_name, redact
from trishul_ray.tracking.store import (
    get_or_create_experiment,
    is_outage,
    open_client,
    sqlite_file,
    store_lock,
    ui_command,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

ATTEMPT_TAG = "trishul.attempt"
#: Tag of a deleted run: the attempt that has replaced it.
REPLACED_TAG = "trishul.replaced_by"
PARENT_TAG = "mlflow.parentRunId"
#: Metric logged last in every round: a round that has it was logged completely.
ROUND_METRIC = "round"

#: Seconds for which a server that has answered before may be gone. It takes a minute to start.
OUTAGE_SECONDS = 300.0

_PARAM_VALUE_LIMIT = 6000  # MLflow's MAX_PARAM_VAL_LENGTH
_TAG_VALUE_LIMIT = 5000  # the smallest limit among MLflow's stores
_KEY_LIMIT = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000

Status = Literal["FINISHED", "FAILED", "KILLED"]
Scalar = str | int | float | bool | None
T = TypeVar("T")


def has_finished_in(file: Path, attempt: str) -> bool:
    """Return whether the run of an attempt has finished in a SQLite store, read without MLflow.

    False if the file is missing, busy, or not such a store.
    """
    wanted = (
        "select 1 from tags join runs using (run_uuid) where tags.key = ? and tags.value = ?"
        " and runs.status = 'FINISHED' and runs.lifecycle_stage = 'active'"
    )
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=1)) as database:
            return database.execute(wanted, (ATTEMPT_TAG, attempt)).fetchone() is not None
    except sqlite3.Error:
        return False


class Tracker:
    """Receives what a run logs, and discards it: the tracker of ``tracking.mlflow=false``."""

    @property
    def run_id(self) -> str | None:
        """Id of the tracking run, if there is one."""
        return None

    def log_round(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round, unless the round is logged already."""

    @property
    def place(self) -> list[str] | None:
        """The tracking URI, without credentials, and the experiment's name, if there are any."""
        return None

    def log_totals(
        self, step: int, metrics: Mapping[str, float], tags: Mapping[str, Scalar]
    ) -> None:
        """Log metrics of the whole run, at its last round, and tags."""

    def log_data(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
    ) -> None:
        """Log the rows that the run reads as a dataset input, once, however often it is resumed.

        ``digest`` has at most 36 characters, ``context`` is ``training`` or ``evaluation``, and
        ``profile`` holds facts about the rows, e.g. their number.
        """

    def log_artifacts(self, folder: Path | str) -> None:
        """Log every file of a local folder.

        Raises:
            InputError: ``folder`` is not a folder.
        """

    def finish(self, status: Status = "FINISHED") -> list[str]:
        """End the run; return what the tracking store did not accept."""
        return []

    def ui_command(self, run: str = "") -> str | None:
        """Return the command, or the address, that shows the run with this id in a browser."""
        return None


class MlflowRun(Tracker):
    """A run in an MLflow store. Create it with :meth:`open`.

    A store that fails while the run goes on does not stop it: the metrics of rounds are kept and
    sent again later, at the latest by :meth:`finish`; all else waits for a server that is gone.
    :meth:`finish` lists what the store did not accept.
    """

    def __init__(
        self, client: "MlflowClient", uri: str, experiment: str, run: "Run", name: str = ""
    ) -> None:
        self._client = client
        self._place = self.place_of(uri, name)
        self._uri = uri
        self._experiment_id = experiment
        self._run_id: str = run.info.run_id
        self._logged: set[int] | None = None
        self._unsent: dict[int, dict[str, float]] = {}
        self._rejected: list[str] = []
        self._patience = _patience(uri)

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
        """Find the run of an attempt, or create it.

        Args:
            uri: Tracking URI, from :func:`trishul_ray.tracking.store.tracking_uri`.
            experiment_name: Name of the MLflow experiment, created if it does not exist. In a
                SQLite store its artifacts go to ``mlartifacts/`` beside the database.
            attempt: Identifies the run: a call with the same attempt continues the same run.
            run_name: Name shown in MLflow.
            params: Flat parameters. Secrets are masked or omitted, long values cut. MLflow allows
                no change of a parameter: changed ones go into the tag ``trishul.resumed_with``.
            tags: Further tags, treated alike.
            parent_run: MLflow run id of the sweep this run belongs to.

        Raises:
            InputError: The store does not answer or cannot be written, or the experiment was
                deleted.
        """
        if not attempt or not attempt.isascii() or "'" in attempt or "\\" in attempt:
            raise InputError(f"attempt={attempt!r}: use ASCII letters, digits, '-', '_', '.', ':'")
        # The run of a sweep has found the server before: it is gone for a while, not misspelt.
        patience = _patience(uri) if parent_run is not None else 0.0
        all_tags = _public(tags or {}, _TAG_VALUE_LIMIT) | {ATTEMPT_TAG: attempt}
        if parent_run is not None:
            all_tags[PARENT_TAG] = parent_run
        retrying = _retrying(patience)
        self = retrying(cls._find_or_create, uri, experiment_name, attempt, run_name, all_tags)
        retrying(self._log_params, _public(params, _PARAM_VALUE_LIMIT))
        return self

    @classmethod
    def _find_or_create(
        cls, uri: str, experiment_name: str, attempt: str, run_name: str, tags: Mapping[str, str]
    ) -> Self:
        file = sqlite_file(uri)
        # Keep the lock from the search to the creation: two drivers of one attempt share a run.
        with store_lock(uri):
            client = open_client(uri)
            artifacts = file and file.parent / "mlartifacts"
            experiment = get_or_create_experiment(client, experiment_name, artifacts)
            found = client.search_runs(
                [experiment],
                filter_string=f"tags.`{ATTEMPT_TAG}` = '{attempt}'",
                order_by=["attributes.start_time ASC"],
                max_results=1,
            )
            if found:
                run = found[0]
                if run.info.status != "RUNNING":
                    client.update_run(run.info.run_id, status="RUNNING")
            else:
                run = client.create_run(experiment, tags=dict(tags), run_name=run_name)
        return cls(client, uri, experiment, run, experiment_name)

    @staticmethod
    def place_of(uri: str, experiment_name: str) -> list[str]:
        """Return the place of a run, as :attr:`place`."""
        return [redact(uri), experiment_name]

    @classmethod
    def has_finished(cls, uri: str, experiment_name: str, attempt: str) -> bool:
        """Return whether the run of an attempt has finished in an experiment of a store.

        Raises:
            InputError: The store does not answer or cannot be written, or the experiment was
                deleted.
        """
        runs = cls._runs_of(uri, experiment_name, attempt)[1]
        return any(run.info.status == "FINISHED" for run in runs)

    @classmethod
    def replace(cls, uri: str, experiment_name: str, attempt: str, by: str) -> None:
        """Delete the runs of an attempt, with the tag that another one replaces them.

        Raises:
            InputError: As :meth:`has_finished`.
        """
        from mlflow.exceptions import MlflowException

        client, runs = cls._runs_of(uri, experiment_name, attempt)
        try:
            for run in runs:
                client.set_tag(run.info.run_id, REPLACED_TAG, by)
                client.delete_run(run.info.run_id)
        except MlflowException as error:
            raise InputError(f"tracking.uri={redact(uri)!r}: {first_line(error)}") from error

    @staticmethod
    def _runs_of(uri: str, experiment_name: str, attempt: str) -> "tuple[MlflowClient, list[Run]]":
        file = sqlite_file(uri)
        with store_lock(uri):
            client = open_client(uri)
            artifacts = file and file.parent / "mlartifacts"
            experiment = get_or_create_experiment(client, experiment_name, artifacts)
        wanted = f"tags.`{ATTEMPT_TAG}` = '{attempt}'"
        return client, list(client.search_runs([experiment], wanted))

    @property
    def run_id(self) -> str:
        """MLflow's id of the run."""
        return self._run_id

    @property
    def place(self) -> list[str]:
        """The tracking URI, without credentials, and the experiment's name."""
        return self._place

    def log_totals(
        self, step: int, metrics: Mapping[str, float], tags: Mapping[str, Scalar]
    ) -> None:
        """Log metrics of the whole run, at its last round, and tags."""
        self._log_batch("totals", step, metrics, tags)

    def log_round(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round, now or, while the store fails, with a later round."""
        if step not in self.logged_steps():
            self._unsent[step] = {key: float(value) for key, value in metrics.items()}
        self._send()

    def logged_steps(self) -> frozenset[int]:
        """Return the rounds that this process or an earlier one has logged completely."""
        from mlflow.exceptions import MlflowException

        if self._logged is None:
            try:
                history = self._client.get_metric_history(self._run_id, ROUND_METRIC)
            except MlflowException:
                return frozenset()  # read again at the next round, before anything is sent
            self._logged = {int(point.step) for point in history}
        return frozenset(self._logged)

    def log_data(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
    ) -> None:
        """Log a dataset input, which MLflow adds only once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest,
            source_type=source.partition(":")[0],
            source=json.dumps({"source": redact(source)}),
            profile=json.dumps(dict(profile)),
        )
        inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])]
        self._do(f"dataset {name}", lambda: self._client.log_inputs(self._run_id, datasets=inputs))

    def log_artifacts(self, folder: Path | str) -> None:
        """Log every file of a local folder; raise InputError if it is not a folder."""
        if not Path(folder).is_dir():
            raise InputError(f"artifacts: {folder} is not a folder")
        self._do(f"folder {folder}", lambda: self._client.log_artifacts(self._run_id, str(folder)))

    def finish(self, status: Status = "FINISHED") -> list[str]:
        """End the run with ``status``; return what the store did not accept, e.g. ``round 3``.

        A run that was stopped (``KILLED``) does not wait for a server.
        """
        if status == "KILLED":
            self.stop_waiting()
        self._send()
        deadline = time.monotonic() + self._patience
        while self._unsent and time.monotonic() < deadline:
            time.sleep(5.0)
            self._send()
        if self._unsent:
            self.stop_waiting()
        self._do(f"status {status}", lambda: self._client.set_terminated(self._run_id, status))
        rejected, self._rejected = self._rejected, []
        return [f"round {step}" for step in sorted(self._unsent)] + rejected

    def stop_waiting(self) -> None:
        """From now on, give up at once what a server that is gone does not accept."""
        self._patience = 0.0

    def ui_command(self, run: str = "") -> str:
        """Return the command that shows the run with this id, or its address on a server."""
        page = f"#/experiments/{self._experiment_id}/runs/{self._run_id}"
        if _is_server(self._uri):
            return f"{redact(self._uri).rstrip('/')}/{page}"
        return ui_command(self._uri, run)

    def _do(self, what: str, action: Callable[[], object]) -> None:
        """Do something with the store; note ``what`` if the store does not accept it."""
        from mlflow.exceptions import MlflowException

        try:
            self._wait(action)
        except (MlflowException, OSError):
            self._rejected.append(what)

    def _wait(self, action: Callable[[], T]) -> T:
        """Return what a call returns; a server that is gone is waited for, once in a run."""
        from mlflow.exceptions import MlflowException

        try:
            return _retrying(self._patience)(action)
        except MlflowException as error:
            if is_outage(error):
                self.stop_waiting()
            raise

    def _log_batch(
        self, what: str, step: int, metrics: Mapping[str, float], tags: Mapping[str, Scalar]
    ) -> None:
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        points = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        public = [RunTag(name, value) for name, value in _public(tags, _TAG_VALUE_LIMIT).items()]
        self._do(what, lambda: self._client.log_batch(self._run_id, points, tags=public))

    def _send(self) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        for step in sorted(self._unsent):
            if self._logged is None:
                self.logged_steps()
            if self._logged is None:
                return  # without the history, a round could be logged twice
            now = int(time.time() * 1000)
            points = [Metric(key, value, now, step) for key, value in self._unsent[step].items()]
            points.append(Metric(ROUND_METRIC, float(step), now, step))
            try:
                for batch in _batches(points, _METRICS_PER_BATCH):
                    self._client.log_batch(self._run_id, metrics=batch)
            except MlflowException as error:
                if error.error_code == "INVALID_PARAMETER_VALUE":
                    raise  # a metric's name is invalid: a bug here, not a fault of the store
                return
            self._logged.add(step)
            del self._unsent[step]

    def _log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for batch in _batches(new, _PARAMS_PER_BATCH):
            self._client.log_batch(self._run_id, params=batch)
        changed = {k: v for k, v in params.items() if k in known and known[k] != v}
        if changed:
            text = json.dumps(changed, sort_keys=True)
            self._client.set_tag(self._run_id, "trishul.resumed_with", text[:_TAG_VALUE_LIMIT])


def _patience(uri: str) -> float:
    """Return for how many seconds a store may be gone."""
    return OUTAGE_SECONDS if _is_server(uri) else 0.0


def _retrying(patience: float) -> tenacity.Retrying:
    """Return what calls a function again while a server is gone, for ``patience`` seconds."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_outage),
        wait=tenacity.wait_exponential(multiplier=1, max=10),
        stop=tenacity.stop_before_delay(patience),
        reraise=True,
    )


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


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
