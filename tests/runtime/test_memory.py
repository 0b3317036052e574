"""Peak memory of a process, and errors for too little memory."""

import pytest
import torch

from trishul_ray.errors import RunError
from trishul_ray.runtime.memory import PeakMemory, memory_of, peak_memory, reset_peak


def test_memory_peak_starts_at_reset():
    cpu = torch.device("cpu")
    before = torch.ones(50_000_000)  # 200 MB
    whole = peak_memory(cpu)
    del before
    reset_peak(cpu)
    rest = peak_memory(cpu)
    assert whole.of == rest.of == "process" and whole.bytes > 200_000_000
    assert rest.bytes < whole.bytes - 150_000_000
    again = torch.ones(50_000_000)
    assert peak_memory(cpu).bytes > rest.bytes + 150_000_000
    assert max(PeakMemory(2, "gpu"), PeakMemory(3, "gpu")).bytes == 3 and len(again)


def test_memory_peak_excludes_earlier_runs():
    cpu = torch.device("cpu")
    blocks = [torch.ones(20_000) for _ in range(2_500)]  # 200 MB below glibc's threshold for mmap
    last = blocks.pop()  # above the others, which therefore stay allocated
    whole = peak_memory(cpu)
    del blocks
    reset_peak(cpu)
    assert peak_memory(cpu).bytes < whole.bytes - 150_000_000 and len(last)


def test_failed_allocation_names_action_and_remedy():
    with (
        pytest.raises(RunError, match=r"^loading x needs more memory .*: lower y$"),
        memory_of(lambda: "loading x", "lower y"),
    ):
        torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("said", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "other"])
def test_allocation_errors_are_recognized_by_text(said):
    kind = RuntimeError if said == "other" else RunError
    with pytest.raises(kind, match=said) as failed, memory_of("it", "less"):
        raise RuntimeError(said)
    assert type(failed.value) is kind


@pytest.mark.parametrize(("share", "more"), [(0.3, r", or .*gpus_per_actor=1\)$"), (1.0, "$")])
def test_too_small_gpu_fraction_suggests_a_whole_gpu(monkeypatch, share, more):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: share)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**34))
    match = rf"of the GPU's 16.0 .*: lower y{more}"
    with pytest.raises(RunError, match=match), memory_of("it", "lower y"):
        raise torch.OutOfMemoryError("full")
