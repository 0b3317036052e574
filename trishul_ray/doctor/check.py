"""The result of a check, how results are shown, and the probes that checks share."""

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from trishul_ray.errors import InputError
from trishul_ray.tracking.store import redact

#: Seconds that a check may wait for something outside this process.
TIMEOUT = 2.0
GIB = 2**30

Status = Literal["ok", "warn", "fail"]

_STYLED: dict[Status, str] = {
    "ok": "[green]ok[/]  ",
    "warn": "[yellow]warn[/]",
    "fail": "[red]fail[/]",
}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was checked.
        status: ``ok``; ``warn``: runs work, but more slowly or not everywhere; ``fail``: they fail.
        detail: What was found, in one line.
        hint: How to fix it; empty if there is nothing to fix.
    """

    name: str
    status: Status
    detail: str
    hint: str = ""


def render(checks: Sequence[Check], console: Console) -> None:
    """Print each result with its hint below it, and a summary."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        console.print(f"{_STYLED[check.status]}  {check.name:<{width}}  ", end="")
        console.print(check.detail, markup=False, highlight=False, soft_wrap=True)
        if check.hint:
            pad = " " * (width + 8)
            console.print(f"{pad}{check.hint}", markup=False, highlight=False, soft_wrap=True)
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    if failed:
        console.print(f"{failed} of {len(checks)} checks failed: a run would fail here.")
    elif warned:
        console.print(f"Runs work here; {warned} of {len(checks)} checks gave a warning.")
    else:
        console.print("All checks passed.")


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(check.status == "fail" for check in checks))


def try_within_timeout(action: Callable[[], object]) -> str:
    """Call ``action``; return why it failed or timed out in one line, or ``""`` on success.

    The call runs in a daemon thread, because a name lookup has no timeout and would block the exit.
    """
    faults: list[str] = [f"no answer within {TIMEOUT:g} s"]

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
    thread.join(TIMEOUT)
    return faults[0]


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def why_not_writable(folder: Path) -> str:
    """Return why a folder, which need not exist yet, cannot be written; ``""`` if it can."""
    nearest = nearest_existing(folder)
    try:
        # Write a file: permission bits do not show read-only mounts and quotas.
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"0")
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}"
    return ""
