"""The type of a check, which raises if its promise is broken, and helpers to write one."""

from __future__ import annotations

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


def require_close(found: Tensor, expected: Tensor, what: str, *, atol: float, rtol: float) -> None:
    """Raise a BrokenPromiseError unless ``|found - expected| <= atol + rtol |expected|``."""
    require(found.shape == expected.shape, f"{what}: {found.shape} in place of {expected.shape}")
    away = (found.double() - expected.double()).abs()
    kept = bool((away <= atol + rtol * expected.double().abs()).all())  # nor is NaN
    require(kept, f"{what} differ by up to {float(away.max()) if away.numel() else 0.0:.2g}")
