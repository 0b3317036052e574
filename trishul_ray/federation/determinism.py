"""Reproducible computation: threads, kernels and the environment variables of libraries.

All computations of a run, on the server and in the clients' jobs, inline or in an actor, are inside
:func:`deterministic`. This module imports nothing that imports torch, because
:func:`set_environment` must run first.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trishul_ray.errors import PermanentError
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

#: Variables that libraries read once, and their values unless the user has set them.
ENVIRONMENT = {
    # cuBLAS selects its algorithms by the size of its workspace; a fixed size gives the same bytes
    # (NVIDIA, "cuBLAS: Results Reproducibility"). It is read in the first CUDA call.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

#: Variables for the time that an idle OpenMP thread spins before it sleeps, read when torch is
#: loaded. Spinning threads block cores that other processes need: with one busy process on the same
#: two cores, a step took 7 to 20 times as long. Threads that sleep immediately take 20% longer on
#: an idle machine. With about 50 microseconds, a round takes 1.00x the time of spinning threads on
#: an idle machine, and 1.22x the time of sleeping threads next to a busy process (small ViT, two
#: threads, 2026-11-22). GNU's runtime counts iterations, Intel's and LLVM's (17 and newer) time.
WAITING = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "50us"}

#: A setting: functions to read and to change it, and its value in a run.
_Setting = tuple[Callable[[], Any], Callable[[Any], object], Any]


def set_environment() -> None:
    """Set the variables of :data:`ENVIRONMENT` unless they are set, before torch is imported.

    The variables of :data:`WAITING` are set unless the user has configured the waiting of threads.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not os.environ.keys() & {"OMP_WAIT_POLICY", *WAITING}:
        os.environ.update(WAITING)


@contextmanager
def deterministic(experiment: "Experiment") -> Iterator[None]:
    """Set the threads and kernels of a run in the context, and restore the old ones after it.

    In the context, the number of CPU threads is ``resources.threads``, because it affects the order
    of float sums. Every operation uses a deterministic kernel, and cuDNN does not select kernels by
    timing. Attention uses a backend with a deterministic backward pass (flash, memory-efficient
    with one split, or plain, but not cuDNN's). Float32 products are IEEE float32 unless
    ``model.precision`` is ``tf32``. Contexts may be nested.

    Raises:
        PermanentError: An operation has no deterministic kernel on this device.
    """
    set_environment()  # This is early enough for a process that has not used a GPU yet.
    settings = _settings(experiment.resources.threads, experiment.model.precision == "tf32")
    before = [read() for read, _, _ in settings]
    try:
        for _, change, value in settings:
            change(value)
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "deterministic" not in str(error):
            raise
        reason = str(error).split(", but you set")[0].split(". ")[0].strip().rstrip(".")
        raise PermanentError(
            f"no reproducible kernel for this model on this device: {reason}; use another model "
            "or method, or resources.device=cpu"
        ) from error
    finally:
        for (_, change, _), value in reversed(list(zip(settings, before, strict=True))):
            change(value)


def _settings(threads: int, tf32: bool) -> list[_Setting]:
    """Return the settings of a run, in the order of application."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [
        (torch.get_num_threads, torch.set_num_threads, threads),
        # Same as use_deterministic_algorithms(True), which also imports the compiler (seconds).
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 2),
        # No code reads memory before writing it; filling it would only cost time.
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        _attribute(cudnn, "deterministic", True),
        _attribute(cudnn, "benchmark", False),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, True),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, True),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
        # "highest" also prevents the CPU's float32 products from rounding their inputs.
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        _attribute(cuda.matmul, "allow_tf32", tf32),
        _attribute(cudnn, "allow_tf32", tf32),
    ]


def _attribute(owner: Any, name: str, value: Any) -> _Setting:
    return (lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)
