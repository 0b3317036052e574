"""What a check finds, and the two probes that checks share."""

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trishul_ray.errors import InputError
from trishul_ray.tracking.store import redact

#: Seconds that a check may wait for something outside this process.
PATIENCE = 2.0
GIB = 2**30

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: ``ok``; ``warn``: a run can go but slower or not everywhere; ``fail``: it cannot.
        detail: what was found, in one line.
        hint: what to do about it; empty when all is well.
    """

    name: str
    status: Status
    detail: str
    hint: str = ""


def within(action: Callable[[], None]) -> str:
    """What went wrong in ``action``, in one line; empty if nothing did.

    It runs in a daemon thread: a name look-up knows no time limit and would hold the program.
    """
    faults: list[str] = [f"no answer within {PATIENCE:g} s"]

    def attempt() -> None:
        try:
            action()
        except (OSError, InputError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            faults[0] = redact(str(reason)).splitlines()[0] or type(error).__name__
        else:
            faults[0] = ""

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return faults[0]


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder


def unwritable(folder: Path) -> str:
    """Why nothing can be written in a folder that may not exist yet; empty if it can."""
    nearest = existing(folder)
    try:
        # Permission bits do not tell of read-only mounts and quotas; a file does.
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"0")
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}"
    return ""
