"""Runs in MLflow: one for each experiment.

An experiment has one run, however often it is stopped and resumed. All calls go through
``MlflowClient`` with an explicit run id. There is no active run and no global tracking URI, so that
one process can hold any number of runs. A run is found again by a tag that the request that creates
it sets, so a driver that is killed at any moment continues its run.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import tenacity

from trishul_ray.errors import InputError, first_line
from trishul_ray.runtime.lazy import mlflow
from trishul_ray.storage.redaction import is_secret_name, redact
from trishul_ray.tracking.mlflow_store import (
    TRAINING,
    is_server,
    opened,
    place_of,
    refusals,
    ui_command,
)
from trishul_ray.tracking.tracker import Input, RunEnd, RunStart, Scalar, Status, Tracker

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Experiment, Metric, Run
    from mlflow.tracking import MlflowClient

ATTEMPT_TAG = "trishul.attempt"
#: Tag of a run: the id of its experiment.
ID_TAG = "trishul.id"
#: Tag of a deleted run: the attempt that has replaced it.
REPLACED_TAG = "trishul.replaced_by"
PARENT_TAG = "mlflow.parentRunId"
#: Metric logged last in every round: a round that has it was logged completely.
ROUND_METRIC = "round"

#: Seconds for which a server that has answered before may be gone. It takes a minute to start.
OUTAGE_SECONDS = 300.0

#: Rounds that end within so many seconds of the last request are sent together: a SQLite store
#: takes 20 ms for a request of any size, which is much beside a round of a small model.
ROUNDS_SECONDS = 1.0

#: The smallest limits among MLflow's stores, in characters.
_VALUE_LIMIT, _KEY_LIMIT = 5000, 250
#: The most runs that MLflow finds in one request.
_MOST_RUNS = 50_000


def find_runs(client: "MlflowClient", experiment: str, wanted: str) -> "list[Run]":
    """Return the runs of an experiment, by its id, that MLflow's filter finds, the oldest first."""
    return list(
        client.search_runs(
            [experiment], wanted, order_by=["start_time ASC"], max_results=_MOST_RUNS
        )
    )


def _runs_of(client: "MlflowClient", experiment: "Experiment", attempt: str) -> "list[Run]":
    return find_runs(client, experiment.experiment_id, f"tags.`{ATTEMPT_TAG}` = '{attempt}'")


def has_finished(uri: str, experiment_name: str, attempt: str) -> bool:
    """Return whether the run of an attempt has finished in an experiment of a store."""
    with opened(uri, experiment_name) as (client, experiment):
        found = _runs_of(client, experiment, attempt)
    return any(run.info.status == "FINISHED" for run in found)


def replace_run(uri: str, experiment_name: str, attempt: str, by: str) -> None:
    """Delete the runs of an attempt, with the tag that another one replaces them."""
    with opened(uri, experiment_name) as (client, experiment):
        for run in _runs_of(client, experiment, attempt):
            client.set_tag(run.info.run_id, REPLACED_TAG, by)
            client.delete_run(run.info.run_id)


def is_outage(error: BaseException) -> bool:
    """Return whether an error of a store may be temporary: it does not answer, or it has a fault.

    False for a wrong password and for input that the store refuses.
    """
    cause = error.__cause__ if isinstance(error, InputError) else error
    # BAD_REQUEST says that the server's database gave up, e.g. on a request that timed out and was
    # sent again while the first went on. Input that it refuses is INVALID_PARAMETER_VALUE.
    temporary = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "BAD_REQUEST")
    return isinstance(cause, mlflow.MlflowException) and cause.error_code in temporary


def public(fields: Mapping[str, Scalar]) -> dict[str, str]:
    """Return fields as MLflow accepts them: without secrets, and with long values cut."""
    found = {}
    for key, value in fields.items():
        if is_secret_name(key):
            continue
        name = "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in key)[:_KEY_LIMIT]
        text = redact(str(value))
        found[name] = text if len(text) <= _VALUE_LIMIT else text[: _VALUE_LIMIT - 1] + "…"
    return found


