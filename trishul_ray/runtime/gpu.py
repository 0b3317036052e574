"""Choose the device of a run, and limit an actor to its share of a GPU's memory."""

import re
from contextlib import suppress
from pathlib import Path

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.integrity import remark

GIB = 2**30

#: Memory that a process takes of a GPU beside its tensors: the CUDA context, library workspaces.
CONTEXT_BYTES = 0.6 * GIB


#: Compute capability from which bf16 products are computed by the hardware.
BF16_CAPABILITY = (8, 0)

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def device_named(name: str, precision: str) -> "torch.device":
    """Return the device of ``resources.device``; ``auto`` is the GPU if torch finds one.

    A remark reports a GPU that torch does not find, and a GPU without bf16 hardware.

    Raises:
        InputError: There is no GPU for ``cuda``.
    """
    reason = why_unusable()
    if name == "auto" and reason:
        if driver_version() is not None:
            remark(f"resources.device=auto: training on the CPU: {reason}")
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        return torch.device(name)
    if reason:
        raise InputError(f"resources.device={name}: {reason}, or set resources.device=cpu")
    if precision == "bf16" and torch.cuda.get_device_capability() < BF16_CAPABILITY:
        remark(f"model.precision=bf16: {torch.cuda.get_device_name()} has no bf16 hardware")
    return torch.device("cuda")


def why_unusable() -> str | None:
    """Return why torch cannot compute on a GPU of this machine; None if it can."""
    if torch.cuda.is_available():
        return None
    built = torch.version.cuda or "the CPU"
    return f"torch {torch.__version__}, built for {built}, finds no GPU: check nvidia-smi"


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None if none is loaded."""
    with suppress(OSError):
        text = _DRIVER_FILE.read_text(encoding="utf-8")
        if found := re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", text):
            return found[1]
    return None


def cap_device_memory(share: float) -> None:
    """Limit this process to a share of one GPU's memory, if 0 < share < 1: Ray limits nothing.

    The limit covers what torch allocates. The CUDA contexts of all processes that fit are left out
    of what is shared, at most half of the memory.
    """
    if torch.cuda.is_available() and 0.0 < share < 1.0:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(capped_share(share, total))


def capped_share(share: float, total: float) -> float:
    """Return the share of ``total`` bytes that torch may allocate in a process with this share."""
    contexts = int(1 / share + 1e-9) * CONTEXT_BYTES
    return share * max(1 - contexts / total, 0.5)
