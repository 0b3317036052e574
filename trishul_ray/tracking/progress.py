"""Progress of runs and sweeps: a live bar on a terminal, plain lines elsewhere."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from trishul_ray.storage.redaction import redact

#: Seconds after which a preparation shows the time left, and between two plain lines about it.
PLAIN_INTERVAL = 5.0
#: Seconds without a plain line after which a sweep prints its state.
LOG_INTERVAL = 60.0
#: Number of running cells of a sweep that a terminal shows.
SHOWN_CELLS = 12


def format_duration(seconds: float) -> str:
    """Return seconds as ``4.2 s``, ``3 min 05 s`` or ``2 h 07 min``; ``?`` unless finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(number: float) -> str:
    """Return a count with a unit: ``812``, ``12.3 k``, ``1.84 M``, ``2.1 G``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def format_bytes(number: float) -> str:
    """Return a number of bytes with a unit: ``812 B``, ``12.3 kB``, ``1.84 MB``."""
    text = format_count(number)
    return f"{text}B" if " " in text else f"{text} B"


class RunProgress:
    """Progress display of one federated run, as a context manager; by default on standard error.

    A terminal shows one live bar. A file, a pipe or a notebook gets one plain line per round.

    Attributes:
        headline: The metric that is shown with the loss; see ``Task.headline``.
    """

    headline = "accuracy"

    def __init__(self, total_rounds: int, console: Console | None = None) -> None:
        self._total, self._console = total_rounds, console or Console(stderr=True)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._uploaded = self._simulated = 0.0
        self._latest: dict[str, float] = {}
        self._recent_seconds: deque[float] = deque(maxlen=10)
        self._previous = self._printed = time.monotonic()
        self._notes: Counter[str] = Counter()
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
        self._bar.stop()  # leaves the bar on the screen and restores the cursor
        for text, times in self._notes.items():
            if times > 1:
                self._print(f"{text} ({times} times in all)")

    def phase(self, text: str) -> None:
        """Show a phase before the first round or after the last round."""
        if self._live:
            self._bar.update(self._task, description=text)
        else:
            self._print(text)

    def advance(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Show a finished round; round 0 is the evaluation of the backbone before training."""
        now = time.monotonic()
        seconds = float(metrics.get("seconds", now - self._previous))
        self._previous = now
        if round_ > 0:
            self._recent_seconds.append(seconds)
        self._latest |= {k: float(metrics[k]) for k in (self.headline, "loss") if k in metrics}
        self._uploaded += float(metrics.get("uploaded_bytes", 0.0))
        self._simulated = float(metrics.get("simulated_seconds", self._simulated))
        left, recent = self._total - round_, self._recent_seconds
        # Not from the clock: a resumed run reports its old rounds all at once.
        eta = f"{format_duration(left * sum(recent) / len(recent))} left" if recent else ""
        eta = eta if left > 0 else "done"
        title = f"round {round_}/{self._total}" if round_ else "untouched backbone"
        if self._live:
            figures = self._figures(self._latest)
            self._bar.update(
                self._task, description=title, completed=round_, figures=figures, eta=eta
            )
            return
        current = {k: v for k, v in self._latest.items() if k in metrics}
        parts = [title, self._figures(current), format_duration(seconds) if round_ else "", eta]
        self._print("  ".join(part for part in parts if part))

    def count_earlier(self, records: Iterable[Mapping[str, float]]) -> None:
        """Count the traffic of rounds that an earlier process has finished."""
        self._uploaded += sum(float(each.get("uploaded_bytes", 0.0)) for each in records)

    def note(self, text: str) -> None:
        """Print a line above the bar, such as the restart of an actor; count its repeats."""
        self._notes[text] += 1
        if self._notes[text] == 1:
            self._print(text)

    def task_progress(self, label: str) -> Callable[[str, float], None]:
        """Return a callback ``(text, share)`` for a preparation, such as a download.

        Call it often, with the current stage and the share of it that is done, in [0, 1].
        """
        began: dict[str, float] = {}
        done: set[str] = set()
        printed = -math.inf

        def report(text: str, share: float) -> None:
            nonlocal printed
            now = time.monotonic()
            elapsed = now - began.setdefault(text, now)
            line = f"{label}: {text} {min(1.0, share):4.0%}"
            if elapsed > PLAIN_INTERVAL and 0 < share < 1:
                line += f", {format_duration(elapsed / share * (1 - share))} left"
            if self._live:
                self._bar.update(self._task, description=line)
            elif text not in done and (share >= 1.0 or now - printed >= PLAIN_INTERVAL):
                printed = now
                done.update([text] if share >= 1.0 else [])
                self._print(line)

        return report

    def _figures(self, values: Mapping[str, float]) -> str:
        parts = [f"{name} {value:.2%}" for name, value in values.items() if name != "loss"]
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4g}")
        if self._uploaded:
            parts.append(f"{format_bytes(self._uploaded)} up")
        if self._simulated:
            parts.append(f"{format_duration(self._simulated)} simulated")
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        # Plain lines do not wrap: a log file is searched by line.
        self._console.print(redact(text), markup=False, highlight=False, soft_wrap=not self._live)


