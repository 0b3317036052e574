"""FedIT, and the mean of the products in FedEx, FLoRA and FlexLoRA."""

import numpy as np
import pytest
import torch
from method_runs import assert_alpha_scales_the_update, run, same_run

from trishul_ray.adapters.model import Trained
from trishul_ray.federation.worker.context import global_model


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
    trained = global_model(inline.context, run(inline, tmp_path).broadcast(), 2)
    model, gains, kept = inline.context.model, [], []
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
    assert max(kept) < 1e-2  # so small that most entries are below half a step of the weight
    assert np.mean(gains) == pytest.approx(1, abs=0.05)


def test_fedavg_on_lora_is_fedit(executor, tmp_path):
    same_run(executor, tmp_path, ["method=fedavg"], ["method=fedit"])


@pytest.mark.parametrize("name", ["fedit", "ffalora", "fedex", "flora", "flexlora", "hetlora"])
def test_alpha_scales_the_update(executor, tmp_path, name):
    own = ["method.truncate=false"] if name == "flexlora" else []
    assert_alpha_scales_the_update(executor, tmp_path, name, *own)
