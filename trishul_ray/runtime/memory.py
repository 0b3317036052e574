"""Measure the peak memory of a training process, and report failed allocations."""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trishul_ray.errors import RunError
from trishul_ray.runtime.lazy import torch

#: Messages of failed allocations in libraries that do not raise a separate error type.
_FULL = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, order=True)
class PeakMemory:
    """Peak memory of a worker since its backbone was loaded.

    Attributes:
        bytes: Number of bytes.
        of: ``gpu`` for memory allocated by torch on the GPU, or ``process`` for the resident set of
            the process, including libraries, memory-mapped files and, for inline training, the
            server.
    """

    bytes: int
    of: Literal["gpu", "process"]


def reset_peak(device: "torch.device") -> None:
    """Reset the peak. If the kernel does not permit this, the peak since process start remains."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        return_freed()
        with suppress(OSError):
            _CLEAR.write_text("5")


def return_freed() -> None:
    """Return freed memory to the system, as glibc may retain gigabytes freed by threads.

    This takes microseconds if there is nothing to return, and has no effect with other C libraries.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory(device: "torch.device") -> PeakMemory | None:
    """Return the peak memory of this process on a device, or None if it is not available."""
    if device.type == "cuda":
        return PeakMemory(torch.cuda.max_memory_allocated(device), "gpu")
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()):
            return PeakMemory(1024 * int(found[1]), "process")
    return None


@contextmanager
def memory_of(work: Callable[[], str] | str, remedy: str) -> Iterator[None]:
    """Convert failed allocations into a RunError with the work, the memory limit and remedies.

    Args:
        work: Description of the work, or a function that returns it, called only on failure.
        remedy: The remedy. For a process limited to a fraction of a GPU, the message also suggests
            using a whole GPU.

    Raises:
        RunError: An allocation failed.
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
    """Describe the memory limit of this process, and a remedy if it is a fraction of a GPU."""
    if not torch.cuda.is_initialized():
        return "its process may use", ""
    share, total = torch.cuda.get_per_process_memory_fraction(), torch.cuda.mem_get_info()[1]
    gib = f"{share * total / 2**30:.1f} GiB of the GPU's {total / 2**30:.1f}"
    more = ", or give each actor a whole GPU (resources.gpus_per_actor=1)" if share < 1 else ""
    return f"its process may use, {gib}", more
