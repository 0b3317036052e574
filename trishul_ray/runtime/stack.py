"""The stack of a run: software and devices that can change the last bits of its numbers."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from typing import Any

from trishul_ray.runtime.lazy import torch

_PACKAGES = ("torch", "numpy", "transformers")


@cache
def _packages() -> Mapping[str, Any]:
    return {name: metadata.version(name) for name in _PACKAGES}


@dataclass(frozen=True)
class Stack:
    """The stack of one worker. Threads and numerics are part of the experiment's id.

    Attributes:
        torch: Version and build, such as ``2.13.0+cu130``.
        numpy: Version.
        transformers: Version.
        device: Name of the GPU, or the processor's architecture and instruction set.
        first_round: First round that it computed in a run; 0 is the state before round 1.
    """

    torch: str
    numpy: str
    transformers: str
    device: str
    first_round: int = field(default=0, compare=False)

    def difference(self, other: "Stack") -> str:
        """Return the first part that differs, as ``torch 2.12.0 and not 2.13.0``, or ``""``."""
        for name in (*_PACKAGES, "device"):
            own, its = getattr(self, name), getattr(other, name)
            if own != its:
                return f"{name} {own} and not {its}"
        return ""

    @property
    def outdated(self) -> str:
        """The first package of another version than the installed one, as in :meth:`difference`."""
        return self.difference(replace(self, **_packages()))


def stack_of(device: "torch.device") -> Stack:
    """Return the stack of this process on a device."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return Stack(**_packages(), device=name)
