"""Memory of a process that trains: its peak, and errors where it is too small."""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trishul_ray.errors import RunError
from trishul_ray.runtime.lazy import torch

#: Texts in errors of libraries that could not allocate, which have no separate type.
_FULL = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")

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
        return_freed()
        with suppress(OSError):
            _CLEAR.write_text("5")


def return_freed() -> None:
    """Return freed memory to the system, which glibc keeps by the GiB where threads have used it.

    It takes microseconds where there is none. Other C libraries are not asked.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory(device: "torch.device") -> PeakMemory | None:
    """Return the peak of this process on a device; None if the system does not say."""
    if device.type == "cuda":
        return PeakMemory(torch.cuda.max_memory_allocated(device), "gpu")
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()):
            return PeakMemory(1024 * int(found[1]), "process")
    return None


@contextmanager
def memory_of(work: Callable[[], str] | str, remedy: str) -> Iterator[None]:
    """Turn an allocation that fails into a RunError with the work, the cap and the remedies.

    ``work`` may be a function, which is called only if an allocation fails. A whole GPU is a remedy
    for a process that may use a share of one.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in _FULL)):
            raise
        said = ". ".join(str(error).split(". ")[:2])
        limit, more = _limit()
        raise RunError(
            f"{work if isinstance(work, str) else work()} needs more memory than {limit} "
            f"({said}): {remedy}{more}"
        ) from error


def _limit() -> tuple[str, str]:
    """Return what this process may use, and a remedy if that is a share of a GPU, as text."""
    if not torch.cuda.is_initialized():
        return "its process may use", ""
    share, total = torch.cuda.get_per_process_memory_fraction(), torch.cuda.mem_get_info()[1]
    gib = f"{share * total / 2**30:.1f} GiB of the GPU's {total / 2**30:.1f}"
    more = ", or give each actor a whole GPU (resources.gpus_per_actor=1)" if share < 1 else ""
    return f"its process may use, {gib}", more
