"""A Ray Tune trial that is one federated run; one step is one round.

The trial's process drives the run. The coordinator and the client actors are started from it and
live in the bundles of its placement group. A trial that failed is run again by Tune and continues
from the checkpoint of the last round; nothing is saved by Tune.

A trial that makes no progress ends itself, by a timer that is set again for each round.
"""

import faulthandler
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, TypeAlias, get_args

from ray import tune
from ray.exceptions import RayActorError
from ray.tune.result import DONE

from trishul_ray.data.dataset import ScoredSplit, score_name
from trishul_ray.errors import BusyError, FailsAgainError, InputError, RunError, one_line
from trishul_ray.federation.on_ray.driver import Workers
from trishul_ray.federation.on_ray.nodes import draining_nodes_of_trial
from trishul_ray.federation.on_ray.process import WorkerEnvironment
from trishul_ray.federation.server import RoundReport
from trishul_ray.report.summary import NUMBERS, attempt_of
from trishul_ray.runs.folder import RunFolder
from trishul_ray.runs.runner import FinishedRun, RunSteps, run_steps
from trishul_ray.sweeps.cells import CellRun, FindRun
from trishul_ray.sweeps.search import HEADLINE
from trishul_ray.tracking.progress import RunProgress

#: Keys of a trial's results, besides the metrics of the round and :data:`HEADLINE`.
ROUND, NOTES, FAILURE, FINISHED = "round", "notes", "failure", "finished"
BUSY = "busy"
#: A trial may be silent for this many times its median round, and its longest one.
MEDIAN_ROUNDS, LONGEST_ROUNDS = 5.0, 2.0
#: The metric that :data:`HEADLINE` is, by its own name.
HEADLINE_NAME = "headline_name"
#: Report of a trial after a round: the metrics, and values of the keys above.
TuneResult: TypeAlias = dict[str, Any]


