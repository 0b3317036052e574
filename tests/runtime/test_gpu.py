"""The device of a run, and the memory that an actor may use of a GPU."""

from types import SimpleNamespace

import pytest
import torch

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.client_actor import ClientActor
from trishul_ray.runtime import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_gpu_that_torch_does_not_find_is_reported(tmp_path, monkeypatch, caplog):
    assert gpu.device_named("auto", "fp32").type == "cpu" and not caplog.records
    with pytest.raises(InputError, match=r"device=cuda: torch .* finds no GPU.*device=cpu$"):
        gpu.device_named("cuda", "fp32")
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27")
    monkeypatch.setattr(gpu, "_DRIVER_FILE", file)
    assert gpu.driver_version() == "580.65.06"
    assert gpu.device_named("auto", "fp32").type == "cpu" and "training on the CPU" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_an_actor_that_holds_a_gpu_does_not_train_on_the_cpu():
    actor = object.__new__(ClientActor.__ray_metadata__.modified_class)
    actor._token, actor._gpu_share, actor.experiment = "a run", 0.5, Experiment()
    with pytest.raises(InputError, match=r"^node \S+ has a GPU for this actor, but torch "):
        actor._work_for(SimpleNamespace(token="a run"))


def test_caps_leave_room_for_the_contexts_of_all_actors():
    total = 24 * gpu.GIB
    share = gpu.capped_share(1 / 3, total)
    assert 3 * (share * total + gpu.CONTEXT_BYTES) == pytest.approx(total)
    assert gpu.capped_share(0.01, total) == pytest.approx(0.005)
