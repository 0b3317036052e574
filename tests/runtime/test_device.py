"""The device of a run, an actor's part of a GPU's memory, and threads that share cores."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.client_actor import ClientActor
from trishul_ray.runtime import device


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_gpu_that_torch_does_not_find_is_reported(tmp_path, monkeypatch, caplog):
    assert device.device_named("auto").type == "cpu" and not caplog.records
    with pytest.raises(InputError, match=r"device=cuda: torch .* finds no GPU.*device=cpu$"):
        device.device_named("cuda")
    file = tmp_path / "version"
    file.touch()
    monkeypatch.setattr(device, "_DRIVER_FILE", file)
    assert device.device_named("auto").type == "cpu" and "training on the CPU" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_actor_with_gpu_does_not_train_on_cpu():
    actor = object.__new__(ClientActor.__ray_metadata__.modified_class)
    actor._gpu_share, actor._backbones = 0.5, None
    with pytest.raises(InputError, match=r"^node \S+ has a GPU for this actor, but torch "):
        actor.open(SimpleNamespace(load=Experiment))


def test_new_threads_keep_their_number_of_threads():
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1, "test", device.set_threads_of_thread, (1,)) as pool:
        pool.submit(int).result()  # The thread exists, and has not used torch.
        try:
            torch.set_num_threads(3)
            assert pool.submit(torch.get_num_threads).result() == 1
        finally:
            torch.set_num_threads(before)


def test_caps_leave_room_for_all_contexts():
    total = 24 * device.GIB
    share = device.capped_share(1 / 3, total)
    assert 3 * (share * total + device.CONTEXT_BYTES) == pytest.approx(total)
    assert device.capped_share(0.01, total) == pytest.approx(0.005)


def test_more_threads_than_cores_are_reported():
    assert device.oversubscription_warning(4, 1, 4.0) is None
    one = device.oversubscription_warning(1, 3, 2)
    assert one.startswith("resources.threads=3 uses 3 threads on 2 cores: ")
    four = device.oversubscription_warning(4, 2, 6.0)
    assert four.startswith("4 actors x resources.threads=2 uses 8 threads on 6 cores: ")