class _Notes(RunProgress):
    """Collects what a run reports while it trains, instead of displaying it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.notes: list[str] = []
        self._training = False

    def phase(self, text: str) -> None:
        self._training = self._training or text.startswith("training")

    def advance(self, round_: int, metrics: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        if self._training:  # before, it is what every cell of a sweep would report
            self.notes.append(text)

    def task_progress(self, label: str) -> Callable[[str, float], None]:
        return lambda text, share: None


class NodeDrainsError(RayActorError):
    """Ends a trial whose node is being drained.

    ``preempted``: as after a preemption, Tune counts no failure and starts the trial elsewhere.
    """

    def __init__(self, message: str) -> None:
        super().__init__(error_msg=message, preempted=True)


class CellTrial(tune.Trainable):
    """Runs one cell of a sweep after the other, with the same coordinator and client actors.

    Each result is one round: its number, its metrics, and what was reported in it. The first one,
    without a round, says that the run has been loaded; before it, ``busy`` says that the run waits
    for another process. The last one has ``finished``, ``failure`` if the same input would fail
    again.

    A trial may take ``loading_seconds`` to start, and a run to load data and backbone.
    """

    loading_seconds = 1800.0
    _waits: bool

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Start, or end this process; Tune fetches what it passes to :meth:`setup`."""
        faulthandler.dump_traceback_later(self.loading_seconds, exit=True)
        super().__init__(*arguments, **named)
        faulthandler.cancel_dump_traceback_later()

    def setup(  # type: ignore[override]  # tune.with_parameters adds the others
        self,
        config: dict[str, Any],
        find: FindRun,
        environment: WorkerEnvironment,
        stall_seconds: float,
    ) -> None:
        """Open the first run; ``find`` returns what a Tune configuration runs."""
        environment.apply()
        self._stall_seconds = stall_seconds
        os.environ.pop("MLFLOW_RUN_ID", None)  # would replace the parent of the runs logged here
        self._find = find
        self._workers = Workers()
        self._open(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Open the next run; the actors stay."""
        self._close_run()
        self._open(new_config)
        return True

    def cleanup(self) -> None:
        """End the actors."""
        self._close_run()
        self._workers.close()

    def step(self) -> TuneResult:
        """Run one round and return its metrics.

        Raises:
            NodeDrainsError: No round was begun, because a node of this trial is being drained.
            RunError: The run failed; the message is one line.
        """
        if not self._results and draining_nodes_of_trial():
            self.cleanup()
            raise NodeDrainsError("its node is being drained")
        try:
            while not self._results:
                self._advance_in_time()
        except BusyError:
            # Its result will count; if that process ends without one, this one continues the run.
            self._steps = self._run(self._cell)
            notes = [] if self._waits else ["another process runs it: waiting"]
            self._add({BUSY: True, NOTES: notes})
            self._waits = True  # and have said so
        except InputError as error:
            # Not raised: Tune would try again, with the same input.
            self._add({FAILURE: one_line(error), DONE: True})
        except FailsAgainError as error:
            self._add({FAILURE: f"{one_line(error)} (it would fail again)", DONE: True})
        except (RunError, OSError) as error:
            raise RunError(one_line(error)) from None
        return self._results.popleft()

    def _open(self, config: Mapping[str, Any]) -> None:
        self._cell = self._find(config)
        self._waits = False
        self._loaded = False
        self._round_seconds: list[float] = []
        self._notes = _Notes()
        self._metrics: dict[str, float] = {}
        self._results: deque[TuneResult] = deque()
        self._steps = self._run(self._cell)

    def _run(self, run: CellRun) -> RunSteps:
        # A generator: nothing is done before the first step, where Tune handles errors.
        home = RunFolder.of(run.experiment).home
        steps = partial(
            run_steps,
            run.experiment,
            self._notes,
            workers=self._workers,
            extras=False,
            tags=run.tags,
        )
        old = run.replaces is not None and run.replaces == attempt_of(home)
        finished = yield from steps(fresh=old)
        if finished.repeated and finished.summary.damaged_files(home, NUMBERS):
            # Its last checkpoint is lost, too.
            finished = yield from steps(fresh=True)
        return finished

    def _advance_in_time(self) -> None:
        """Advance the run, or end this process if it takes too long; its log says where it was.

        Tune sees that the actor has died, and runs the trial again from its checkpoint. Long rounds
        are no stall: a run has its own pace, and loading has its own limit.
        """
        limit = self._stall_seconds
        if not self._loaded:
            limit = max(limit, self.loading_seconds)
        elif took := self._round_seconds:
            limit = max(limit, MEDIAN_ROUNDS * median(took), LONGEST_ROUNDS * max(took))
        began = time.monotonic()
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            self._advance()
        finally:
            faulthandler.cancel_dump_traceback_later()
        if self._loaded:
            self._round_seconds.append(time.monotonic() - began)
        self._loaded = True

    def _advance(self) -> None:
        try:
            report = next(self._steps)
            self._add_rounds(report)
            if report.finished:
                # Write the results in the same step: the last round is the last step.
                next(self._steps)
        except StopIteration as end:
            finished: FinishedRun = end.value
            self._notes.headline = finished.summary.headline
            if not self._results:
                self._metrics = finished.summary.final
                self._add({ROUND: finished.summary.final["round"]})
            last = self._results[-1]
            last |= {FINISHED: True, DONE: True, NOTES: [*last[NOTES], *self._take_notes()]}

    def _add_rounds(self, report: RoundReport) -> None:
        for record in report.records:
            self._metrics |= record.metrics()
            self._add({ROUND: record.round})
        if not report.records:
            self._add({})

    def _add(self, fields: dict[str, Any]) -> None:
        headline: dict[str, float] = {}
        for rows in get_args(ScoredSplit):
            if (name := score_name(self._notes.headline, rows)) in self._metrics:
                headline[score_name(HEADLINE, rows)] = self._metrics[name]
        known = {NOTES: self._take_notes(), DONE: False, HEADLINE_NAME: self._notes.headline}
        self._results.append({**self._metrics, **headline, **known, **fields})

    def _take_notes(self) -> list[str]:
        notes, self._notes.notes = self._notes.notes, []
        return notes

    def _close_run(self) -> None:
        with suppress(Exception):  # it has failed, or Tune has stopped it
            self._steps.close()
