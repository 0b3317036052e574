"""Check that torch can use the GPU of this machine, and limit an actor to its share of the memory.

A GPU may be counted, by Ray through the driver, where torch cannot use it: the driver may be older
than the CUDA version that torch was built with, or the card older than what it was built for.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.integrity import remark

GIB = 2**30

#: Memory that a process takes of a GPU beside its tensors: the CUDA context, library workspaces.
CONTEXT_BYTES = 0.6 * GIB

#: Memory of a GPU in GB (10^9 bytes) by Ray's name of it, from NVIDIA's data sheets; the smallest
#: where several have the name.
MEMORY_GB = {
    **{"P100": 12, "T4": 16, "V100": 16, "L4": 24, "A10G": 24, "L40S": 48, "A100": 40},
    **{"H100": 80, "H200": 141, "B200": 180},
}

#: Least version of NVIDIA's driver by major version of CUDA (NVIDIA, "CUDA Compatibility").
DRIVERS = {12: 525, 13: 580}

#: Compute capability from which bf16 products are computed by the hardware.
BF16_CAPABILITY = (8, 0)

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def device_named(name: str, precision: str) -> "torch.device":
    """Return the device of ``resources.device``; ``auto`` is the GPU if torch sees one.

    A GPU that computes ``model.precision`` slowly, and one that torch cannot see, are remarked on.

    Raises:
        InputError: The GPU cannot be used.
    """
    if name == "auto" and not torch.cuda.is_available():
        if driver_version() is not None:
            remark(f"resources.device=auto: training on the CPU: {why_unusable()}")
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        return torch.device(name)
    if reason := why_unusable():
        raise InputError(f"resources.device={name}: {reason}, or set resources.device=cpu")
    if precision == "bf16" and torch.cuda.get_device_capability() < BF16_CAPABILITY:
        remark(
            f"model.precision=bf16: {torch.cuda.get_device_name()} has no bf16 hardware: fp32 is "
            "faster on it"
        )
    return torch.device("cuda")


def why_unusable() -> str | None:
    """Return why torch cannot compute on a GPU of this machine, and the remedy; None if it can."""
    if not torch.cuda.is_available():
        return _why_unseen(torch.version.cuda, driver_version())
    capability, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    if has_code(capability, built):
        return None
    return (
        f"torch {torch.__version__} has no code for {torch.cuda.get_device_name()} (compute "
        f"capability {capability[0]}.{capability[1]}; built for {', '.join(built)}): install "
        "another build of torch, for V100 one for CUDA 12.6"
    )


def _why_unseen(cuda: str | None, driver: str | None) -> str:
    build = f"torch {torch.__version__}"
    if cuda is None:
        return f"{build} is a build for the CPU: install a CUDA build of torch"
    least = DRIVERS.get(int(cuda.split(".")[0]), 0)
    if driver is not None and int(driver.split(".")[0]) < least:
        return f"{build} needs an NVIDIA driver {least} or newer, not {driver}: update the driver"
    return f"{build} sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"


def has_code(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Return whether a build for architectures (``sm_86``, ``compute_90``) runs on a GPU.

    Machine code runs on its own major version from its minor version on; ``compute_`` is compiled
    for any newer GPU.
    """
    for kind, version in (name.split("_", 1) for name in built):
        digits = re.sub(r"\D", "", version)
        major, minor = int(digits[:-1]), int(digits[-1])
        newer = capability >= (major, minor)
        if newer and (kind == "compute" or capability[0] == major):
            return True
    return False


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None if none is loaded."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", text)
    return found[1] if found else None


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
