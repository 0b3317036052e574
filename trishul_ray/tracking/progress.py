"""What a person sees while a run goes: a live bar on a terminal, plain lines elsewhere."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

#: Plain lines about a preparation come no closer together than this, the last one excepted.
PLAIN_SECONDS = 5.0
#: What a task may count as its result; see ``Task.headline``.
HEADLINES = ("accuracy", "f1")
#: Notes that say the same are printed this often, then only counted.
SAME_NOTES = 3


def duration(seconds: float) -> str:
    """Seconds as people write them: ``4.2 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: float) -> str:
    """A large count in short: ``812``, ``12.3 k``, ``1.84 M``, ``2.10 G``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


class _Eta(ProgressColumn):
    """Time left, in words."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("eta", "")), style="progress.remaining")


class RunProgress:
    """Progress of one federated run.

    A context manager. On a terminal it is one live bar with the rounds done, accuracy, loss,
    uploaded parameters and the time left; elsewhere (a file, CI, a pipe) one plain line a round.
    Not thread-safe: call it from the driver.
    """

    def __init__(
        self,
        total_rounds: int,
        console: Console | None = None,
        start: int = 0,
        uploaded: float = 0.0,
    ) -> None:
        """Prepare the display.

        Args:
            total_rounds: rounds the run has in all.
            console: where to show; default is the standard error stream.
            start: rounds done by an earlier process (a resumed run).
            uploaded: parameters that an earlier process had sent up.
        """
        self._total = total_rounds
        self._console = console or Console(stderr=True)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._uploaded = uploaded
        self._latest: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=10)
        self._previous = time.monotonic()
        self._notes: dict[str, int] = {}
        self._plain_at: dict[str, float] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[figures]}"),
            _Eta(),
            console=self._console,
            refresh_per_second=4,
            disable=not self._live,
        )
        self._task = self._bar.add_task(
            "starting", total=total_rounds, completed=start, figures="", eta=""
        )

    def __enter__(self) -> Self:
        """Start the display."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the display; the bar's last state stays, and so does the cursor."""
        self._bar.stop()
        for text, times in self._notes.items():
            if times > SAME_NOTES:
                self._print(f"{text} ({times} times in all)")

    def phase(self, text: str) -> None:
        """Say what is going on before the first round or after the last."""
        if self._live:
            self._bar.update(self._task, description=escape(text))
        else:
            self._print(text)

    def advance(self, round: int, metrics: Mapping[str, float]) -> None:
        """Tell of a finished round.

        Args:
            round: its number from 1; 0 is the untouched backbone, before any training.
            metrics: a round's record, of which the headline (a share in [0, 1]), ``loss``,
                ``uploaded_parameters`` and ``seconds`` are shown. A terminal keeps showing the
                last accuracy through rounds that measured none; plain lines do not repeat it.
        """
        now = time.monotonic()
        seconds = float(metrics.get("seconds", now - self._previous))
        self._previous = now
        if round > 0:
            self._recent.append(seconds)
        self._latest |= {k: float(metrics[k]) for k in (*HEADLINES, "loss") if k in metrics}
        self._uploaded += float(metrics.get("uploaded_parameters", 0.0))
        # From the lengths of rounds, not from the clock: a resumed run tells of its old rounds
        # all at once.
        mean = sum(self._recent) / len(self._recent) if self._recent else math.nan
        eta = f"{duration(mean * (self._total - round))} left" if self._recent else ""
        eta = eta if round < self._total else "done"
        title = f"round {round}/{self._total}" if round else "untouched backbone"
        if self._live:
            self._bar.update(
                self._task,
                description=title,
                completed=round,
                figures=self._figures(self._latest),
                eta=eta,
            )
            return
        shown = {k: v for k, v in self._latest.items() if k in metrics}
        parts = [title, self._figures(shown), duration(seconds) if round else "", eta]
        self._print("  ".join(part for part in parts if part))

    def note(self, text: str) -> None:
        """Print a line above the bar, such as the restart of an actor; repeats are counted."""
        self._notes[text] = times = self._notes.get(text, 0) + 1
        if times < SAME_NOTES:
            self._print(text)
        elif times == SAME_NOTES:
            self._print(f"{text} (again; further ones are only counted)")

    def task_progress(self, label: str) -> Callable[[str, float], None]:
        """A callback ``(text, share)`` for a preparation, such as a download or a pretraining.

        Args:
            label: what is being prepared.

        Returns:
            A function to be called with what is going on and the share done in [0, 1], as often
            as its caller likes: off a terminal it prints a line at most every
            :data:`PLAIN_SECONDS`, and one at the end.
        """

        def tell(text: str, share: float) -> None:
            share = min(1.0, max(0.0, share))
            line = f"{label}: {text} {share:4.0%}"
            if self._live:
                self._bar.update(self._task, description=escape(line))
                return
            now = time.monotonic()
            last = self._plain_at.get(label, -math.inf)
            if last == math.inf or (share < 1.0 and now - last < PLAIN_SECONDS):
                return
            self._plain_at[label] = math.inf if share == 1.0 else now
            self._print(line)

        return tell

    def _figures(self, values: Mapping[str, float]) -> str:
        parts = []
        parts += [f"{name} {values[name]:.2%}" for name in HEADLINES if name in values]
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4g}")
        if self._uploaded:
            parts.append(f"{count(self._uploaded)} up")
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        # soft_wrap: a log file has no width, and a line broken in two cannot be searched.
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._live)
