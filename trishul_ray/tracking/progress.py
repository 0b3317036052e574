"""Progress of runs and sweeps: live bars on a terminal, plain lines elsewhere."""

import html
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from trishul_ray.storage.redaction import redact

#: Minimum seconds between two plain lines about one preparation; its last line always appears.
PLAIN_INTERVAL = 5.0
#: Longest time without a line in a log, in seconds.
LOG_INTERVAL = 60.0
#: Number of prints of the same note before repeats are only counted.
MAX_REPEATS = 3
#: Number of running cells of a sweep that are shown on a terminal.
SHOWN_CELLS = 12


@dataclass(frozen=True)
class Pace:
    """Amount of work, in rounds or any other unit, and the seconds that it took."""

    done: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Pace":
        """Return the pace of pieces of work that took so many seconds each."""
        return cls(len(seconds), sum(seconds))

    @property
    def rate(self) -> float:
        """Work per second; 0 if it is not known."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    def seconds_for(self, work: float) -> float:
        """Return how long so much work takes at this pace; infinity if that is not known."""
        return self.seconds / self.done * work if self.done > 0 else math.inf


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


class _Notebook:
    """One output of a notebook's cell: the notes so far, and a line that changes."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._line = ""
        self._handle: Any = None

    def show(self, text: str, *, passing: bool) -> None:
        """Show a note, or a line that the next one replaces."""
        if passing:
            self._line = text
        else:
            self._notes.append(text)
        shown = "\n".join([*self._notes, self._line])
        content = {"text/plain": shown, "text/html": f"<pre>{html.escape(shown)}</pre>"}
        if self._handle is None:
            from IPython.display import display  # type: ignore[import-not-found]  # a notebook has it

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class RunProgress:
    """Progress display of one federated run, as a context manager; by default on standard error.

    On a terminal it is one live bar with the finished rounds, accuracy, loss, uploaded parameters
    and remaining time, in a notebook one line that changes; elsewhere (a file, CI, a pipe) one
    plain line per round, and one that says what is going on for each minute without any. It is not
    thread-safe: call it from the driver only.

    Attributes:
        headline: The metric that is shown beside the loss; see ``Task.headline``.
    """

    headline = "accuracy"

    def __init__(self, total_rounds: int, console: Console | None = None) -> None:
        self._total = total_rounds
        self._console = console or Console(stderr=True)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        notebook = self._console.is_jupyter and not self._console.quiet
        self._notebook = _Notebook() if notebook else None
        self._last_line = ""
        self._uploaded = 0.0
        self._simulated = 0.0
        self._latest: dict[str, float] = {}
        self._recent_seconds: deque[float] = deque(maxlen=10)
        self._previous = time.monotonic()
        self._doing = "starting"
        self._began_doing = self._printed = time.monotonic()
        self._log = not self._live and self._notebook is None and not self._console.quiet
        self._ended = Event()
        self._notes: dict[str, int] = {}
        self._printed_at: dict[str, float] = {}
        self._complete: dict[str, set[str]] = {}  # label -> texts that have come to their end
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
        if self._log:
            Thread(target=self._break_silence, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._bar.stop()  # leaves the bar on the screen and restores the cursor
        if self._notebook is not None and self._last_line:
            self._notebook.show(self._last_line, passing=True)
        for text, times in self._notes.items():
            if times > MAX_REPEATS:
                self._print(f"{text} ({times} times in all)")

    def phase(self, text: str) -> None:
        """Show what the run does before its first round or after its last."""
        self._do(text)
        if self._live:
            self._bar.update(self._task, description=text)
        else:
            self._print(text, passing=True)

    def advance(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Show a finished round; round 0 is the evaluation of the untouched backbone.

        It shows the record's headline (a share in [0, 1]), ``loss``, ``uploaded_parameters``,
        ``simulated_seconds`` (of all rounds so far) and ``seconds``. In a round without evaluation,
        a terminal keeps showing the previous metrics; plain lines do not repeat them.
        """
        now = time.monotonic()
        seconds = float(metrics.get("seconds", now - self._previous))
        self._previous = now
        if round_ > 0:
            self._recent_seconds.append(seconds)
        self._latest |= {k: float(metrics[k]) for k in (self.headline, "loss") if k in metrics}
        self._uploaded += float(metrics.get("uploaded_parameters", 0.0))
        self._simulated = float(metrics.get("simulated_seconds", self._simulated))
        eta = "done" if round_ >= self._total else ""
        if self._recent_seconds and not eta:
            # Not from the clock: a resumed run reports its old rounds all at once.
            left = Pace.of(self._recent_seconds).seconds_for(self._total - round_)
            eta = f"{format_duration(left)} left"
        title = f"round {round_}/{self._total}" if round_ else "untouched backbone"
        following = f"round {round_ + 1}/{self._total}" if round_ < self._total else "last round"
        self._do(following + (f", {eta}" if eta else ""))
        if self._live:
            self._bar.update(
                self._task,
                description=title,
                completed=round_,
                figures=self._figures(self._latest),
                eta=eta,
            )
            return
        current = {k: v for k, v in self._latest.items() if k in metrics}
        parts = [title, self._figures(current), format_duration(seconds) if round_ else "", eta]
        self._last_line = "  ".join(part for part in parts if part)
        self._print(self._last_line, passing=True)

    def count_earlier(self, records: Iterable[Mapping[str, float]]) -> None:
        """Count the traffic of rounds that an earlier process has finished, and show none."""
        self._uploaded += sum(float(each.get("uploaded_parameters", 0.0)) for each in records)

    def note(self, text: str) -> None:
        """Print a line above the bar, such as the restart of an actor; count its repeats."""
        self._notes[text] = times = self._notes.get(text, 0) + 1
        if times < MAX_REPEATS:
            self._print(text)
        elif times == MAX_REPEATS:
            self._print(f"{text} (again; further ones are only counted)")

    def task_progress(self, label: str) -> Callable[[str, float], None]:
        """Return a callback ``(text, share)`` for a preparation, such as a download.

        Call it as often as you like with what is going on and the share done, in [0, 1]. Off a
        terminal it prints at most one line every :data:`PLAIN_INTERVAL`, and one at the first end.
        """

        def report(text: str, share: float) -> None:
            share = min(1.0, max(0.0, share))
            line = f"{label}: {text} {share:4.0%}"
            self._do(label)
            if self._live:
                self._bar.update(self._task, description=line)
                return
            now = time.monotonic()
            soon = now - self._printed_at.get(label, -math.inf) < PLAIN_INTERVAL
            texts = self._complete.setdefault(label, set())
            if text in texts or (soon and (share < 1.0 or texts)):
                return
            self._printed_at[label] = now
            if share == 1.0:
                texts.add(text)
            self._print(line, passing=True)

        return report

    def _do(self, what: str) -> None:
        if what != self._doing:
            self._doing, self._began_doing = what, time.monotonic()

    def _break_silence(self) -> None:
        """Print what is going on whenever nothing has been printed for :data:`LOG_INTERVAL`."""
        while not self._ended.wait(max(0.1, self._printed + LOG_INTERVAL - time.monotonic())):
            if time.monotonic() >= self._printed + LOG_INTERVAL:
                self._print(self._state())

    def _state(self) -> str:
        """Return what is going on, as a line of a log."""
        since = format_duration(time.monotonic() - self._began_doing)
        return f"{self._doing}: {since} so far"

    def _figures(self, values: Mapping[str, float]) -> str:
        parts = [f"{name} {value:.2%}" for name, value in values.items() if name != "loss"]
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4g}")
        if self._uploaded:
            parts.append(f"{format_count(self._uploaded)} up")
        if self._simulated:
            parts.append(f"{format_duration(self._simulated)} simulated")
        return "  ".join(parts)

    def _print(self, text: str, *, passing: bool = False) -> None:
        text, self._printed = redact(text), time.monotonic()
        if self._notebook is not None:
            self._notebook.show(text, passing=passing)
            return
        # Never wrap plain lines: a line broken in two cannot be searched for in a log file.
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._live)


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
    finished cell, and one for each minute without any.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(1, console)
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
        now = time.monotonic()
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
            self._began, self._rounds_done = time.monotonic(), cell.round - round_
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
        cell = self._running.pop(id, None) or _Running(time.monotonic())
        self._rounds_left -= rounds - cell.round
        self._done[id] = failure is None
        if cell.task is not None:
            self._bar.remove_task(cell.task)
        seconds = format_duration(time.monotonic() - cell.began)
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
        pace = Pace(self._rounds_done, time.monotonic() - self._began)
        seconds = pace.seconds_for(self._rounds_left)
        return f"about {format_duration(seconds)} left" if math.isfinite(seconds) else ""

    def _counts(self) -> tuple[str, list[str]]:
        """Return how many cells are done, and how many are running and have failed."""
        failed = list(self._done.values()).count(False)
        parts = [f"{len(self._running)} running", f"{failed} failed" if failed else ""]
        return f"cells {len(self._done)}/{self._total_cells}", parts

    def _state(self) -> str:
        if not self._running:
            return super()._state()
        done, parts = self._counts()
        # The driver may begin or end a cell meanwhile.
        running = [(id, cell.round) for id, cell in list(self._running.items())]
        rounds = sum(round_ for _, round_ in running), sum(self._cells[id][1] for id, _ in running)
        parts += [f"their rounds {rounds[0]}/{rounds[1]}", self._eta()]
        return f"{done} done, {', '.join(filter(None, parts))}"

    def _show(self) -> None:
        if not self._live:
            return
        done, parts = self._counts()
        self._bar.update(
            self._task,
            description=done,
            total=self._total_cells,
            completed=len(self._done),
            figures=", ".join(filter(None, parts)),
            eta=self._eta(),
        )
        for place, (id, cell) in enumerate(self._running.items()):
            name, rounds = self._cells[id]
            if cell.task is None:
                cell.task = self._bar.add_task(name, total=rounds, figures="", eta="")
            self._bar.update(
                cell.task,
                description=name,
                completed=cell.round,
                figures=f"round {cell.round}/{rounds}  {self._figures(cell.metrics)}",
                visible=place < SHOWN_CELLS,
            )
