"""Ray Tune trainable that executes a federated run, one round per step.

The process of the trial drives the run, and starts the coordinator and the client actors in the
bundles of its placement group. A failed trial is retried by Tune and resumes at the run's own
checkpoint of the last round; Tune checkpoints are not used. A stalled trial terminates itself.
"""

import faulthandler
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias, get_args

from ray import tune
from ray.tune.result import DONE
from rich.console import Console

from trishul_ray.data.dataset import ScoredSplit, score_name
from trishul_ray.errors import BusyError, InputError, PermanentError, RunError, one_line
from trishul_ray.federation.on_ray.driver import Workers
from trishul_ray.federation.on_ray.process import WorkerEnvironment
from trishul_ray.report.summary import ATTEMPT, NUMBERS, read_note
from trishul_ray.runs.folder import RunFolder
from trishul_ray.runs.runner import FinishedRun, RunSteps, run_steps
from trishul_ray.sweeps.cells import CellRun, FindRun
from trishul_ray.sweeps.search import PRIMARY_METRIC
from trishul_ray.tracking.progress import RunProgress

#: Keys of a trial's results, in addition to the metrics of the round and :data:`PRIMARY_METRIC`:
#: number of the round, notices, reason of a failure that a retry would repeat, whether the run has
#: finished, and the name of the primary metric.
ROUND, NOTES, FAILURE, FINISHED = "round", "notes", "failure", "finished"
PRIMARY_METRIC_NAME = "primary_metric_name"
#: A round may take up to this multiple of the longest round so far.
LONGEST_ROUNDS = 5.0
#: Result of a trial after a round: metrics, and values of the keys above.
TuneResult: TypeAlias = dict[str, Any]


class _Notes(RunProgress):
    """Collect the notices of a run instead of displaying its progress."""

    def __init__(self) -> None:
        super().__init__(1, Console(quiet=True))
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class CellTrial(tune.Trainable):
    """Run cells of a sweep sequentially, reusing the coordinator and client actors.

    Each result is one round. The last result has ``finished``, or ``failure`` if a retry would fail
    with the same error.
    """

    #: Minimum time limit for starting a run, which loads the data and the backbone, in seconds.
    loading_seconds = 1800.0
    _waits: bool

    def setup(  # type: ignore[override]  # tune.with_parameters adds the other parameters
        self,
        config: dict[str, Any],
        find: FindRun,
        environment: WorkerEnvironment,
        stall_seconds: float,
    ) -> None:
        """Open the first run. ``find`` returns the run of a Tune configuration."""
        environment.apply()
        os.environ.pop("MLFLOW_RUN_ID", None)  # it would override the parent run
        self._find, self._stall_seconds = find, stall_seconds
        self._workers = Workers()
        self._open(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Open the next run, reusing the actors."""
        self._close_run()
        self._open(new_config)
        return True

    def cleanup(self) -> None:
        self._close_run()
        self._workers.close()

    def step(self) -> TuneResult:
        """Run one round, and return its metrics.

        Raises:
            RunError: The run failed. The message is one line.
        """
        # On a timeout, the process logs its stack and exits. Tune retries the trial, which resumes
        # at its checkpoint.
        limit = max(self._stall_seconds, LONGEST_ROUNDS * max(self._seconds, default=0.0))
        began = time.monotonic()
        faulthandler.dump_traceback_later(
            limit if self._seconds else max(limit, self.loading_seconds), exit=True
        )
        try:
            return self._advance()
        except BusyError:
            # Use the result of that process, or resume the run if it ends without a result.
            self._steps = self._run(self._cell)
            first, self._waits = not self._waits, True
            return self._result(["another process runs it: waiting"] if first else [])
        except InputError as error:  # not raised: Tune would retry with the same input
            return self._result([], **{FAILURE: one_line(error), DONE: True})
        except PermanentError as error:
            why = f"{one_line(error)} (it would fail again)"
            return self._result([], **{FAILURE: why, DONE: True})
        except (RunError, OSError) as error:
            raise RunError(one_line(error)) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._seconds.append(time.monotonic() - began)

    def _open(self, config: Mapping[str, Any]) -> None:
        self._cell = self._find(config)
        self._waits = False
        self._seconds: list[float] = []
        self._progress = _Notes()
        self._metrics: dict[str, float] = {}
        self._steps = self._run(self._cell)

    def _run(self, run: CellRun) -> RunSteps:
        # A generator, so that errors are raised in the first step, where Tune handles them.
        home = RunFolder.of(run.experiment).home
        old = run.replaces is not None and run.replaces == read_note(home, ATTEMPT)
        options: dict[str, Any] = {"workers": self._workers, "extras": False, "tags": run.tags}
        finished = yield from run_steps(run.experiment, self._progress, fresh=old, **options)
        if finished.repeated and finished.summary.damaged_files(home, NUMBERS):
            # The last checkpoint is also lost, so start over.
            finished = yield from run_steps(run.experiment, self._progress, fresh=True, **options)
        return finished

    def _advance(self) -> TuneResult:
        try:
            report = next(self._steps)
            if not self._metrics:  # otherwise, every cell would repeat the notices of the start
                self._progress.notes.clear()
            for record in report.records:
                self._metrics |= {ROUND: record.round, **record.metrics()}
            if report.finished:
                next(self._steps)  # write the results in the same step
        except StopIteration as end:
            finished: FinishedRun = end.value
            self._progress.primary_metric = finished.summary.headline
            self._metrics |= finished.summary.final
            return self._result(self._progress.notes, **{FINISHED: True, DONE: True})
        return self._result(self._progress.notes)

    def _result(self, notes: list[str], **fields: Any) -> TuneResult:
        name, self._progress.notes = self._progress.primary_metric, []
        primary_metric = {
            score_name(PRIMARY_METRIC, rows): self._metrics[score_name(name, rows)]
            for rows in get_args(ScoredSplit)
            if score_name(name, rows) in self._metrics
        }
        known = {NOTES: notes, DONE: False, PRIMARY_METRIC_NAME: name}
        return {**self._metrics, **primary_metric, **known, **fields}

    def _close_run(self) -> None:
        with suppress(Exception):  # the run failed, or Tune stopped it
            self._steps.close()
