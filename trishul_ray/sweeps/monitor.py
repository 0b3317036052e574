"""Monitor of the trials of a sweep: progress, failures, and the samples of a search."""

import math
import time
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.tune.experiment import Trial

from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.sweeps.cells import CellRun, FindRun, TuneOptions
from trishul_ray.sweeps.status import record_failure
from trishul_ray.sweeps.trial import FAILURE, FINISHED, HEADLINE_NAME, NOTES, ROUND, TuneResult
from trishul_ray.tracking.progress import SweepProgress

#: Seconds without an active trial before it is reported that trials wait for resources.
WAITING_NOTICE_SECONDS = 60.0


class Monitor(tune.Callback):
    """Follows the trials of a Tuner; ``samples`` are the configurations that a search ran."""

    def __init__(self, find: FindRun, options: TuneOptions, progress: SweepProgress) -> None:
        self.samples: list[dict[str, Any]] = []
        self._find, self._options, self._progress = find, options, progress
        self._runs: dict[str, CellRun] = {}  # by trial
        self._attempts: dict[str, int] = {}
        self._waits_since: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks, and nothing reads them

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Show that a cell runs, perhaps again."""
        self._progress.start(self._run(trial).experiment.id)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: TuneResult, **info: Any
    ) -> None:
        """Show a round and its notes."""
        run = self._run(trial)
        for note in result.get(NOTES, ()):
            self._progress.note(f"{run.name}: {note}")
        if ROUND in result:
            headline = result.get(HEADLINE_NAME, "accuracy")
            self._progress.round(run.experiment.id, int(result[ROUND]), result, headline)

    def on_trial_recover(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Show why a cell is retried, or resumes elsewhere after a preemption."""
        id, error = self._run(trial).experiment.id, _error_of(trial)
        if getattr(error, "preempted", False):
            self._progress.move(id, _reason(error))
            return
        attempt = self._attempts[id] = self._attempts.get(id, 0) + 1
        self._progress.retry(id, _reason(error), attempt + 1, self._options.retries + 1)

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Record why a cell failed for good."""
        self._fail(trial, _reason(_error_of(trial)))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Show that a cell has finished, or record why it would fail again."""
        result = trial.last_result or {}
        if FAILURE in result:
            self._fail(trial, result[FAILURE])
        elif result.get(FINISHED):
            self._progress.end(self._run(trial).experiment.id)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Report once that trials wait for resources; Tune calls this all the time."""
        now = time.monotonic()
        if any(trial.status == Trial.RUNNING for trial in trials):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since > WAITING_NOTICE_SECONDS:
            self._waits_since = math.inf
            self._progress.note("no run is active: waiting for resources (see `ray status`)")

    def _fail(self, trial: Trial, why: str) -> None:
        experiment = self._run(trial).experiment
        record_failure(experiment, why, self._attempts.get(experiment.id, 0) + 1)
        self._progress.end(experiment.id, failure=why)

    def _run(self, trial: Trial) -> CellRun:
        if trial.trial_id not in self._runs:
            run = self._runs[trial.trial_id] = self._find(trial.config)
            self.samples.append(dict(trial.config))
            if "cell" not in trial.config:  # a sample of a search
                self._progress.add(run.experiment.id, run.name, run.experiment.federation.rounds)
        return self._runs[trial.trial_id]


def _error_of(trial: Trial) -> Exception | None:
    if trial.pickled_error_file is None:
        return None
    # Written by this process a moment ago.
    error: Exception = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    return error


def _reason(error: Exception | None) -> str:
    return cause_of(error) if error is not None else "it failed without a reason"
