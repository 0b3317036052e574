"""One MLflow run for one experiment, however often the experiment was stopped and resumed.

Only ``MlflowClient`` with an explicit run id is used: no active run, no global tracking URI, so
that any number of runs live in one process. A run is found again by a tag that is written in the
same request that creates it, so a driver killed at any moment continues the run it began.
"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from trishul_ray.errors import InputError
from trishul_ray.tracking.store import (
    experiment_id,
    names_secret,
    open_client,
    redact,
    sqlite_file,
    store_lock,
    ui_command,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

ATTEMPT_TAG = "trishul.attempt"
PARENT_TAG = "mlflow.parentRunId"
#: Logged last in every round: a step that has it was logged whole.
ROUND_METRIC = "round"

_PARAM_VALUE_LIMIT = 6000  # MLflow's MAX_PARAM_VAL_LENGTH
_TAG_VALUE_LIMIT = 5000  # the smallest limit among MLflow's stores
_KEY_LIMIT = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000

Status = Literal["FINISHED", "FAILED", "KILLED"]
Scalar = str | int | float | bool | None


class Tracker(Protocol):
    """What a run tells of itself while it goes; :class:`MlflowRun` or :class:`NullRun`."""

    @property
    def run_id(self) -> str | None:
        """The tracking run's id, if there is one."""

    def log_round(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one round's metrics, unless the round has been logged before."""

    def logged_steps(self) -> frozenset[int]:
        """The rounds that have been logged whole."""

    def missing(self, steps: Iterable[int]) -> list[int]:
        """Those of ``steps`` that have not been logged, in order."""

    def log_data(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
    ) -> None:
        """Log the rows that the run reads as a dataset input."""

    def log_artifacts(self, folder: Path | str, under: str | None = None) -> None:
        """Log every file of a local folder."""

    def set_tags(self, tags: Mapping[str, Scalar]) -> None:
        """Set tags of the run."""

    def finish(self, status: Status = "FINISHED") -> list[str]:
        """End the run; what the store would not take, in words."""

    def ui_command(self) -> str | None:
        """The command (or address) that opens the run for a person."""


class MlflowRun:
    """A run in an MLflow store; make one with :meth:`open`."""

    def __init__(self, client: "MlflowClient", uri: str, experiment: str, run: "Run") -> None:
        """Wrap an existing run; use :meth:`open`."""
        self._client = client
        self._uri = uri
        self._experiment_id = experiment
        self._run_id: str = run.info.run_id
        self._logged: set[int] | None = None
        self._waiting: dict[int, dict[str, float]] = {}
        self._refused: list[str] = []

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
        """Find the run of this attempt, or create it.

        Args:
            uri: the tracking URI, from :func:`trishul_ray.tracking.store.tracking_uri`.
            experiment_name: the MLflow experiment, created if there is none. In a SQLite store
                its artifacts go to ``mlartifacts/`` beside the database.
            attempt: what is resumed under the same name is the same run: the experiment's id,
                or whatever else stands for one attempt at it.
            run_name: shown to people.
            params: flat parameters. Secrets are masked or left out, long values cut. A parameter
                that has changed since the run was created (MLflow allows no change) stands in
                the tag ``trishul.resumed_with``.
            tags: further tags.
            parent_run: MLflow run id of the sweep this run belongs to.

        Raises:
            InputError: the store does not answer or cannot be written, or the experiment was
                deleted.
        """
        if not attempt or not attempt.isascii() or "'" in attempt or "\\" in attempt:
            raise InputError(f"attempt={attempt!r}: use ASCII letters, digits, '-', '_', '.', ':'")
        file = sqlite_file(uri)
        all_tags = _public(tags or {}, _TAG_VALUE_LIMIT) | {ATTEMPT_TAG: attempt}
        if parent_run is not None:
            all_tags[PARENT_TAG] = parent_run
        # The lock also spans find-or-create: two drivers of one attempt must not make two runs.
        with store_lock(uri):
            client = open_client(uri)
            experiment = experiment_id(
                client, experiment_name, file and file.parent / "mlartifacts"
            )
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
                run = client.create_run(experiment, tags=all_tags, run_name=run_name)
        self = cls(client, uri, experiment, run)
        self._log_params(_public(params, _PARAM_VALUE_LIMIT), run.data.params)
        return self

    @property
    def run_id(self) -> str:
        """MLflow's id of the run."""
        return self._run_id

    def log_round(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one round's metrics, unless the round has been logged before.

        A store that fails does not stop the run: the round waits and goes out with a later one,
        at the latest in :meth:`finish`.
        """
        if step not in self.logged_steps():
            self._waiting[step] = {key: float(value) for key, value in metrics.items()}
        self._send_waiting()

    def logged_steps(self) -> frozenset[int]:
        """The rounds that have been logged whole, by this process or by one before it."""
        from mlflow.exceptions import MlflowException

        if self._logged is None:
            try:
                history = self._client.get_metric_history(self._run_id, ROUND_METRIC)
            except MlflowException:
                return frozenset()  # asked again at the next round, before anything is sent
            self._logged = {int(point.step) for point in history}
        return frozenset(self._logged)

    def missing(self, steps: Iterable[int]) -> list[int]:
        """Those of ``steps`` that have not been logged, in order."""
        logged = self.logged_steps()
        return sorted(step for step in set(steps) if step not in logged)

    def log_data(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
    ) -> None:
        """Log the rows that the run reads as a dataset input, once however often it is resumed.

        A store that fails does not stop the run: :meth:`finish` names what it would not take.

        Args:
            name: of the dataset.
            digest: of its rows, at most 36 characters.
            source: where the rows came from.
            context: what they are for, ``training`` or ``evaluation``.
            profile: facts about them, e.g. their number.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.exceptions import MlflowException

        dataset = Dataset(
            name=name,
            digest=digest,
            source_type=source.partition(":")[0],
            source=json.dumps({"source": redact(source)}),
            profile=json.dumps(dict(profile)),
        )
        tags = [InputTag("mlflow.data.context", context)]
        try:
            self._client.log_inputs(self._run_id, datasets=[DatasetInput(dataset, tags)])
        except MlflowException:
            self._refused.append(f"dataset {name}")

    def log_artifacts(self, folder: Path | str, under: str | None = None) -> None:
        """Log every file of a local folder, at ``under`` within the run's artifacts.

        A store that fails does not stop the run: :meth:`finish` names what it would not take.

        Raises:
            InputError: ``folder`` is no folder.
        """
        from mlflow.exceptions import MlflowException

        if not Path(folder).is_dir():
            raise InputError(f"artifacts: {folder} is no folder")
        try:
            self._client.log_artifacts(self._run_id, str(folder), artifact_path=under)
        except (MlflowException, OSError):
            self._refused.append(f"folder {folder}")

    def set_tags(self, tags: Mapping[str, Scalar]) -> None:
        """Set tags of the run; secrets are masked or left out."""
        for key, value in _public(tags, _TAG_VALUE_LIMIT).items():
            self._client.set_tag(self._run_id, key, value)

    def finish(self, status: Status = "FINISHED") -> list[str]:
        """End the run with ``status``; what the store would not take, in words.

        The list is empty unless the store failed; a run opened again for the same attempt can
        log what is missing (:meth:`missing`).
        """
        from mlflow.exceptions import MlflowException

        self._send_waiting()
        refused = [f"round {step}" for step in sorted(self._waiting)] + self._refused
        try:
            self._client.set_terminated(self._run_id, status=status)
        except MlflowException:
            refused.append(f"status {status}")
        return refused

    def ui_command(self) -> str:
        """The command that serves this store in a browser, or the run's page on a server."""
        page = f"#/experiments/{self._experiment_id}/runs/{self._run_id}"
        if self._uri.startswith(("http://", "https://")):
            return f"{redact(self._uri).rstrip('/')}/{page}"
        return ui_command(self._uri)

    def _send_waiting(self) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        for step in sorted(self._waiting):
            if self._logged is None:
                self.logged_steps()
            if self._logged is None:
                return  # without the history, sending could log a round twice
            now = int(time.time() * 1000)
            points = [Metric(key, value, now, step) for key, value in self._waiting[step].items()]
            points.append(Metric(ROUND_METRIC, float(step), now, step))
            try:
                for start in range(0, len(points), _METRICS_PER_BATCH):
                    self._client.log_batch(
                        self._run_id, metrics=points[start : start + _METRICS_PER_BATCH]
                    )
            except MlflowException as error:
                if error.error_code == "INVALID_PARAMETER_VALUE":
                    raise  # a metric's name is wrong: that is our fault, not the store's
                return
            self._logged.add(step)
            del self._waiting[step]

    def _log_params(self, params: Mapping[str, str], known: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        new = [Param(key, value) for key, value in params.items() if key not in known]
        for start in range(0, len(new), _PARAMS_PER_BATCH):
            self._client.log_batch(self._run_id, params=new[start : start + _PARAMS_PER_BATCH])
        changed = {k: v for k, v in params.items() if k in known and known[k] != v}
        if changed:
            text = json.dumps(changed, sort_keys=True)
            self._client.set_tag(self._run_id, "trishul.resumed_with", text[:_TAG_VALUE_LIMIT])


class NullRun:
    """The tracker of a run with ``tracking.mlflow=false``: takes everything, keeps nothing."""

    @property
    def run_id(self) -> None:
        """There is no run."""
        return None

    def log_round(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def logged_steps(self) -> frozenset[int]:
        """None."""
        return frozenset()

    def missing(self, steps: Iterable[int]) -> list[int]:
        """None is missing: nothing is to be logged."""
        return []

    def log_artifacts(self, folder: Path | str, under: str | None = None) -> None:
        """Nothing."""

    def log_data(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Scalar]
    ) -> None:
        """Nothing."""

    def set_tags(self, tags: Mapping[str, Scalar]) -> None:
        """Nothing."""

    def finish(self, status: Status = "FINISHED") -> list[str]:
        """Nothing was refused."""
        return []

    def ui_command(self) -> None:
        """There is nothing to open."""
        return None


def _public(fields: Mapping[str, Scalar], limit: int) -> dict[str, str]:
    """Fields as MLflow takes them, without secrets."""
    public = {}
    for key, value in fields.items():
        if names_secret(key):
            continue
        name = "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in key)[:_KEY_LIMIT]
        text = redact(str(value))
        public[name] = text if len(text) <= limit else text[: limit - 1] + "…"
    return public
