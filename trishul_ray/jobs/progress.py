"""Progress of the cells of a job, by the store of results."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import round_of
from trishul_ray.report.outcomes import CellStatus
from trishul_ray.runs.folder import RunFolder
from trishul_ray.sweeps.status import NOT_RUN, CellState, examine
from trishul_ray.tracking.progress import Pace

#: A cell without a new file for this long is not running, unless its rounds take longer: at most
#: this many rounds.
QUIET_SECONDS, QUIET_ROUNDS = 600.0, 5.0


@dataclass(frozen=True)
class Progress:
    """The cells of a job.

    Attributes:
        states: How many cells have each status; those that run are not in it.
        running: How many cells run.
        pace: The rounds of the running cells together, by their last two checkpoints.
        rounds_left: Rounds that unfinished cells still need.
    """

    states: Counter[CellStatus]
    running: int
    pace: Pace
    rounds_left: int

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.states.total() + self.running


def read_progress(experiments: Mapping[str, Experiment], now: float | None = None) -> Progress:
    """Read how far experiments are; ``now`` is in seconds since the epoch.

    Raises:
        InputError: The bucket of a store does not exist.
        StorageError: A store cannot be read.
    """
    now = time.time() if now is None else now
    states: Counter[CellStatus] = Counter()
    running = left = 0
    rate = 0.0
    for id, state in examine(experiments).items():
        if state.status in ("finished", "stopped"):
            states[state.status] += 1
            continue
        done, pace, runs = _rounds(experiments[id], state, now)
        left += max(0, experiments[id].federation.rounds - done)
        if runs:
            running += 1
            rate += pace.rate
        else:
            states[state.status] += 1
    return Progress(states, running, Pace(rate, 1.0) if rate else Pace(), left)


def _rounds(experiment: Experiment, state: CellState, now: float) -> tuple[int, Pace, bool]:
    """Return the rounds that are done, their pace, and whether the cell runs."""
    if state == NOT_RUN:
        return 0, Pace(), False
    home = RunFolder.of(experiment).home
    checkpoints = home.child("checkpoints").modified()
    saved = sorted(
        (number, when)
        for name, when in checkpoints.items()
        if (number := round_of(name)) is not None
    )
    (before, since), (done, until) = [(0, 0.0), (0, 0.0), *saved][-2:]
    pace = Pace(done - before, until - since) if len(saved) > 1 else Pace()
    patience = max(QUIET_SECONDS, pace.seconds_for(QUIET_ROUNDS) if pace.done else 0.0)
    quiet = now - max([*home.modified().values(), *checkpoints.values()], default=0.0)
    return done, pace, quiet <= patience and state.status != "failed"
