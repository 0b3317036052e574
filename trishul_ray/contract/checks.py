"""The type of a check, which raises if its promise is broken, and helpers to write one."""

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
    """A promise of the contract that is not kept; the message says how, in one line."""


@dataclass(frozen=True)
class Check:
    """A promise of the contract.

    Attributes:
        name: Name of the promise.
        run: Raises if it is not kept; gets an empty folder.
        skipped: Why it does not apply; empty if it does.
    """

    name: str
    run: Callable[[Path], None]
    skipped: str = ""


def require(kept: bool, reason: str) -> None:
    """Raise a BrokenPromiseError with the reason unless a promise is kept."""
    if not kept:
        raise BrokenPromiseError(reason)


def require_hooks(cls: type, base: type) -> None:
    """Raise a BrokenPromiseError if a hook is misspelled, or does not take its arguments."""
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
    kept = bool((away <= atol + rtol * expected.double().abs()).all())  # nor is NaN
    require(kept, f"{what} differ by up to {float(away.max()) if away.numel() else 0.0:.2g}")
