"""The same run gives the same bytes on one device: repeated, and after a resume."""

import pytest
import torch

from trishul_ray.config.fields import ResourcesConfig
from trishul_ray.experiment import Experiment
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run

LIMITED = ["method=trishul", "federation.compute=uniform"]
ON_A_GPU = [
    pytest.param("cuda", overrides, precision, marks=pytest.mark.gpu)
    for overrides in (LIMITED, ["method=fedsb"], ["method=flexlora"], ["method=fullft"])
    for precision in ("fp32", "tf32", "bf16")
]


@pytest.mark.parametrize(
    ("where", "overrides", "precision"),
    [("cpu", LIMITED, "fp32"), *ON_A_GPU],  # The first case rehearses the test.
)
def test_the_same_bytes_twice_and_after_a_resume(
    small, drive_to_end, tmp_path, where, overrides, precision
):
    results = []
    for name in ("one", "two", "resumed"):
        run = small(
            *overrides,
            f"model.precision={precision}",
            f"resources.device={where}",
            "resources.backend=inline",
            f"storage.runs={tmp_path / name}",
        )
        prepared = prepare_run(run)
        if name == "resumed":
            stopped = InlineDriver(run, prepared, "a")
            stopped.begin()
            stopped.step()
        results.append(drive_to_end(InlineDriver(run, prepared, "a")))
    assert len({result.digest for result in results}) == 1
    losses = [[record.scores["loss"] for record in result.checkpoint.records] for result in results]
    assert losses[0] == losses[1] == losses[2]


#: Methods with cores and the prox, with LoRA, a base, separate frozen tensors, and no adapter; a
#: method whose hooks compute another gradient, and stacked clients.
AS_GRAPHS = [
    *(["method=trishul"], ["method=fedit"], ["method=fedex"], ["method=fedsb"], ["method=fullft"]),
    *(["method=scaffold"], ["method=trishul", "federation.stacked=2"]),
]


@pytest.mark.parametrize("overrides", AS_GRAPHS, ids=" ".join)
def test_the_same_bytes_as_cuda_graphs(small, drive_to_end, tmp_path, device, overrides):
    """On a CPU, a replay is a call on the same copies of the arguments."""
    digests = []
    for graphs in (False, True):
        run = small(
            *overrides,
            f"resources.cuda_graphs={graphs}",
            f"resources.device={device}",
            "resources.backend=inline",
            f"storage.runs={tmp_path / str(graphs)}",
        )
        digests.append(drive_to_end(InlineDriver(run, prepare_run(run), "a")).digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradient_repeat(device, dtype, masked):
    """Test ViT-B's heads at its sequence length, where a kernel may split the sum over keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(8, 12, 197, 64, generator=generator).to(device, dtype).requires_grad_()
        for _ in range(3)
    )
    mask = torch.zeros(8, 1, 197, 197, device=device, dtype=dtype) if masked else None
    repeats = []
    for _ in range(5 if device == "cuda" else 2):
        with deterministic(Experiment(resources=ResourcesConfig(threads=1))):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        repeats.append([tensor.detach().cpu() for tensor in (out, *gradients)])
    for other in repeats[1:]:
        assert all(torch.equal(a, b) for a, b in zip(repeats[0], other, strict=True))
