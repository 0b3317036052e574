"""The device of a run, the cores that it may use, and an actor's fraction of a GPU's memory."""

from pathlib import Path

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.integrity import remark

GIB = 2**30

#: Memory that a process uses on a GPU without tensors: the CUDA context, library workspaces.
CONTEXT_BYTES = 0.6 * GIB

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and cgroup quota."""
    import joblib  # only here, as it takes a tenth of a second

    cores: int = joblib.cpu_count()
    return cores


def set_threads_of_thread(count: int) -> None:
    """Set the number of threads that torch uses in the calling thread.

    The first operation in a new thread otherwise replaces the number by the one that any thread of
    the process set last, so that last bits would depend on timing.
    """
    torch.get_num_threads()  # marks this thread as initialized
    torch.set_num_threads(count)


def oversubscription_warning(processes: int, threads: int, cores: float) -> str | None:
    """Return a one-line warning if processes of ``threads`` each share fewer cores, else None."""
    if processes * threads <= cores:
        return None
    actors = f"{processes} actors x " if processes > 1 else ""
    return (
        f"{actors}resources.threads={threads} uses {processes * threads} threads on {cores:g} "
        "cores: rounds take longer; the results stay the same"
    )


def device_named(name: str) -> "torch.device":
    """Return the device of ``resources.device``; ``auto`` is the GPU if torch finds one.

    A remark reports a GPU that torch does not find.

    Raises:
        InputError: ``cuda`` needs a GPU, and torch finds none.
    """
    reason = why_unusable()
    if name == "auto":
        if reason and has_nvidia_driver():
            remark(f"resources.device=auto: training on the CPU: {reason}")
        name = "cpu" if reason else "cuda"
    elif name == "cuda" and reason:
        raise InputError(f"resources.device=cuda: {reason}, or set resources.device=cpu")
    return torch.device(name)


def why_unusable() -> str | None:
    """Return why torch cannot compute on a GPU of this machine; None if it can."""
    if torch.cuda.is_available():
        return None
    built = torch.version.cuda or "the CPU"
    return f"torch {torch.__version__}, built for {built}, finds no GPU: check nvidia-smi"


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver is loaded, without importing torch."""
    return _DRIVER_FILE.exists()


def cap_device_memory(share: float) -> None:
    """Limit torch in this process to a fraction of one GPU's memory if 0 < share < 1.

    Ray limits nothing. The CUDA contexts of all processes that fit on the GPU, at most half of its
    memory, are subtracted before the rest is divided.
    """
    if torch.cuda.is_available() and 0.0 < share < 1.0:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(capped_share(share, total))


def capped_share(share: float, total: float) -> float:
    """Return the fraction of ``total`` bytes that torch may allocate in a process."""
    contexts = int(1 / share + 1e-9) * CONTEXT_BYTES
    return share * max(1 - contexts / total, 0.5)
