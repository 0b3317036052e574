"""Progress of a sweep: a live list of running cells on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from trishul_ray.tracking.progress import Pace, RunProgress, format_duration

#: Number of running cells that are shown on a terminal.
SHOWN = 12


@dataclass
class _Running:
    """A cell that is being run."""

    began: float
    first: int | None = None  # the round it continued from
    round: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    task: TaskID | None = None


class SweepProgress(RunProgress):
    """Progress display of many federated runs, as a context manager.

    On a terminal it is a live bar with one line for each running cell; elsewhere one plain line per
    finished cell. It is not thread-safe: call it from the driver only.

    Args:
        console: Where to print; default is standard error.
        clock: Returns seconds.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(1, console)
        self._clock = clock
        self._cells: dict[str, tuple[str, int]] = {}  # name and rounds, by id
        self._unnamed = 0  # cells that are expected
        self._running: dict[str, _Running] = {}
        self._done: dict[str, bool] = {}  # whether it finished, by id
        self._began: float | None = None
        self._rounds_done = 0
        self._rounds_left = 0

    @property
    def _total_cells(self) -> int:
        return len(self._cells) + self._unnamed

    def expect(self, cells: int, rounds: int) -> None:
        """Announce cells of ``rounds`` rounds each that :meth:`add` will name later."""
        self._unnamed += cells
        self._rounds_left += cells * rounds
        self._show()

    def add(self, id: str, name: str, rounds: int) -> None:
        """Announce a cell, or name an expected one."""
        self._cells[id] = (name, rounds)
        if self._unnamed:
            self._unnamed -= 1
        else:
            self._rounds_left += rounds
        self._show()

    def start(self, id: str) -> None:
        """Show that a cell is being run, perhaps again."""
        now = self._clock()
        old = self._running.get(id)
        self._running[id] = _Running(old.began if old else now, task=old.task if old else None)
        self._show()

    def round(
        self, id: str, round_: int, metrics: Mapping[str, float], headline: str = "accuracy"
    ) -> None:
        """Show a finished round of a cell; the first one is that which it continued from."""
        cell = self._running[id]
        if cell.first is None:
            cell.first = cell.round = round_
            self._rounds_left -= round_
        if self._began is None:  # counted from here: the first cell waits for processes to start
            self._began, self._rounds_done = self._clock(), cell.round - round_
        self._rounds_done += round_ - cell.round
        self._rounds_left -= round_ - cell.round
        cell.round = round_
        cell.metrics |= {k: float(metrics[k]) for k in (headline, "loss") if k in metrics}
        self._show()

    def retry(self, id: str, why: str, attempt: int, attempts: int) -> None:
        """Print that a cell failed and will be tried again."""
        self._forget_rounds(id)
        self._print(f"{self._cells[id][0]}: {why}; attempt {attempt} of {attempts} follows")

    def move(self, id: str, why: str) -> None:
        """Print that a cell goes on elsewhere, which is no failure."""
        self._forget_rounds(id)
        self._print(f"{self._cells[id][0]}: {why}; it goes on elsewhere")

    def end(self, id: str, *, failure: str | None = None, stopped: str | None = None) -> None:
        """Print that a cell has finished, or why it has not: a failure, or early stopping."""
        name, rounds = self._cells[id]
        cell = self._running.pop(id, None) or _Running(self._clock())
        self._rounds_left -= rounds - cell.round
        self._done[id] = failure is None
        if cell.task is not None:
            self._bar.remove_task(cell.task)
        seconds = format_duration(self._clock() - cell.began)
        result = failure or stopped or f"{self._figures(cell.metrics)}  {seconds}"
        eta = self._eta()
        left = f"  {eta}" if eta and not self._live else ""
        self._print(f"{len(self._done)}/{self._total_cells}  {name}: {result}{left}")
        self._show()

    def _forget_rounds(self, id: str) -> None:
        """Count the rounds of a cell as not done; those that are kept are reported again."""
        cell = self._running.get(id)
        if cell is not None:
            self._rounds_left += cell.round
            cell.round, cell.first = 0, None

    def _eta(self) -> str:
        if self._began is None or not self._rounds_left:
            return ""
        pace = Pace(self._rounds_done, self._clock() - self._began)
        seconds = pace.seconds_for(self._rounds_left)
        return f"about {format_duration(seconds)} left" if math.isfinite(seconds) else ""

    def _show(self) -> None:
        if not self._live:
            return
        failed = list(self._done.values()).count(False)
        parts = [f"{len(self._running)} running", f"{failed} failed" if failed else ""]
        self._bar.update(
            self._task,
            description=f"cells {len(self._done)}/{self._total_cells}",
            total=self._total_cells,
            completed=len(self._done),
            figures=", ".join(filter(None, parts)),
            eta=self._eta(),
        )
        for place, (id, cell) in enumerate(self._running.items()):
            name, rounds = self._cells[id]
            if cell.task is None:
                cell.task = self._bar.add_task(escape(name), total=rounds, figures="", eta="")
            self._bar.update(
                cell.task,
                description=escape(name),
                completed=cell.round,
                figures=f"round {cell.round}/{rounds}  {self._figures(cell.metrics)}",
                visible=place < SHOWN,
            )
