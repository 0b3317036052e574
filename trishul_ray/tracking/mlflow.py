"""Log each run to one MLflow run, even if it is stopped and resumed.

All calls use ``MlflowClient`` with an explicit run id, so that one process can log any number of
runs. A resumed run finds its MLflow run by the tag :data:`ATTEMPT_TAG`, which is set in the request
that creates the MLflow run.
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

#: Tags of a run: its attempt, the id of its experiment, and its parent run in MLflow.
ATTEMPT_TAG, ID_TAG, PARENT_TAG = "trishul.attempt", "trishul.id", "mlflow.parentRunId"
#: Tag with the checksum of the result, set last, after the result was logged completely.
RESULT_TAG = "trishul.result"
#: Last metric that is logged for a round, which marks the round as complete.
ROUND_METRIC = "round"
#: Seconds to wait for a server that responded before; restarting a server takes a minute.
OUTAGE_SECONDS = 300.0
#: Seconds within which rounds are sent in one batch, because a request to SQLite takes 20 ms.
ROUNDS_SECONDS = 1.0


class Tracker:
    """Base tracker, which logs nothing. It is used with ``tracking.mlflow=false``."""

    run_id: str | None = None

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round, unless the round was already logged."""

    def end(
        self, status: Status, *, metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, Scalar] | None = None, folder: Path | None = None, result: str = "",
    ) -> list[str]:  # fmt: skip
        """Log the totals, end the run, and return the rejected parts."""
        return []


class MlflowRun(Tracker):
    """An MLflow run, which is created or found by its attempt.

    A failing store does not stop the run. Rounds are sent again later, at the latest in
    :meth:`end`, which waits for an unavailable server. Secrets are masked or omitted.

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
        # If there is a sweep, it has reached the server: this is an outage, not a wrong address.
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
        # Lock from the search to the creation, so that two drivers of an attempt share a run.
        with opened(uri, experiment) as (self.client, group):
            self.experiment_id = group.experiment_id
            found = self._search(f"tags.`{ATTEMPT_TAG}` = '{tags[ATTEMPT_TAG]}'")
            self._logged: set[int] | None = None if found else set()
            if not found:
                found = [self.client.create_run(self.experiment_id, tags=tags, run_name=name)]
            run = found[-1]  # the oldest
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
        """Log the metrics of a round, together with later rounds if rounds are short."""
        self._waiting.setdefault(number, dict(metrics))
        began = time.monotonic()
        if began >= self._next_request:
            with suppress(mlflow.MlflowException, OSError):  # retried later
                self._log_rounds()
            # Spend at most a tenth of the run's time on a server that hangs.
            now = time.monotonic()
            self._next_request = now + max(ROUNDS_SECONDS, 10 * (now - began))

    def logged_rounds(self) -> set[int]:
        """Return the numbers of the completely logged rounds."""
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
        """Log the totals, end the run, and return the rejected parts.

        ``result`` is logged only if no part was rejected. A stopped run (``KILLED``) does not wait
        for a server. A run that had already finished keeps its end time.
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
        ended = ended or max(self._began, int(time.time() * 1000))  # if the clock went back
        self._send(f"status {status}", client.set_terminated, id, status, ended)
        if result and not self._rejected:
            self._send("result", client.set_tag, id, RESULT_TAG, result)
        rejected, self._rejected = self._rejected, []
        return rejected

    def _send(self, what: str, action: Callable[..., object], *args: object) -> None:
        try:
            _retrying(self.patience)(action, *args)
        except (mlflow.MlflowException, OSError) as error:
            if is_outage(error):  # do not wait for the server again
                self.patience = 0.0
            self._rejected.append(f"{what} ({redact(first_line(error))})")


def find_runs(uri: str, experiment: str, attempt: str, *, delete: bool = False) -> "list[Run]":
    """Return the MLflow runs of an attempt; with ``delete``, also delete them."""
    with opened(uri, experiment) as (client, group):
        wanted = f"tags.`{ATTEMPT_TAG}` = '{attempt}'"
        found = list(client.search_runs([group.experiment_id], wanted))
        for run in found if delete else ():
            client.delete_run(run.info.run_id)
    return found


def public(fields: Mapping[str, Scalar]) -> dict[str, str]:
    """Convert fields to valid MLflow parameters: omit secrets, and truncate names and values."""
    found: dict[str, str] = {}
    for key, value in fields.items():
        if not is_secret_name(key):
            name = "".join(c if c.isalnum() or c in "_-. :" else "_" for c in key)[:240]
            found[free_name(name, found)] = redact(str(value))[:5000]
    return found


def dataset_input(
    name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
) -> "DatasetInput":
    """Build an MLflow dataset input; ``context`` is its use, such as ``training``."""
    kind, entities = source.partition(":")[0], mlflow.entities
    text, facts = json.dumps({"source": redact(source)}), json.dumps(dict(profile))
    dataset = entities.Dataset(name, digest, kind, text, profile=facts)
    return entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", context)])


def points_of(metrics: Mapping[str, float], step: int) -> "list[Metric]":
    now = int(time.time() * 1000)
    return [mlflow.entities.Metric(key, float(value), now, step) for key, value in metrics.items()]


def is_outage(error: BaseException) -> bool:
    """Return whether an error may be temporary, unlike a wrong password or invalid input."""
    if not isinstance(error, Exception):  # Ctrl-C, possibly while MLflow is being imported
        return False
    cause = error.__cause__ if isinstance(error, InputError) else error
    # BAD_REQUEST means a failure of the server's database; invalid input has another code.
    temporary = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "BAD_REQUEST")
    return isinstance(cause, mlflow.MlflowException) and cause.error_code in temporary


def _retrying(patience: float) -> tenacity.Retrying:
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_outage),
        wait=tenacity.wait_exponential(multiplier=1, max=10),
        stop=tenacity.stop_before_delay(patience),
        reraise=True,
    )
