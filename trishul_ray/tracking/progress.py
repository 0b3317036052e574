"""Display the progress of runs and sweeps: a live bar on a terminal, plain lines elsewhere."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from trishul_ray.storage.redaction import redact
from trishul_ray.tracking.terminal import PlainConsole

#: Seconds between plain lines about a preparation.
PLAIN_INTERVAL = 5.0
#: Seconds without output after which a sweep prints its state.
LOG_INTERVAL = 60.0
#: Maximum number of running cells that a terminal displays.
SHOWN_CELLS = 12


def format_duration(seconds: float) -> str:
    """Format seconds as ``4.2 s``, ``3 min 05 s`` or ``2 h 07 min``, or ``?`` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(number: float) -> str:
    """Format a count with a unit: ``812``, ``12.3 k``, ``1.84 M``, ``2.1 G``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def format_bytes(number: float) -> str:
    """Format a number of bytes with a unit: ``812 B``, ``12.3 kB``, ``1.84 MB``."""
    text = format_count(number)
    return f"{text}B" if " " in text else f"{text} B"


class RunProgress:
    """Context manager that displays the progress of a run, on standard error by default.

    Displays a live bar on a terminal, and prints a line per round to a file, pipe or notebook.

    Attributes:
        primary_metric: Name of the metric to display with the loss; see ``Task.primary_metric``.
    """

    primary_metric = "accuracy"

    def __init__(self, total_rounds: int, console: Console | None = None) -> None:
        self._total, self._console = total_rounds, console or PlainConsole(stderr=True)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._uploaded = 0.0
        self._scores: dict[str, float] = {}
        self._recent_seconds: deque[float] = deque(maxlen=10)
        self._printed = time.monotonic()
        self._notes: set[str] = set()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("{task.fields[eta]}", style="progress.remaining", markup=False),
            console=self._console,
            refresh_per_second=4,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=total_rounds, figures="", eta="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()  # keeps the bar on the screen, and restores the cursor

    def phase(self, text: str) -> None:
        """Display a phase before the first or after the last round."""
        if self._live:
            self._bar.update(self._task, description=text)
        else:
            self._print(text)

    def advance(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Display a finished round. Round 0 is the evaluation of the backbone before training."""
        scores = {k: float(metrics[k]) for k in (self.primary_metric, "loss") if k in metrics}
        self._scores |= scores
        self.count_earlier([metrics])
        title = f"round {round_}/{self._total}" if round_ else "untuned model"
        left, recent, seconds = self._total - round_, self._recent_seconds, ""
        if round_ and "seconds" in metrics:
            recent.append(metrics["seconds"])
            seconds = format_duration(metrics["seconds"])
        eta = f"{format_duration(left * sum(recent) / len(recent))} left" if recent else ""
        eta = eta if left else "done"
        if self._live:
            figures = self._figures(self._scores)
            self._bar.update(
                self._task, description=title, completed=round_, figures=figures, eta=eta
            )
        else:
            self._print("  ".join(filter(None, [title, self._figures(scores), seconds, eta])))

    def count_earlier(self, records: Iterable[Mapping[str, float]]) -> None:
        """Add the traffic of rounds that an earlier process finished."""
        self._uploaded += sum(float(each.get("uploaded_bytes", 0.0)) for each in records)

    def note(self, text: str) -> None:
        """Print a notice above the bar, such as the restart of an actor, once."""
        if text not in self._notes:
            self._notes.add(text)
            self._print(text)

    def task_progress(self, label: str) -> Callable[[str, float], None]:
        """Return a callback ``(stage, fraction)`` for a preparation, such as a download.

        Call it repeatedly with the current stage and its completed fraction in [0, 1].
        """
        printed: dict[str, float] = {}  # time of a stage's last line, or infinity if complete

        def report(stage: str, share: float) -> None:
            line, now = f"{label}: {stage} {min(1.0, share):4.0%}", time.monotonic()
            last = printed.get(stage, -math.inf)
            if self._live:
                self._bar.update(self._task, description=line)
            elif now - last >= PLAIN_INTERVAL or (share >= 1.0 and last < math.inf):
                printed[stage] = math.inf if share >= 1.0 else now
                self._print(line)

        return report

    def _figures(self, values: Mapping[str, float]) -> str:
        parts = [f"{name} {value:.2%}" for name, value in values.items() if name != "loss"]
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4g}")
        if self._uploaded:
            parts.append(f"{format_bytes(self._uploaded)} up")
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        # Do not wrap plain lines, so that log files can be searched by line.
        self._console.print(redact(text), markup=False, highlight=False, soft_wrap=not self._live)


