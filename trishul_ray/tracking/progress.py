"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

import html
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

#: Minimum seconds between two plain lines about one preparation; its last line always appears.
PLAIN_INTERVAL = 5.0
#: How often the same note is printed before repeats are only counted.
MAX_REPEATS = 3


@dataclass(frozen=True)
class Pace:
    """How much was done, in rounds or any other unit, and how many seconds it took."""

    done: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Pace":
        """Return the pace of pieces of work that took so many seconds each."""
        return cls(len(seconds), sum(seconds))

    @property
    def rate(self) -> float:
        """What is done in a second; 0 if that is not known."""
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
    """Progress display of one federated run, as a context manager.

    On a terminal it is one live bar with the finished rounds, accuracy, loss, uploaded parameters
    and remaining time, in a notebook one line that changes; elsewhere (a file, CI, a pipe) one
    plain line per round. It is not thread-safe: call it from the driver only.

    Args:
        total_rounds: Number of rounds of the whole run.
        console: Where to print; default is standard error.

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
        self._latest: dict[str, float] = {}
        self._recent_seconds: deque[float] = deque(maxlen=10)
        self._previous = time.monotonic()
        self._notes: dict[str, int] = {}
        self._printed_at: dict[str, float] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[eta]}", style="progress.remaining"),
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
        if self._notebook is not None and self._last_line:
            self._notebook.show(self._last_line, passing=True)
        for text, times in self._notes.items():
            if times > MAX_REPEATS:
                self._print(f"{text} ({times} times in all)")

    def phase(self, text: str) -> None:
        """Show what the run does before its first round or after its last."""
        if self._live:
            self._bar.update(self._task, description=escape(text))
        else:
            self._print(text, passing=True)

    def advance(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Show a finished round.

        Args:
            round_: Its number, from 1; 0 is the evaluation of the untouched backbone.
            metrics: Record of the round. Shown are the headline (a share in [0, 1]), ``loss``,
                ``uploaded_parameters`` and ``seconds``. In a round without evaluation, a terminal
                keeps showing the previous metrics; plain lines do not repeat them.
        """
        now = time.monotonic()
        seconds = float(metrics.get("seconds", now - self._previous))
        self._previous = now
        if round_ > 0:
            self._recent_seconds.append(seconds)
        self._latest |= {k: float(metrics[k]) for k in (self.headline, "loss") if k in metrics}
        self._uploaded += float(metrics.get("uploaded_parameters", 0.0))
        eta = "done" if round_ >= self._total else ""
        if self._recent_seconds and not eta:
            # Not from the clock: a resumed run reports its old rounds all at once.
            left = Pace.of(self._recent_seconds).seconds_for(self._total - round_)
            eta = f"{format_duration(left)} left"
        title = f"round {round_}/{self._total}" if round_ else "untouched backbone"
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
        terminal it prints at most one line every :data:`PLAIN_INTERVAL`, and one at the end.
        """

        def report(text: str, share: float) -> None:
            share = min(1.0, max(0.0, share))
            line = f"{label}: {text} {share:4.0%}"
            if self._live:
                self._bar.update(self._task, description=escape(line))
                return
            now = time.monotonic()
            last = self._printed_at.get(label, -math.inf)
            if last == math.inf or (share < 1.0 and now - last < PLAIN_INTERVAL):
                return
            self._printed_at[label] = math.inf if share == 1.0 else now
            self._print(line, passing=True)

        return report

    def _figures(self, values: Mapping[str, float]) -> str:
        parts = [f"{name} {value:.2%}" for name, value in values.items() if name != "loss"]
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4g}")
        if self._uploaded:
            parts.append(f"{format_count(self._uploaded)} up")
        return "  ".join(parts)

    def _print(self, text: str, *, passing: bool = False) -> None:
        if self._notebook is not None:
            self._notebook.show(text, passing=passing)
            return
        # Never wrap plain lines: a line broken in two cannot be searched for in a log file.
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._live)
