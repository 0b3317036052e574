"""Peak memory of a process."""

import torch

from trishul_ray.memory import PeakMemory, peak_memory, reset_peak


def test_a_peak_is_of_what_came_after_the_reset():
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
