"""What is said of a GPU that torch cannot use, and the memory that an actor may take of one."""

from types import SimpleNamespace

import pytest
import torch

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.client_actor import ClientActor
from trishul_ray.runtime import gpu

#: What torch 2.11.0+cu130 from PyPI is built for.
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27"


@pytest.mark.parametrize(
    ("capability", "built", "expected"),
    [
        ((7, 0), CUDA_13, False),  # V100
        ((7, 5), CUDA_13, True),  # T4
        ((8, 9), CUDA_13, True),  # L4
        ((9, 0), CUDA_13, True),
        ((10, 3), CUDA_13, True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90a", "compute_90"], True),
    ],
)
def test_code_runs_on_its_major_version_and_ptx_on_any_newer(capability, built, expected):
    assert gpu.has_code(capability, built) is expected


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """``driver(TEXT)``: a machine whose driver says so, and a torch that sees no GPU."""

    def loaded(text, cuda="13.0"):
        file = tmp_path / "version"
        file.write_text(text)
        monkeypatch.setattr(gpu, "_DRIVER_FILE", file)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return loaded


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_why_torch_sees_no_gpu(driver):
    driver(OPEN)
    assert "needs an NVIDIA driver 580 or newer, not 570.86.15" in gpu.why_unusable()
    driver(OPEN, cuda="12.8")
    assert "check nvidia-smi" in gpu.why_unusable()
    driver(CLOSED)
    assert gpu.driver_version() == "580.65.06"
    assert "check nvidia-smi" in gpu.why_unusable()
    driver(CLOSED, cuda=None)
    assert "install a CUDA build" in gpu.why_unusable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_a_gpu_that_torch_does_not_see_is_refused_or_remarked_on(driver, caplog):
    assert gpu.device_named("auto", "fp32").type == "cpu"
    assert not caplog.records
    driver(OPEN)
    with pytest.raises(InputError, match=r"resources.device=cuda: .* driver .*device=cpu$"):
        gpu.device_named("cuda", "fp32")
    assert gpu.device_named("auto", "fp32").type == "cpu"
    assert "training on the CPU" in caplog.text and "570.86.15" in caplog.text


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
