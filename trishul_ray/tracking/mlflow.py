"""Runs in MLflow: one for each experiment, however often it is stopped and resumed.

All calls go through ``MlflowClient`` with an explicit run id, so that one process can have any
number of runs. A run is found again by the tag :data:`ATTEMPT_TAG`, which the request that creates
the run sets.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tenacity

from trishul_ray.errors import InputError, first_line
from trishul_ray.runtime.lazy import mlflow
from trishul_ray.runtime.names import free_name
from trishul_ray.storage.redaction import is_secret_name, redact
from trishul_ray.tracking.store import is_server, opened

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric, Run

Status = Literal["FINISHED", "FAILED", "KILLED"]
Scalar = str | int | float | bool | None

#: Tags of a run: its attempt, the id of its experiment, and the parent in MLflow's list of runs.
ATTEMPT_TAG, ID_TAG, PARENT_TAG = "trishul.attempt", "trishul.id", "mlflow.parentRunId"
#: Tag that a finished run gets last: the checksum of the result that is completely logged.
RESULT_TAG = "trishul.result"
#: Metric that a round logs last: a round with it is complete.
ROUND_METRIC = "round"
#: Seconds to wait for a server that has answered before. A server takes a minute to start.
OUTAGE_SECONDS = 300.0
#: Rounds that end within this number of seconds are sent together: a request to SQLite takes 20 ms.
ROUNDS_SECONDS = 1.0


class Tracker:
    """Follows a run. This one logs nothing: the tracker of ``tracking.mlflow=false``."""

    run_id: str | None = None

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round, unless the round is already logged."""

    def end(
        self, status: Status, *, metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, Scalar] | None = None, folder: Path | None = None, result: str = "",
    ) -> list[str]:  # fmt: skip
        """End the run with its totals; return the rejected parts."""
        return []


