"""The result of a check, and how results are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

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
