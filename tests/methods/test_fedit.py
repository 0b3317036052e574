"""FedIT, and what FedEx, FLoRA and FlexLoRA share: the mean of the products."""

import numpy as np
import pytest
import torch
from method_runs import Recording, run, same_run, server_of, weights_of
from safetensors.torch import load_file

from trishul_ray.adapters.export import export_peft
from trishul_ray.adapters.model import Trained
from trishul_ray.federation.workbench import global_model


@pytest.mark.parametrize(
    ("name", "lr"), [("fedex", "0.003"), ("flora", "0.0002"), ("flexlora", "0.003")]
)
def test_bfloat16_keeps_folded_updates(executor, tmp_path, name, lr):
    """The folded base changes the layers' outputs by ``x base^T``, however small it is."""
    options = [
        *(["method.truncate=false"] if name == "flexlora" else []),
        f"optimizer.lr={lr}",
        "federation.rounds=1",
    ]
    inline = executor(f"method={name}", "model.precision=bf16", *options)
    trained = global_model(inline.bench, run(inline, tmp_path).broadcast(), 2)
    model, gains, kept = inline.bench.model, [], []
    generator = torch.Generator().manual_seed(0)
    for layer, base in list(trained.base.items())[:4]:
        d_in = base.shape[1]
        x = torch.randn(2**19 // d_in, d_in, generator=generator).bfloat16()
        moved = x.double() @ base.double().T
        outputs = []
        for frozen in (trained.base, {}):
            model.bind(Trained(trained.vector, frozen), torch.zeros_like(trained.vector))
            adapted = model.model.get_submodule(layer)
            outputs.append(adapted(x).detach().double())
            if frozen:
                kept.append(base.norm() / adapted.weight.float().norm())
        gains.append(float(((outputs[0] - outputs[1]) * moved).sum() / moved.square().sum()))
        model.unbind()
    assert max(kept) < 1e-2  # so small that most of it lies below half a step of the weight
    assert np.mean(gains) == pytest.approx(1, abs=0.05)


def test_fedavg_on_lora_is_fedit(executor, tmp_path):
    same_run(executor, tmp_path, ["method=fedavg"], ["method=fedit"])


@pytest.mark.parametrize(
    "name", ["fedit", "ffalora", "fedex", "flora", "flexlora", "florist", "hetlora"]
)
def test_alpha_scales_the_update(executor, tmp_path, name):
    """Exactness, folding and export hold at alpha = 3 r, where every factor of alpha / r counts."""
    own = {"flexlora": ["method.truncate=false"], "florist": ["method.threshold=1"]}.get(name, [])
    one = ["federation.clients=1", "federation.clients_per_round=1"]
    recording = Recording(executor(f"method={name}", "adapter.alpha=24", "budget=8", *own, *one))
    server = server_of(recording, tmp_path)
    server.step()
    bench = recording.inner.bench
    if name != "ffalora":
        assert {adapter.scale for adapter in bench.model.adapters.values()} == {3.0}
    vector = bench.initial.clone()
    shared = torch.from_numpy(recording.uploads[0].arrays.shared)
    server.method.unpack(bench.model.layout, vector, shared)
    clients = bench.model.deltas(Trained(vector))
    found = weights_of(recording.inner, server.broadcast())
    for layer, update in clients.items():
        adapter = bench.model.adapters[layer]
        factors = bench.model.layout.views(vector)
        left = factors[f"{layer}.lora_B"].double()
        right = factors.get(f"{layer}.lora_A", bench.model.constants(layer).get("lora_A"))
        torch.testing.assert_close(update, 24 / adapter.rank * left @ right.double())
        torch.testing.assert_close(found[layer], update, atol=1e-6, rtol=1e-5)
    trained = global_model(bench, server.broadcast(), 1)
    export_peft(bench.model, trained, tmp_path / "adapter", "base")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for layer, update in found.items():
        path = f"base_model.model.{layer}"
        left, right = (tensors[f"{path}.lora_{side}.weight"].double() for side in "BA")
        torch.testing.assert_close(left @ right, update, atol=1e-6, rtol=1e-5)
