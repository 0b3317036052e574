"""The type of a contract check, which raises if it fails, and helpers to write checks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class BrokenPromiseError(AssertionError):
    """A failed contract check; the message gives the reason in one line."""


@dataclass(frozen=True)
class Check:
    """A contract check.

    Attributes:
        name: Name of the check.
        run: Function that raises if the check fails; it receives an empty folder.
        skipped: Reason why the check does not apply, or an empty string.
    """

    name: str
    run: Callable[[Path], None]
    skipped: str = ""


def require(kept: bool, reason: str) -> None:
    """Raise a :class:`BrokenPromiseError` with the reason unless ``kept`` is true."""
    if not kept:
        raise BrokenPromiseError(reason)


def require_hooks(cls: type, base: type) -> None:
    """Raise a :class:`BrokenPromiseError` if a hook is misspelled or has a wrong signature."""
    inherited = {name for each in cls.__bases__ for name in dir(each)}
    for name, value in vars(cls).items():
        if name.startswith("__"):
            continue
        if name[0] != "_" and name not in inherited:
            for near in difflib.get_close_matches(name, dir(base), 1, cutoff=0.8):
                require(False, f"{cls.__name__}.{name} is not a hook; did you mean {near}?")
        elif inspect.isfunction(value) and inspect.isfunction(hook := getattr(base, name, None)):
            arguments = inspect.signature(hook).parameters
            keywords = {n for n, a in arguments.items() if a.kind is a.KEYWORD_ONLY}
            positional = [name for name in arguments if name not in keywords]
            try:
                inspect.signature(value).bind(*positional, **dict.fromkeys(keywords))
            except TypeError:
                require(False, f"the hook {cls.__name__}.{name} gets {', '.join(arguments)}")


def require_close(found: Tensor, expected: Tensor, what: str, *, atol: float, rtol: float) -> None:
    """Raise a BrokenPromiseError unless ``|found - expected| <= atol + rtol |expected|``."""
    require(found.shape == expected.shape, f"{what}: {found.shape} in place of {expected.shape}")
    away = (found.double() - expected.double()).abs()
    # The comparison is false for NaN.
    kept = bool((away <= atol + rtol * expected.double().abs()).all())
    require(kept, f"{what} differ by up to {float(away.max()) if away.numel() else 0.0:.2g}")