@dataclass
class _Cell:
    name: str
    rounds: int
    began: float | None = None
    round: int = 0
    ended: str = ""  # "done" or "failed"
    metrics: dict[str, float] = field(default_factory=dict)
    task: TaskID | None = None


class SweepProgress(RunProgress):
    """Context manager that displays the progress of many runs.

    Displays a live bar with one line per running cell on a terminal. Elsewhere, prints a line per
    finished cell, and a line with the state after a minute without output.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(1, console)
        self._cells: dict[str, _Cell] = {}
        self._expected = 0  # cells of a search that have no name yet

    def expect(self, cells: int) -> None:
        """Add cells to the total that :meth:`add` will name later."""
        self._expected += cells
        self._show()

    def add(self, id: str, name: str, rounds: int) -> None:
        """Add a cell, or name an expected cell."""
        self._cells[id] = _Cell(name, rounds)
        self._expected = max(0, self._expected - 1)
        self._show()

    def start(self, id: str) -> None:
        cell = self._cells[id]
        cell.began, cell.round, cell.ended = cell.began or time.monotonic(), 0, ""
        self._show()

    def round(
        self, id: str, round_: int, metrics: Mapping[str, float], primary_metric: str = "accuracy"
    ) -> None:
        cell = self._cells[id]
        cell.round = round_
        cell.metrics |= {k: float(metrics[k]) for k in (primary_metric, "loss") if k in metrics}
        self._show()

    def retry(self, id: str, why: str, attempt: int, attempts: int) -> None:
        self._print(f"{self._cells[id].name}: {why}; starting attempt {attempt} of {attempts}")

    def move(self, id: str, why: str) -> None:
        """Print that a cell resumes on another node, which does not count as a failure."""
        self._print(f"{self._cells[id].name}: {why}; resuming on another node")

    def end(self, id: str, *, failure: str | None = None) -> None:
        """Print that a cell has finished, or why it failed."""
        cell, now = self._cells[id], time.monotonic()
        cell.ended = "failed" if failure else "done"
        if cell.task is not None:
            self._bar.remove_task(cell.task)
            cell.task = None
        result = failure or (
            f"{self._figures(cell.metrics)}  {format_duration(now - (cell.began or now))}"
        )
        left = "" if self._live else self._time_left()
        ended, total = self._counts()
        self._print("  ".join(filter(None, [f"{ended}/{total}", f"{cell.name}: {result}", left])))
        self._show()

    def _counts(self) -> tuple[int, int]:
        ended = sum(bool(cell.ended) for cell in self._cells.values())
        return ended, len(self._cells) + self._expected

    def _time_left(self) -> str:
        """Estimate the remaining time from the pace so far, or return an empty string."""
        (ended, total), now = self._counts(), time.monotonic()
        if ended in (0, total):
            return ""
        began = min(cell.began or now for cell in self._cells.values())
        return f"about {format_duration((now - began) / ended * (total - ended))} left"

    def _show(self) -> None:
        running = [cell for cell in self._cells.values() if cell.began and not cell.ended]
        failed = sum(cell.ended == "failed" for cell in self._cells.values())
        (ended, total), eta = self._counts(), self._time_left()
        figures = f"{len(running)} running" + (f", {failed} failed" if failed else "")
        if not self._live:
            if running and time.monotonic() - self._printed > LOG_INTERVAL:
                done, rounds = sum(c.round for c in running), sum(c.rounds for c in running)
                parts = [f"cells {ended}/{total} done", figures, f"their rounds {done}/{rounds}"]
                self._print(", ".join(filter(None, [*parts, eta])))
            return
        self._bar.update(
            self._task, description=f"cells {ended}/{total}", total=total, completed=ended,
            figures=figures, eta=eta,
        )  # fmt: skip
        for place, cell in enumerate(running):
            if cell.task is None:
                cell.task = self._bar.add_task(cell.name, total=cell.rounds, figures="", eta="")
            self._bar.update(
                cell.task, completed=cell.round, visible=place < SHOWN_CELLS,
                figures=f"round {cell.round}/{cell.rounds}  {self._figures(cell.metrics)}",
            )  # fmt: skip
