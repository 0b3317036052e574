"""Ray Tune callback that displays progress, and records failures and samples of a search."""

from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.tune.experiment import Trial

from trishul_ray.federation.on_ray.metrics import RunMetrics
from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.sweeps.cells import CellRun, FindRun, TuneOptions
from trishul_ray.sweeps.status import record_failure
from trishul_ray.sweeps.trial import (
    FAILURE,
    FINISHED,
    NOTES,
    PRIMARY_METRIC_NAME,
    ROUND,
    TuneResult,
)
from trishul_ray.tracking.progress import SweepProgress


class Monitor(tune.Callback):
    """Follow the trials of a Tuner.

    Attributes:
        samples: Configurations of all trials.
        failures: Reasons of failed runs, keyed by id.
    """

    def __init__(self, find: FindRun, options: TuneOptions, progress: SweepProgress) -> None:
        self.find, self.options, self.progress = find, options, progress
        self.samples: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}
        self._runs: dict[str, CellRun] = {}  # keyed by trial

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks, but nothing loads them

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        self.progress.start(self._run(trial).experiment.id)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: TuneResult, **info: Any
    ) -> None:
        """Display a round and its notices."""
        run = self._run(trial)
        for note in result.get(NOTES, ()):
            self.progress.note(f"{run.name}: {note}")
        if ROUND in result:
            metric = result.get(PRIMARY_METRIC_NAME, "accuracy")
            self.progress.round(run.experiment.id, int(result[ROUND]), result, metric)

    def on_trial_recover(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Display why a cell is retried, or that it resumes on another node after a preemption."""
        id, error = self._run(trial).experiment.id, _error_of(trial)
        if getattr(error, "preempted", False):
            self.progress.move(id, _reason(error))
        else:
            RunMetrics(self._run(trial).experiment).update("trishul_retries")
            attempts = trial.num_failures + 1, self.options.retries + 1
            self.progress.retry(id, _reason(error), *attempts)

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Record the failure of a cell after all retries."""
        self._fail(trial, _reason(_error_of(trial)))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Display that a cell has finished, or record a failure that a retry would repeat."""
        result = trial.last_result or {}
        if FAILURE in result:
            self._fail(trial, result[FAILURE])
        elif result.get(FINISHED):
            self.progress.end(self._run(trial).experiment.id)

    def _fail(self, trial: Trial, why: str) -> None:
        experiment = self._run(trial).experiment
        self.failures[experiment.id] = why
        record_failure(experiment, why)
        self.progress.end(experiment.id, failure=why)

    def _run(self, trial: Trial) -> CellRun:
        if trial.trial_id not in self._runs:
            run = self._runs[trial.trial_id] = self.find(trial.config)
            self.samples.append(dict(trial.config))
            if "cell" not in trial.config:  # a sample of a search
                self.progress.add(run.experiment.id, run.name, run.experiment.federation.rounds)
        return self._runs[trial.trial_id]


def _error_of(trial: Trial) -> Exception | None:
    # Trial.get_pickled_error reads from the storage, to which Tune has not copied the file yet.
    if trial.pickled_error_file is None:
        return None
    error: Exception = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    return error


def _reason(error: Exception | None) -> str:
    return cause_of(error) if error is not None else "no reason was recorded"
