"""What makes the same run give the same bytes: threads, kernels, and the libraries' environment.

Everything that computes in a run (the server, and each client's jobs; inline or in an actor) does
so inside :func:`deterministic`. torch is imported where it is used: :func:`set_environment` must
run before.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trishul_ray.errors import RunError

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

#: Variables that libraries read once, and their values where the user has set none.
ENVIRONMENT = {
    # cuBLAS picks its algorithms by the workspace it finds: a fixed one gives the same bytes
    # (NVIDIA, "cuBLAS: Results Reproducibility"). Read with the first CUDA call.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torch's OpenMP threads spin while they wait, on cores that other processes could use: with
    # one busy neighbour on two cores, a step took 7 to 20 times as long. Read when torch loads.
    "OMP_WAIT_POLICY": "PASSIVE",
}

#: Reads a setting, changes it, and the value it has in a run.
_Setting = tuple[Callable[[], Any], Callable[[Any], object], Any]


def set_environment() -> None:
    """Set :data:`ENVIRONMENT`, where the user has not; call it before torch is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def deterministic(experiment: "Experiment") -> Iterator[None]:
    """Compute with the threads and kernels of a run inside the block; restore them after it.

    Inside, the number of CPU threads is ``resources.threads`` (it changes the order of float
    sums), every operation takes a deterministic kernel, cuDNN chooses none by a stopwatch,
    attention takes a backend whose backward pass is deterministic (flash, memory-efficient with
    one split, or plain; not cuDNN's), and float32 products are IEEE float32 unless
    ``model.precision`` is ``tf32``. Blocks may be nested.

    Args:
        experiment: the run.

    Raises:
        RunError: an operation has no deterministic kernel on this device; the message names it.
    """
    import torch

    settings = _settings(experiment.resources.threads, experiment.model.precision == "tf32")
    before = [read() for read, _, _ in settings]
    try:
        for _, change, value in settings:
            change(value)
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "deterministic" not in str(error):
            raise
        raise _refusal(error) from error
    finally:
        for (_, change, _), value in reversed(list(zip(settings, before, strict=True))):
            change(value)


def _settings(threads: int, tf32: bool) -> list[_Setting]:
    """Every setting of a run, in the order in which to apply them."""
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [
        (torch.get_num_threads, torch.set_num_threads, threads),
        # As use_deterministic_algorithms(True), which would also import the compiler (seconds).
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 2),
        # Nothing here reads memory before writing it; filling it would only cost time.
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        _attribute(cudnn, "deterministic", True),
        _attribute(cudnn, "benchmark", False),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, True),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, True),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
        # "highest" also keeps the CPU's float32 products from rounding their inputs.
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        _attribute(cuda.matmul, "allow_tf32", tf32),
        _attribute(cudnn, "allow_tf32", tf32),
    ]


def _attribute(owner: Any, name: str, value: Any) -> _Setting:
    return (lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


def _refusal(error: RuntimeError) -> RunError:
    said = str(error).split(", but you set")[0].split(". ")[0].strip().rstrip(".")
    return RunError(
        f"no reproducible kernel for this model on this device: {said}; take another model or "
        "method, or resources.device=cpu"
    )
