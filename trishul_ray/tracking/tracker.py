"""The contract of a tracker: hooks at the start of a run, after each round and at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Input:
    """Data or weights that a run reads.

    Attributes:
        name: Its name.
        digest: Hash of its content, of at most 36 characters.
        source: Its origin, such as ``mirror:cifar10``.
        context: Its use, such as ``training``.
        profile: Facts about it.
    """

    name: str
    digest: str
    source: str
    context: str
    profile: Mapping[str, Scalar]


@dataclass(frozen=True)
class RunStart:
    """A run that begins, or goes on.

    Attributes:
        attempt: Name of this run of the experiment: a run that was stopped goes on under it.
        name: Name that is shown.
        params: Fields of the configuration by dotted name, and facts known in advance.
        tags: Further marks.
        inputs: Its data.
        parent: Tracking id of the sweep that it belongs to.
    """

    attempt: str
    name: str
    params: Mapping[str, Scalar]
    tags: Mapping[str, Scalar]
    inputs: Sequence[Input] = ()
    parent: str | None = None


@dataclass(frozen=True)
class RunEnd:
    """Results of a finished run.

    Attributes:
        round: Its last round.
        metrics: Numbers of the whole run.
        tags: Further marks.
        inputs: Its inputs beside its data.
        folder: A local folder with its output files.
    """

    round: int
    metrics: Mapping[str, float]
    tags: Mapping[str, Scalar]
    inputs: Sequence[Input] = ()
    folder: Path | None = None


class Tracker:
    """Follows a run. This one discards everything: it is that of ``tracking.mlflow=false``.

    Attributes:
        run_id: Id of the tracking run, if there is one.
        place: The tracking URI, without credentials, and the experiment's name, if there are any.
    """

    run_id: str | None = None
    place: list[str] | None = None

    def start(self, run: RunStart) -> None:
        """Begin a run, or continue that of the same attempt.

        Raises:
            InputError: The tracking store cannot be used.
        """

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round, unless the round is logged already; never fail."""

    def end(self, status: Status, results: RunEnd | None = None) -> list[str]:
        """End the run; return what the tracking store did not accept."""
        return []

    def command(self, run: str = "") -> str | None:
        """Return the command, or the address, that shows the run with this id in a browser."""
        return None
