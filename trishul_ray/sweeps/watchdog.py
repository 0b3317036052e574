"""End trials that make no progress, so that Tune runs them again."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial

from trishul_ray.federation.on_ray.ray_internals import end_actor, starting_actors
from trishul_ray.sweeps.trial import BUSY, ROUND
from trishul_ray.tracking.progress import format_duration

#: A trial may be silent for this many times its median round, and its longest one.
MEDIAN_ROUNDS, LONGEST_ROUNDS = 5.0, 2.0
#: Seconds in which a trial must have loaded its data and backbone.
LOADING_SECONDS = 1800.0
#: Seconds after which a trial that was ended but is still there is ended again.
AGAIN_SECONDS = 60.0
#: Name of the class that ``tune.with_resources`` makes of a trial's.
TRAINABLE = "ResourceTrainable"
#: Seconds between two looks at the trials whose constructor is running.
LOOK_SECONDS = 5.0


@dataclass
class _Watch:
    """When a trial reported, and how long its rounds took, in seconds."""

    actor: Any
    reported: float
    rounds: list[float] = field(default_factory=list)
    loaded: bool = False
    ended: float | None = None


class Watchdog(tune.Callback):
    """Ends the process of a trial that has not reported a round for too long.

    The limit is ``limit``, but at least :data:`MEDIAN_ROUNDS` times the trial's median round and
    :data:`LONGEST_ROUNDS` times its longest, so that long rounds are no stall; before a trial has
    loaded, at least :data:`LOADING_SECONDS`. Tune sees the death of an actor and runs the trial
    again, which continues from its checkpoint. A trial that waits for resources has no actor; one
    whose constructor hangs has an actor that Tune does not show, but Ray's list of actors does.

    Args:
        limit: Seconds without a report.
        clock: Returns seconds.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._start_limit = max(limit, LOADING_SECONDS)
        self._watched: dict[str, _Watch] = {}
        self._starting: dict[str, float] = {}  # since when, by actor id
        self._looked = -LOOK_SECONDS
        self.reasons: dict[str, str] = {}  # why a trial was ended, by trial id or actor id

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Begin to watch a trial."""
        self._watched[trial.trial_id] = _Watch(trial.temporary_state.ray_actor, self._clock())

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Note a report."""
        watch, now = self._watched[trial.trial_id], self._clock()
        if watch.loaded and ROUND in result:
            watch.rounds.append(now - watch.reported)
        watch.loaded, watch.reported = not result.get(BUSY), now

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
                self.reasons[trial.trial_id] = _reason(now - watch.reported)
                ray.kill(actor)  # its node ends also a process that is stopped
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._end_stalled_starts(now)

    def _end_stalled_starts(self, now: float) -> None:
        self._starting = {
            actor: self._starting.get(actor, now) for actor in starting_actors(TRAINABLE)
        }
        for actor, since in self._starting.items():
            if now - since > self._start_limit:
                self.reasons[actor] = f"not started, {_reason(now - since)}"
                self._starting[actor] = now  # to end it again, if it is still there
                end_actor(actor)

    def _is_stalled(self, watch: _Watch, now: float) -> bool:
        limit = self.limit if watch.loaded else self._start_limit
        if watch.rounds:
            own = MEDIAN_ROUNDS * median(watch.rounds), LONGEST_ROUNDS * max(watch.rounds)
            limit = max(limit, *own)
        again = watch.ended is None or now - watch.ended > AGAIN_SECONDS
        return now - watch.reported > limit and again


def _reason(seconds: float) -> str:
    return f"no progress for {format_duration(seconds)}: ended by the watchdog"
