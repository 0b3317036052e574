"""Settings of a run: active in the context, restored after it; the same bytes on a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from trishul_ray.config.fields import ModelConfig, ResourcesConfig
from trishul_ray.errors import RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.determinism import ENVIRONMENT, WAITING, deterministic


def settings():
    """Return the current settings of torch."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn deterministic": cudnn.deterministic,
        "cudnn benchmark": cudnn.benchmark,
        "cudnn attention": cuda.cudnn_sdp_enabled(),
        "flash attention": cuda.flash_sdp_enabled(),
        "efficient attention": cuda.mem_efficient_sdp_enabled(),
        "plain attention": cuda.math_sdp_enabled(),
        "products": torch.get_float32_matmul_precision(),
        "tf32 products": cuda.matmul.allow_tf32,
        "tf32 convolutions": cudnn.allow_tf32,
    }


def expected_settings(threads, tf32):
    return {
        "threads": threads,
        "deterministic": True,
        "warn only": False,
        "filled": False,
        "cudnn deterministic": True,
        "cudnn benchmark": False,
        "cudnn attention": False,
        "flash attention": True,
        "efficient attention": True,
        "plain attention": True,
        "products": "high" if tf32 else "highest",
        "tf32 products": tf32,
        "tf32 convolutions": tf32,
    }


def experiment(threads=2, precision="fp32"):
    return Experiment(
        resources=ResourcesConfig(threads=threads), model=ModelConfig(precision=precision)
    )


@pytest.fixture
def ambient():
    """Set all settings to other values than a run's; restore the old values at the end."""
    run = experiment(torch.get_num_threads() + 1)
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    with deterministic(run):  # It restores the settings of the process.
        torch.set_num_threads(1)
        torch.set_deterministic_debug_mode(0)
        torch.utils.deterministic.fill_uninitialized_memory = True
        cudnn.deterministic, cudnn.benchmark = False, True
        cuda.enable_cudnn_sdp(True)
        cuda.enable_flash_sdp(False)
        cuda.enable_mem_efficient_sdp(False)
        torch.set_float32_matmul_precision("medium")
        cudnn.allow_tf32 = True
        yield settings()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_settings_are_active_inside_and_restored(ambient, precision):
    run = experiment(3, precision)
    expected = expected_settings(3, precision == "tf32")
    assert all(ambient[name] != expected[name] for name in expected.keys() - {
        "warn only", "plain attention", "tf32 products", "tf32 convolutions",
    })  # fmt: skip
    with deterministic(run):
        assert settings() == expected
        with deterministic(experiment(2)):
            assert settings() == expected_settings(2, False)
        assert settings() == expected
    assert settings() == ambient
    with pytest.raises(ZeroDivisionError), deterministic(run):
        raise ZeroDivisionError
    assert settings() == ambient


def test_an_operation_without_a_deterministic_kernel_is_named():
    index, values = torch.tensor([0, 0]), torch.tensor([1.0, 2.0])
    torch.zeros(3).put_(index, values)
    message = (
        r"^no reproducible kernel .*: put_ does not have a deterministic implementation; .*cpu$"
    )
    with pytest.raises(RunError, match=message), deterministic(experiment()):
        torch.zeros(3).put_(index, values)
    with pytest.raises(RuntimeError, match="shape"), deterministic(experiment()):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("cli", {}),
        ("federation.on_ray.client_actor", {}),
        # A variable set by the user stays, and is then the only setting of the waiting of threads.
        ("cli", {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "OMP_WAIT_POLICY": "PASSIVE"}),
        ("cli", {"KMP_BLOCKTIME": "0"}),
    ],
)
def test_the_environment_is_set_before_torch_is_imported(module, given):
    """OpenMP reads its settings when torch is loaded, cuBLAS in the first CUDA call."""
    names = sorted({*ENVIRONMENT, *WAITING, "OMP_WAIT_POLICY"})
    code = (
        "import json, os, sys\n"
        f"import trishul_ray.{module}\n"
        f"print(json.dumps({{name: os.environ[name] for name in {names} if name in os.environ}}))\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    waiting = {} if given else WAITING
    assert json.loads(done.stdout) == ENVIRONMENT | waiting | given
