"""End trials that make no progress, so that Tune runs them again."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial

from trishul_ray.tracking.progress import format_duration

#: A trial may be silent for this many times its longest round.
LONGEST_ROUNDS = 5.0
#: Seconds after which a trial that was ended but is still there is ended again.
AGAIN_SECONDS = 60.0


@dataclass
class _Watch:
    """When a trial reported, and how long its longest round took, in seconds."""

    actor: Any
    reported: float
    longest: float = 0.0
    started: bool = False
    ended: float | None = None


class Watchdog(tune.Callback):
    """Ends the process of a trial that has not reported a round for too long.

    The limit is the larger one of ``limit`` and :data:`LONGEST_ROUNDS` times the trial's longest
    round, so that long rounds are no stall. Tune sees the death of an actor and runs the trial
    again, which continues from its checkpoint.

    Args:
        limit: Seconds without a report.
        clock: Returns seconds.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._watched: dict[str, _Watch] = {}
        self.reasons: dict[str, str] = {}  # why a trial was ended, by trial id

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Begin to watch a trial."""
        self._watched[trial.trial_id] = _Watch(trial.temporary_state.ray_actor, self._clock())

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Note a report. The first round also loads the backbone and counts as none."""
        watch, now = self._watched[trial.trial_id], self._clock()
        if watch.started:
            watch.longest = max(watch.longest, now - watch.reported)
        watch.started, watch.reported = True, now

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """End trials that have been silent for too long; Tune calls this all the time."""
        now = self._clock()
        for trial in trials:
            actor = trial.temporary_state.ray_actor
            if actor is None or trial.is_finished():
                self._watched.pop(trial.trial_id, None)
                continue
            watch = self._watched.setdefault(trial.trial_id, _Watch(actor, now))
            if watch.actor != actor:
                self._watched[trial.trial_id] = _Watch(actor, now)
            elif self._is_stalled(watch, now):
                watch.ended = now
                silent = format_duration(now - watch.reported)
                self.reasons[trial.trial_id] = f"no progress for {silent}: ended by the watchdog"
                ray.kill(actor)  # its node ends also a process that is stopped

    def _is_stalled(self, watch: _Watch, now: float) -> bool:
        limit = max(self.limit, LONGEST_ROUNDS * watch.longest)
        again = watch.ended is None or now - watch.ended > AGAIN_SECONDS
        return now - watch.reported > limit and again