@dataclass
class _Cell:
    name: str
    rounds: int
    began: float | None = None
    round: int | None = None  # none since it started, perhaps again
    ended: str = ""  # "done" or "failed"
    metrics: dict[str, float] = field(default_factory=dict)
    task: TaskID | None = None

    @property
    def rounds_left(self) -> int:
        return 0 if self.ended else self.rounds - (self.round or 0)


class SweepProgress(RunProgress):
    """Progress display of many federated runs, as a context manager.

    A terminal shows a live bar with one line for each running cell. Elsewhere there is one plain
    line per finished cell, and one line per minute without any.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(1, console)
        self._cells: dict[str, _Cell] = {}
        self._expected: list[int] = []  # rounds of cells that a search will name
        self._began: float | None = None
        self._rounds_done = 0

    def expect(self, cells: int, rounds: int) -> None:
        """Announce cells of ``rounds`` rounds each that :meth:`add` will name later."""
        self._expected += [rounds] * cells
        self._show()

    def add(self, id: str, name: str, rounds: int) -> None:
        """Announce a cell, or name an expected cell."""
        self._cells[id] = _Cell(name, rounds)
        if self._expected:
            self._expected.pop()
        self._show()

    def start(self, id: str) -> None:
        """Show that a cell runs, perhaps again."""
        cell = self._cells[id]
        cell.began, cell.round, cell.ended = cell.began or time.monotonic(), None, ""
        self._show()

    def round(
        self, id: str, round_: int, metrics: Mapping[str, float], headline: str = "accuracy"
    ) -> None:
        """Show a finished round of a cell; the first round is where the cell continues from."""
        cell = self._cells[id]
        if cell.round is not None:
            self._rounds_done += round_ - cell.round
        cell.round = round_
        self._began = self._began or time.monotonic()
        cell.metrics |= {k: float(metrics[k]) for k in (headline, "loss") if k in metrics}
        self._show()

    def retry(self, id: str, why: str, attempt: int, attempts: int) -> None:
        """Print that a cell failed and will be tried again."""
        self._print(f"{self._cells[id].name}: {why}; attempt {attempt} of {attempts} follows")

    def move(self, id: str, why: str) -> None:
        """Print that a cell continues elsewhere, which is not a failure."""
        self._print(f"{self._cells[id].name}: {why}; it continues elsewhere")

    def end(self, id: str, *, failure: str | None = None) -> None:
        """Print that a cell has finished, or why it failed."""
        cell, now = self._cells[id], time.monotonic()
        cell.ended = "failed" if failure else "done"
        if cell.task is not None:
            self._bar.remove_task(cell.task)
            cell.task = None
        seconds = format_duration(now - (cell.began or now))
        result = failure or f"{self._figures(cell.metrics)}  {seconds}"
        left = f"  {self._eta()}" if self._eta() and not self._live else ""
        done = sum(bool(each.ended) for each in self._cells.values())
        total = len(self._cells) + len(self._expected)
        self._print(f"{done}/{total}  {cell.name}: {result}{left}")
        self._show()

    def _eta(self) -> str:
        left = sum(self._expected) + sum(cell.rounds_left for cell in self._cells.values())
        if self._began is None or not self._rounds_done or not left:
            return ""
        pace = (time.monotonic() - self._began) / self._rounds_done
        return f"about {format_duration(pace * left)} left"

    def _show(self) -> None:
        running = [cell for cell in self._cells.values() if cell.began and not cell.ended]
        ended = [cell.ended for cell in self._cells.values() if cell.ended]
        total = len(self._cells) + len(self._expected)
        state, failed = f"cells {len(ended)}/{total}", ended.count("failed")
        figures = f"{len(running)} running" + (f", {failed} failed" if failed else "")
        if not self._live:
            if running and time.monotonic() - self._printed > LOG_INTERVAL:
                rounds = sum(cell.round or 0 for cell in running), sum(c.rounds for c in running)
                parts = [f"{state} done", figures, f"their rounds {rounds[0]}/{rounds[1]}"]
                self._print(", ".join(filter(None, [*parts, self._eta()])))
            return
        self._bar.update(
            self._task, description=state, total=total, completed=len(ended), figures=figures,
            eta=self._eta(),
        )  # fmt: skip
        for place, cell in enumerate(running):
            if cell.task is None:
                cell.task = self._bar.add_task(cell.name, total=cell.rounds, figures="", eta="")
            done = cell.round or 0
            self._bar.update(
                cell.task, completed=done, visible=place < SHOWN_CELLS,
                figures=f"round {done}/{cell.rounds}  {self._figures(cell.metrics)}",
            )  # fmt: skip