class MlflowRun(Tracker):
    """A run of an MLflow experiment, found by its attempt or created.

    A store that fails while the run goes on does not stop the run: rounds are sent later, at the
    latest by :meth:`end`, which waits for a server that is gone. Secrets are masked or omitted.

    Raises:
        InputError: The store cannot be opened, or the experiment was deleted.
    """

    def __init__(
        self, uri: str, experiment: str, attempt: str, name: str, *,
        params: Mapping[str, Scalar], tags: Mapping[str, Scalar],
        inputs: "Sequence[DatasetInput]" = (), parent: str | None = None,
    ) -> None:  # fmt: skip
        self.uri, self.patience = uri, OUTAGE_SECONDS if is_server(uri) else 0.0
        self._waiting: dict[int, dict[str, float]] = {}
        self._next_request = 0.0
        self._rejected: list[str] = []
        marks = public(tags) | {ATTEMPT_TAG: attempt} | ({PARENT_TAG: parent} if parent else {})
        # A sweep has reached the server before: this is an outage and not a wrong address.
        retrying = _retrying(self.patience if parent else 0.0)
        run = retrying(self._find_or_create, uri, experiment, name, marks, public(params), inputs)
        self.run_id = self._id = run.info.run_id
        self._began = run.info.start_time
        self._ended = run.info.end_time if run.info.status == "FINISHED" else None
        self._metrics = run.data.metrics

    def _find_or_create(
        self, uri: str, experiment: str, name: str, tags: dict[str, str], params: dict[str, str],
        inputs: "Sequence[DatasetInput]",
    ) -> "Run":  # fmt: skip
        # The lock is held from the search to the creation: two drivers of an attempt share a run.
        with opened(uri, experiment) as (self.client, group):
            self.experiment_id = group.experiment_id
            found = self._search(f"tags.`{ATTEMPT_TAG}` = '{tags[ATTEMPT_TAG]}'")
            self._logged: set[int] | None = None if found else set()
            if not found:
                found = [self.client.create_run(self.experiment_id, tags=tags, run_name=name)]
            run = found[-1]  # the first that started
            if run.info.status != "RUNNING":
                self.client.update_run(run.info.run_id, status="RUNNING")
            new = {k: v for k, v in params.items() if k not in run.data.params}
            values = [mlflow.entities.Param(*each) for each in new.items()]
            self.client.log_batch(run.info.run_id, params=values)
            if inputs:
                self.client.log_inputs(run.info.run_id, datasets=[*inputs])
            return run

    def _search(self, wanted: str) -> "list[Run]":
        return list(self.client.search_runs([self.experiment_id], wanted, max_results=50_000))

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round: now, or with a later one if rounds are short."""
        self._waiting.setdefault(number, dict(metrics))
        began = time.monotonic()
        if began >= self._next_request:
            with suppress(mlflow.MlflowException, OSError):  # sent again later
                self._log_rounds()
            # A server that hangs gets a tenth of the run's time.
            now = time.monotonic()
            self._next_request = now + max(ROUNDS_SECONDS, 10 * (now - began))

    def logged_rounds(self) -> set[int]:
        """Return the rounds that are completely logged."""
        if self._logged is None:
            history = self.client.get_metric_history(self._id, ROUND_METRIC)
            self._logged = {int(point.step) for point in history}
        return self._logged

    def _log_rounds(self) -> None:
        new = sorted(self._waiting.keys() - self.logged_rounds())
        rounds = [points_of(self._waiting[n] | {ROUND_METRIC: n}, n) for n in new]
        self.client.log_batch(self._id, metrics=[*chain(*rounds)])
        self.logged_rounds().update(new)
        self._waiting.clear()

    def end(
        self, status: Status, *, metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, Scalar] | None = None, folder: Path | None = None, result: str = "",
    ) -> list[str]:  # fmt: skip
        """End the run; return the rejected parts. If there are none, ``result`` is logged.

        A stopped run (``KILLED``) does not wait for a server. A run that had finished before keeps
        the time of its end.
        """
        client, id = self.client, self._id
        if status == "KILLED":
            self.patience = 0.0
        if self._waiting:
            self._send("rounds", self._log_rounds)
        new = {k: v for k, v in (metrics or {}).items() if self._metrics.get(k) != v}
        points = points_of(new, max(self._logged or [0]))
        marks = [mlflow.entities.RunTag(*each) for each in public(tags or {}).items()]
        if points or marks:
            self._send("totals", lambda: client.log_batch(id, metrics=points, tags=marks))
        if folder is not None:
            self._send("files", client.log_artifacts, id, str(folder))
        ended = self._ended if status == "FINISHED" else None
        ended = ended or max(self._began, int(time.time() * 1000))  # the clock may be set back
        self._send(f"status {status}", client.set_terminated, id, status, ended)
        if result and not self._rejected:
            self._send("result", client.set_tag, id, RESULT_TAG, result)
        rejected, self._rejected = self._rejected, []
        return rejected

    def _send(self, what: str, action: Callable[..., object], *args: object) -> None:
        try:
            _retrying(self.patience)(action, *args)
        except (mlflow.MlflowException, OSError) as error:
            if is_outage(error):  # wait for a server only once
                self.patience = 0.0
            self._rejected.append(f"{what} ({redact(first_line(error))})")


def find_runs(uri: str, experiment: str, attempt: str, *, delete: bool = False) -> "list[Run]":
    """Return the runs of an attempt in a store; with ``delete``, also delete them."""
    with opened(uri, experiment) as (client, group):
        wanted = f"tags.`{ATTEMPT_TAG}` = '{attempt}'"
        found = list(client.search_runs([group.experiment_id], wanted))
        for run in found if delete else ():
            client.delete_run(run.info.run_id)
    return found


def public(fields: Mapping[str, Scalar]) -> dict[str, str]:
    """Return fields as MLflow accepts them: without secrets, long names and values truncated."""
    found: dict[str, str] = {}
    for key, value in fields.items():
        if not is_secret_name(key):
            name = "".join(c if c.isalnum() or c in "_-. :" else "_" for c in key)[:240]
            found[free_name(name, found)] = redact(str(value))[:5000]
    return found


def dataset_input(
    name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
) -> "DatasetInput":
    """Return data that a run reads, and their use, such as ``training``."""
    kind, entities = source.partition(":")[0], mlflow.entities
    text, facts = json.dumps({"source": redact(source)}), json.dumps(dict(profile))
    dataset = entities.Dataset(name, digest, kind, text, profile=facts)
    return entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", context)])


def points_of(metrics: Mapping[str, float], step: int) -> "list[Metric]":
    """Return the metrics of a step as MLflow accepts them."""
    now = int(time.time() * 1000)
    return [mlflow.entities.Metric(key, float(value), now, step) for key, value in metrics.items()]


def is_outage(error: BaseException) -> bool:
    """Return whether an error of a store may be temporary, unlike a wrong password or input."""
    if not isinstance(error, Exception):  # Ctrl-C, perhaps while MLflow is imported
        return False
    cause = error.__cause__ if isinstance(error, InputError) else error
    # BAD_REQUEST: the database of the server gave up. Rejected input is INVALID_PARAMETER_VALUE.
    temporary = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "BAD_REQUEST")
    return isinstance(cause, mlflow.MlflowException) and cause.error_code in temporary


def _retrying(patience: float) -> tenacity.Retrying:
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_outage),
        wait=tenacity.wait_exponential(multiplier=1, max=10),
        stop=tenacity.stop_before_delay(patience),
        reraise=True,
    )