class MlflowTracker(Tracker):
    """Logs a run to an experiment of an MLflow store.

    A store that fails while the run goes on does not stop it: rounds that it has not taken are sent
    with later ones, at the latest by :meth:`end`, which waits for a server that is gone, and lists
    what the store did not accept.
    """

    def __init__(self, uri: str, experiment_name: str) -> None:
        self.uri, self._name = uri, experiment_name
        self.place = place_of(uri, experiment_name)
        self.patience = OUTAGE_SECONDS if is_server(uri) else 0.0
        self._rounds: dict[int, dict[str, float]] = {}  # that are not sent
        self._next_request = -math.inf
        self._rejected: list[str] = []

    def start(self, run: RunStart) -> None:
        """Find the run of an attempt, or create it.

        Secrets in parameters and tags are masked or omitted, long values cut. MLflow allows no
        change of a parameter: changed ones go into the tag ``trishul.resumed_with``.

        Raises:
            InputError: The store does not answer or cannot be written, or the experiment was
                deleted.
        """
        attempt = run.attempt
        if not attempt or not attempt.isascii() or "'" in attempt or "\\" in attempt:
            raise InputError(f"attempt={attempt!r}: use ASCII letters, digits, '-', '_', '.', ':'")
        # In a sweep the server was reachable before: treat this as an outage, not a wrong address.
        retrying = _retrying(0.0 if run.parent is None else self.patience)
        found = retrying(self._find_or_create, run)
        self.run_id = self._id = found.info.run_id
        self._values = found.data.metrics  # as they were when it was opened
        self._ended = found.info.end_time if found.info.status == "FINISHED" else None
        with refusals(self.uri):
            retrying(self._log_start, run, found.data.params)

    def _find_or_create(self, run: RunStart) -> "Run":
        tags = public(run.tags) | {ATTEMPT_TAG: run.attempt}
        if run.parent is not None:
            tags[PARENT_TAG] = run.parent
        # Keep the lock from the search to the creation: two drivers of one attempt share a run.
        with opened(self.uri, self._name) as (self.client, self.experiment):
            if not (found := _runs_of(self.client, self.experiment, run.attempt)):
                self._logged: set[int] | None = set()
                number = self.experiment.experiment_id
                return self.client.create_run(number, tags=tags, run_name=run.name)
            self._logged = None  # the store is asked
            (first, *_) = found
            if first.info.status != "RUNNING":
                self.client.update_run(first.info.run_id, status="RUNNING")
            if REPLACED_TAG in first.data.tags:  # a process was killed in replace_run
                self.client.delete_tag(first.info.run_id, REPLACED_TAG)
            return first

    def _log_start(self, run: RunStart, known: Mapping[str, str]) -> None:
        params, entities = public(run.params), mlflow.entities
        new = [entities.Param(key, text) for key, text in params.items() if key not in known]
        changed = {k: v for k, v in params.items() if k in known and known[k] != v}
        text = json.dumps(changed, sort_keys=True)[:_VALUE_LIMIT]
        tags = [entities.RunTag("trishul.resumed_with", text)] if changed else []
        self.client.log_batch(self._id, params=new, tags=tags)
        if run.inputs:  # MLflow adds each only once
            self.client.log_inputs(self._id, datasets=list(map(_dataset_input, run.inputs)))

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round: now, or with a later one if rounds are short.

        A process that is killed loses those that wait: the next one logs them from the checkpoint.
        """
        self._rounds.setdefault(number, dict(metrics))
        began = time.monotonic()
        if began < self._next_request:
            return
        self._next_request = began + ROUNDS_SECONDS
        try:
            self._log_rounds()
        except (mlflow.MlflowException, OSError) as error:
            if not is_outage(error):
                self._reject(self._waiting(), error)
                self._rounds.clear()
            # A server that hangs takes minutes to give up on: a tenth of the run's time.
            self._next_request = time.monotonic() + 10 * (time.monotonic() - began)

    def logged_rounds(self) -> set[int]:
        """Return the rounds that this process or an earlier one has logged completely."""
        if self._logged is None:
            history = self.client.get_metric_history(self._id, ROUND_METRIC)
            self._logged = {int(point.step) for point in history}
        return self._logged

    def _log_rounds(self) -> None:
        new = sorted(self._rounds.keys() - self.logged_rounds())
        points = [
            point
            for number in new
            for point in points_of({**self._rounds[number], ROUND_METRIC: number}, number)
        ]
        self.client.log_batch(self._id, metrics=points)
        self.logged_rounds().update(new)
        self._rounds.clear()

    def _waiting(self) -> str:
        first, last = min(self._rounds), max(self._rounds)
        return f"round {first}" if first == last else f"rounds {first} to {last}"

    def end(self, status: Status, results: RunEnd | None = None) -> list[str]:
        """End the run with ``status``; return what the store did not accept, e.g. ``round 3``.

        A run that was stopped (``KILLED``) does not wait for a server. One that had finished before
        it was opened keeps the time of its end.
        """
        folder = None if results is None else results.folder
        if status == "KILLED":
            self.patience = 0.0
        if self._rounds:
            self._send(self._waiting(), self._log_rounds)
        if results is not None:
            self._send("totals", partial(self._log_totals, results))
        if folder is not None:
            self._send(f"folder {folder}", lambda: self.client.log_artifacts(self._id, str(folder)))
        ended = self._ended if status == "FINISHED" else None
        self._send(f"status {status}", lambda: self.client.set_terminated(self._id, status, ended))
        rejected, self._rejected = self._rejected, []
        return rejected

    def _log_totals(self, results: RunEnd) -> None:
        # Metrics that a killed process has logged are there already.
        new = {k: value for k, value in results.metrics.items() if self._values.get(k) != value}
        tags = [mlflow.entities.RunTag(*each) for each in public(results.tags).items()]
        self.client.log_batch(self._id, metrics=points_of(new, results.round), tags=tags)
        if results.inputs:
            self.client.log_inputs(self._id, datasets=list(map(_dataset_input, results.inputs)))

    def _send(self, what: str, action: Callable[[], object]) -> None:
        """Send something, and note ``what`` if the store does not accept it."""
        try:
            _retrying(self.patience)(action)
        except (mlflow.MlflowException, OSError) as error:
            if is_outage(error):  # a server that is gone is waited for once
                self.patience = 0.0
            self._reject(what, error)

    def _reject(self, what: str, error: Exception) -> None:
        self._rejected.append(f"{what} ({redact(first_line(error))})")

    def command(self, run: str = "") -> str:
        """Return the command that shows the run with this id, or its address on a server."""
        page = f"#/experiments/{self.experiment.experiment_id}/runs/{self._id}?{TRAINING}"
        server = is_server(self.uri)
        return f"{redact(self.uri).rstrip('/')}/{page}" if server else ui_command(self.uri, run)


def _retrying(patience: float) -> tenacity.Retrying:
    """Return what calls a function again while a server is gone, for ``patience`` seconds."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_outage),
        wait=tenacity.wait_exponential(multiplier=1, max=10),
        stop=tenacity.stop_before_delay(patience),
        reraise=True,
    )


def points_of(metrics: Mapping[str, float], step: int) -> "list[Metric]":
    """Return the metrics of a step as MLflow takes them."""
    now = int(time.time() * 1000)
    return [mlflow.entities.Metric(key, float(value), now, step) for key, value in metrics.items()]


def _dataset_input(given: Input) -> "DatasetInput":
    dataset = mlflow.entities.Dataset(
        name=given.name,
        digest=given.digest,
        source_type=given.source.partition(":")[0],
        source=json.dumps({"source": redact(given.source)}),
        profile=json.dumps(dict(given.profile)),
    )
    marks = [mlflow.entities.InputTag("mlflow.data.context", given.context)]
    return mlflow.entities.DatasetInput(dataset, marks)
