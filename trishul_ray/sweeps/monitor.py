"""Monitor of the trials of a sweep: progress, failures, moves, and the samples of a search."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.exceptions import RayActorError
from ray.tune.experiment import Trial

from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.federation.on_ray.ray_internals import launch_failures
from trishul_ray.sweeps.cells import CellRun, FindRun, TuneOptions
from trishul_ray.sweeps.search import Search
from trishul_ray.sweeps.status import record_failure
from trishul_ray.sweeps.trial import (
    FAILURE,
    FINISHED,
    HEADLINE_NAME,
    NOTES,
    ROUND,
    TuneResult,
)
from trishul_ray.tracking.progress import SweepProgress, format_duration

#: Seconds without a running trial before it is reported that trials wait for resources.
WAITING_NOTICE_SECONDS = 60.0


class Monitor(tune.Callback):
    """Follows the trials of one Tuner after the other: progress, failures, samples.

    ``progress`` knows the cells, except those that ``search`` samples.
    """

    def __init__(
        self, find: FindRun, options: TuneOptions, progress: SweepProgress, search: Search | None
    ) -> None:
        self.options = options
        self.failures: dict[str, str] = {}
        self.samples: list[dict[str, Any]] = []
        self.staging: Path | None = None  # where Tune keeps its files until it saves them
        self._find, self._progress = find, progress
        self._search = search
        self._runs: dict[str, CellRun] = {}  # by trial
        self._results: dict[str, TuneResult] = {}  # the last ones, by trial
        self._finished: set[str] = set()  # or stopped early
        self._attempts: dict[str, int] = {}
        self._reported: dict[str, float] = {}  # when, by trial
        self.interruptions = 0  # of cells, failures and moves
        self._waits_since: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks, which nobody reads

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Show that a cell is being run."""
        assert trial.storage is not None
        self.staging = Path(trial.storage.experiment_driver_staging_path).parents[1]
        self._progress.start(self._id(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: TuneResult, **info: Any
    ) -> None:
        """Show a round and what was reported in it."""
        self._results[trial.trial_id] = result
        self._reported[trial.trial_id] = time.monotonic()
        for note in result.get(NOTES, ()):
            self._progress.note(f"{self._run(trial).name}: {note}")
        if ROUND in result:
            headline = result.get(HEADLINE_NAME, "accuracy")
            self._progress.round(self._id(trial), result[ROUND], result, headline)

    def on_trial_recover(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Show why a cell is tried again, or goes on elsewhere."""
        if self._was_preempted(trial):
            self._progress.move(self._id(trial), self._reason(trial))
            return
        attempt = self._count(trial)
        self._progress.retry(
            self._id(trial), self._reason(trial), attempt + 1, self.options.retries + 1
        )

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Note why a cell failed for good."""
        if not self._was_preempted(trial) and self._count(trial) > self.options.retries:
            self._fail(trial, self._reason(trial))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Note how a cell ended that Tune did not count as failed."""
        result = self._results.get(trial.trial_id, {})
        if result.get(FINISHED):
            self._finished.add(self._id(trial))
            self._progress.end(self._id(trial))
        elif FAILURE in result:
            self._count(trial)
            self._fail(trial, result[FAILURE])

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Report once that trials wait for resources; Tune calls this all the time."""
        now = time.monotonic()
        if any(trial.status == Trial.RUNNING for trial in trials):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since > WAITING_NOTICE_SECONDS:
            self._waits_since = math.inf
            why = "; ".join(["waiting for resources on the cluster", *launch_failures()])
            self._progress.note(f"no cell is running: {why}")

    def unfinished(self, ids: Sequence[str]) -> list[str]:
        """Return the cells that Tune has given up although they may be tried again."""
        return [id for id in ids if id not in self._finished and id not in self.failures]

    def _fail(self, trial: Trial, why: str) -> None:
        id = self._id(trial)
        record_failure(self._run(trial).experiment, why, self._attempts.get(id, 1))
        self.failures[id] = why
        self._progress.end(id, failure=why)

    def _count(self, trial: Trial) -> int:
        id = self._id(trial)
        self._attempts[id] = self._attempts.get(id, 0) + 1
        return self._attempts[id]

    def _run(self, trial: Trial) -> CellRun:
        if trial.trial_id not in self._runs:
            run = self._runs[trial.trial_id] = self._find(trial.config)
            if self._search is not None:
                self.samples.append(dict(trial.config))
                self._progress.add(run.experiment.id, run.name, run.experiment.federation.rounds)
        return self._runs[trial.trial_id]

    def _id(self, trial: Trial) -> str:
        return self._run(trial).experiment.id

    def _reason(self, trial: Trial) -> str:
        error = self._error(trial)
        if error is None:
            return "it failed without a reason"
        silent = time.monotonic() - self._reported.get(trial.trial_id, math.inf)
        if isinstance(error, RayActorError) and silent > 60 * self.options.stall_minutes:
            return f"no progress for {format_duration(silent)}: it ended itself"
        return cause_of(error)

    def _was_preempted(self, trial: Trial) -> bool:
        self.interruptions += 1
        return bool(getattr(self._error(trial), "preempted", False))

    def _error(self, trial: Trial) -> Exception | None:
        if trial.pickled_error_file is None:
            return None
        # Written by this process a moment ago.
        error: Exception = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
        return error
