"""Peak memory of a process that trains."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trishul_ray.lazy import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, order=True)
class PeakMemory:
    """Most memory that one worker has used since its backbone was loaded.

    Attributes:
        bytes: How much.
        of: ``gpu``: allocated by torch on the GPU; ``process``: resident set of the whole process,
            with libraries and memory-mapped files, and of the server too where it trains inline.
    """

    bytes: int
    of: Literal["gpu", "process"]


def reset_peak(device: "torch.device") -> None:
    """Measure from now on; a kernel that does not allow it measures since the process began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            _CLEAR.write_text("5")


def peak_memory(device: "torch.device") -> PeakMemory | None:
    """Return the peak of this process on a device; None if the system does not say."""
    if device.type == "cuda":
        return PeakMemory(torch.cuda.max_memory_allocated(device), "gpu")
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()):
            return PeakMemory(1024 * int(found[1]), "process")
    return None
