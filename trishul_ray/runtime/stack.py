"""Record the software and device of a run, which can change the last bits of its numbers."""

import platform
from dataclasses import dataclass, field, replace
from typing import Any

from trishul_ray.runtime.lazy import torch
from trishul_ray.version import versions

_PACKAGES = ("torch", "numpy", "transformers")


def _packages() -> dict[str, Any]:
    return {name: versions()[name] for name in _PACKAGES}


@dataclass(frozen=True)
class Stack:
    """The stack of a worker, without threads and numerics, which are part of the experiment's id.

    Attributes:
        torch: Version and build of torch, such as ``2.13.0+cu130``.
        numpy: Version of NumPy.
        transformers: Version of transformers.
        device: Name of the GPU, or architecture and instruction set of the CPU.
        first_round: First round that the stack computed in a run; 0 is the state before round 1.
    """

    torch: str
    numpy: str
    transformers: str
    device: str
    first_round: int = field(default=0, compare=False)

    def difference(self, other: "Stack") -> str:
        """Describe the first difference (``torch 2.12.0 and not 2.13.0``), or return ``""``."""
        for name in (*_PACKAGES, "device"):
            own, its = getattr(self, name), getattr(other, name)
            if own != its:
                return f"{name} {own} and not {its}"
        return ""

    @property
    def outdated(self) -> str:
        """The first difference from the installed packages, like :meth:`difference`."""
        return self.difference(replace(self, **_packages()))


def stack_of(device: "torch.device") -> Stack:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return Stack(**_packages(), device=name)
