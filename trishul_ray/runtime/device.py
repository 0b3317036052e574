"""Select the device of a run, count usable cores, and cap the GPU memory of an actor."""

from pathlib import Path

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.integrity import remark

GIB = 2**30

#: GPU memory of a process without its tensors: the CUDA context and library workspaces.
CONTEXT_BYTES = 0.6 * GIB

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and cgroup quota."""
    import joblib  # imported here, because it takes 0.1 s

    cores: int = joblib.cpu_count()
    return cores


def set_threads_of_thread(count: int) -> None:
    """Set the number of threads that torch uses in the calling thread.

    Unlike ``torch.set_num_threads``, this is safe in a new thread, whose first operation otherwise
    resets the number to the latest setting of any thread. Then results would depend on timing.
    """
    torch.get_num_threads()  # marks this thread as initialized
    torch.set_num_threads(count)


def oversubscription_warning(processes: int, threads: int, cores: float) -> str | None:
    """Return a one-line warning if processes use more threads than cores, otherwise None."""
    if processes * threads <= cores:
        return None
    actors = f"{processes} actors x " if processes > 1 else ""
    return (
        f"{actors}resources.threads={threads} uses {processes * threads} threads on {cores:g} "
        "cores: rounds are slower, but results are unchanged"
    )


def device_named(name: str) -> "torch.device":
    """Return the device for ``resources.device``.

    ``auto`` selects the GPU if torch can use it, otherwise the CPU. If there is an NVIDIA driver
    nevertheless, a remark reports the reason.

    Raises:
        InputError: The device is ``cuda``, but torch finds no GPU.
    """
    reason = why_unusable()
    if name == "auto":
        if reason and has_nvidia_driver():
            remark(f"resources.device=auto: training on the CPU, because {reason}")
        name = "cpu" if reason else "cuda"
    elif name == "cuda" and reason:
        raise InputError(f"resources.device=cuda: {reason}, or set resources.device=cpu")
    return torch.device(name)


def why_unusable() -> str | None:
    """Return why torch cannot use a GPU of this machine, or None if it can."""
    if torch.cuda.is_available():
        return None
    built = torch.version.cuda or "the CPU"
    return f"torch {torch.__version__}, built for {built}, finds no GPU; check nvidia-smi"


def has_nvidia_driver() -> bool:
    """Return whether the NVIDIA driver is loaded, without importing torch."""
    return _DRIVER_FILE.exists()


def cap_device_memory(share: float) -> None:
    """Limit torch in this process to a fraction of a GPU's memory if 0 < share < 1.

    Ray does not enforce GPU fractions. The CUDA contexts of all processes that fit on the GPU, but
    at most half of its memory, are subtracted before dividing the rest.
    """
    if torch.cuda.is_available() and 0.0 < share < 1.0:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(capped_share(share, total))


def capped_share(share: float, total: float) -> float:
    """Return the fraction of ``total`` bytes that torch may allocate in a process."""
    contexts = int(1 / share + 1e-9) * CONTEXT_BYTES
    return share * max(1 - contexts / total, 0.5)
