"""How far the cells of a job are, read from the store of results."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import round_of, run_folder
from trishul_ray.report.outcomes import Status
from trishul_ray.sweeps.state import CellState, examine
from trishul_ray.tracking.progress import Pace

#: A cell without a new file for this long is not running, unless its rounds take longer.
QUIET_SECONDS = 600.0
#: A cell is running if its last file is at most this many rounds old.
QUIET_ROUNDS = 5.0


@dataclass(frozen=True)
class Progress:
    """The cells of a job.

    Attributes:
        states: How many cells have each status; those that run are not in it.
        running: How many cells run.
        rounds_per_minute: What the running cells do together, by their last two checkpoints.
        rounds_left: Rounds that unfinished cells still need.
    """

    states: Counter[Status]
    running: int
    rounds_per_minute: float
    rounds_left: int

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.states.total() + self.running

    @property
    def minutes_left(self) -> float | None:
        """Minutes that the unfinished cells take at the present speed; None without a speed."""
        return self.rounds_left / self.rounds_per_minute if self.rounds_per_minute else None


def read_progress(experiments: Mapping[str, Experiment], now: float | None = None) -> Progress:
    """Read how far experiments are; ``now`` is in seconds since the epoch.

    Raises:
        InputError: The bucket of a store does not exist.
        StorageError: A store cannot be read.
    """
    now = time.time() if now is None else now
    found = examine(experiments)
    states: Counter[Status] = Counter()
    running = left = 0
    speed = 0.0
    for id, experiment in experiments.items():
        state = found[id]
        if state.status in ("finished", "stopped"):
            states[state.status] += 1
            continue
        done, rate, runs = _rounds(experiment, state, now)
        left += max(0, experiment.federation.rounds - done)
        if runs:
            running += 1
            speed += rate
        else:
            states[state.status] += 1
    return Progress(states, running, 60 * speed, left)


def _rounds(experiment: Experiment, state: CellState, now: float) -> tuple[int, float, bool]:
    """Return the rounds that are done, rounds a second, and whether the cell runs."""
    if state.reason == "not run yet":
        return 0, 0.0, False
    home = run_folder(experiment)
    times = home.modified()
    saved = {
        number: when
        for name, when in home.child("checkpoints").modified().items()
        if (number := round_of(name)) is not None
    }
    last = max([*times.values(), *saved.values()], default=0.0)
    rounds = sorted(saved)
    done = rounds[-1] if rounds else 0
    pace = Pace()
    if len(rounds) > 1:
        pace = Pace(done - rounds[-2], saved[done] - saved[rounds[-2]])
    patience = max(QUIET_SECONDS, pace.seconds_for(QUIET_ROUNDS) if pace.done else 0.0)
    return done, pace.rate, now - last <= patience and state.status != "failed"
