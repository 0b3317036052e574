"""Settings of a run: active inside the block, restored after it; the same bytes on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from trishul_ray.config import ModelConfig, ResourcesConfig
from trishul_ray.errors import RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.determinism import ENVIRONMENT, deterministic
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run


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
    """Set all settings to other values than a run's; restore the old ones at the end."""
    run = experiment(torch.get_num_threads() + 1)
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    with deterministic(run):  # restores the settings of the process
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
def test_a_runs_settings_are_active_inside_and_restored_after(ambient, precision):
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


@pytest.mark.parametrize("module", ["cli", "federation.on_ray.actors"])
def test_the_environment_is_set_before_torch_is_imported(module):
    """OpenMP reads its settings when torch is loaded, cuBLAS at the first CUDA call."""
    code = (
        "import os, sys\n"
        f"import trishul_ray.{module}\n"
        f"print([os.environ.get(name) for name in {list(ENVIRONMENT)}], 'torch' in sys.modules)"
    )
    first, *others = ENVIRONMENT
    environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT} | {first: ":16:8"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    # A variable that the user has set keeps its value.
    assert done.stdout.strip() == f"{[':16:8', *(ENVIRONMENT[name] for name in others)]} False"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("method", ["trishul", "fedsb", "flexlora", "fullft"])
def test_the_same_bytes_twice_and_after_a_resume_on_a_gpu(
    small, drive_to_end, tmp_path, method, precision
):
    results = []
    for name, stopped in (("one", False), ("two", False), ("resumed", True)):
        run = small(
            f"method={method}",
            f"model.precision={precision}",
            "resources.device=cuda",
            "resources.backend=inline",
            f"storage.runs={tmp_path / name}",
        )
        prepared = prepare_run(run)
        if stopped:
            driver = InlineDriver(run, prepared, "a")
            driver.begin()
            driver.step()
        results.append(drive_to_end(InlineDriver(run, prepared, "a")))
    assert len({result.digest for result in results}) == 1
    losses = [[record["loss"] for record in result.records] for result in results]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradient_repeat_on_a_gpu(dtype, masked):
    """ViT-B's heads at its sequence length, where a kernel may split the sum over keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(8, 12, 197, 64, generator=generator).to("cuda", dtype).requires_grad_()
        for _ in range(3)
    )
    mask = torch.zeros(8, 1, 197, 197, device="cuda", dtype=dtype) if masked else None
    repeats = []
    for _ in range(5):
        with deterministic(experiment()):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        repeats.append([tensor.detach().cpu() for tensor in (out, *gradients)])
    for other in repeats[1:]:
        assert all(torch.equal(a, b) for a, b in zip(repeats[0], other, strict=True))
