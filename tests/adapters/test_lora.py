import math
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from trishul_ray.adapters import lora
from trishul_ray.adapters.base import FrozenLinear, LayerSpec
from trishul_ray.adapters.lora import LoRA, merging_pays
from trishul_ray.errors import InputError

SPEC = LayerSpec("layer", "layer", 7, 9)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 5),
    st.sampled_from([(1,), (40,), (2, 5)]),
    st.sampled_from(["auto", "merged", "factored"]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
    st.booleans(),
)
def test_values_and_gradients_follow_the_formula(rank, tokens, path, scale, train_A, on_gpu):
    adapter = LoRA(rank, scale, train_A=train_A)
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*s, generator=generator).double() for s in ((7, 9), (7,)))
    x = torch.randn(*tokens, 9, generator=generator).double()
    factors = {
        "lora_A": torch.randn(rank, 9, generator=generator).double(),
        "lora_B": torch.randn(7, rank, generator=generator).double(),
    }
    results = []
    for reference in (False, True):
        leaves = {k: v.clone().requires_grad_() for k, v in {**factors, "x": x}.items()}
        if reference:
            merged = weight + scale * leaves["lora_B"] @ leaves["lora_A"]
            y = functional.linear(leaves["x"], merged, bias)
        else:
            params = {k: leaves[k] for k in adapter.shapes(SPEC)}
            constants = {} if train_A else {"lora_A": leaves["lora_A"].detach()}
            with projected_as_on_a_gpu() if on_gpu else nullcontext():
                frozen = FrozenLinear(weight, bias, constants)
                y = adapter.forward(leaves["x"], frozen, params, path)
        y.square().sum().backward()
        results.append((y, {k: v.grad for k, v in leaves.items()}))
    (y, got), (y_ref, expected) = results
    torch.testing.assert_close(y, y_ref, rtol=1e-12, atol=1e-12)
    if not train_A:
        assert got.pop("lora_A") is None
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("path", ["auto", "merged", "factored"])
def test_dropout_acts_on_the_update_in_training(path):
    adapter, generator = LoRA(3, 0.5, dropout=0.4), torch.Generator().manual_seed(0)
    sizes = {"x": (2, 5, 9), "weight": (7, 9), "lora_A": (3, 9), "lora_B": (7, 3)}
    params = {k: torch.randn(s, generator=generator).double() for k, s in sizes.items()}
    x, weight = params.pop("x"), params.pop("weight")
    params["lora_B"].requires_grad_()
    frozen = FrozenLinear(weight)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        seen = functional.dropout(x, 0.4)
        torch.manual_seed(1)
        trained = adapter.forward(x, frozen, params, path)
        with torch.no_grad():
            scored = adapter.forward(x, frozen, params, path)
    for found, inner in ((trained, seen), (scored, x)):
        update = 0.5 * inner @ params["lora_A"].mT @ params["lora_B"].mT
        torch.testing.assert_close(found, x @ weight.mT + update, rtol=1e-12, atol=1e-12)


def projected_as_on_a_gpu():
    return patch.object(lora, "project", lora._Project.apply)


@pytest.mark.parametrize("train_A", [True, False])
def test_stacked_gradients_are_equal_on_a_gpu(train_A):
    adapter, results = LoRA(3, 0.5, train_A=train_A), []
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (2, 5, 9), "weight": (7, 9), "lora_A": (2, 3, 9), "lora_B": (2, 7, 3)}
    sizes |= {} if train_A else {"lora_A": (3, 9)}
    values = {k: torch.randn(s, generator=generator).double() for k, s in sizes.items()}
    for context in (nullcontext(), projected_as_on_a_gpu()):
        leaves = {k: v.clone().requires_grad_(k != "weight") for k, v in values.items()}
        params = {k: leaves[k] for k in adapter.shapes(SPEC)}
        constants = {} if train_A else {"lora_A": leaves["lora_A"].detach()}
        with context:
            y = adapter.forward_stacked(
                leaves["x"], FrozenLinear(leaves["weight"], None, constants), params
            )
        y.square().sum().backward()
        results.append((y, {k: v.grad for k, v in leaves.items() if v.grad is not None}))
    (y, got), (y_ref, expected) = results
    assert got.keys() == {"x", *adapter.shapes(SPEC)}
    torch.testing.assert_close((y, got), (y_ref, expected), rtol=1e-12, atol=1e-12)


def test_the_start_is_the_pretrained_layer():
    adapter = LoRA(3)
    start = adapter.initial(SPEC, seed=0)
    assert torch.equal(start["lora_B"], torch.zeros(7, 3))
    assert torch.equal(adapter.delta(None, {}, start), torch.zeros(7, 9, dtype=torch.float64))
    assert torch.equal(start["lora_A"], adapter.initial(SPEC, seed=0)["lora_A"])
    assert not torch.equal(start["lora_A"], adapter.initial(SPEC, seed=1)["lora_A"])


def test_a_is_gaussian_with_the_documented_variance():
    drawn = LoRA(64).initial(LayerSpec("layer", "layer", 8, 400), seed=0)["lora_A"]
    spread = 1 / math.sqrt(3 * 400)
    assert drawn.std().item() == pytest.approx(spread, rel=0.02)
    assert drawn.abs().max() > 3.5 * spread  # A uniform distribution would end at 1.73.


def test_frozen_factor_is_not_counted():
    adapter, trained = LoRA(3, train_A=False), LoRA(3)
    assert set(adapter.shapes(SPEC)) == {"lora_B"}
    drawn = adapter.constants(SPEC, 4)["lora_A"]
    assert torch.equal(drawn, trained.initial(SPEC, 4)["lora_A"])
    assert adapter.num_parameters(SPEC) == 3 * 7
    assert trained.num_parameters(SPEC) == 3 * (7 + 9)
    assert trained.num_scalars(SPEC) == 0


def test_factors_give_the_update():
    adapter = LoRA(2, scale=3.0)
    params = {"lora_A": torch.randn(2, 9), "lora_B": torch.randn(7, 2)}
    expected = 3.0 * params["lora_B"].double() @ params["lora_A"].double()
    torch.testing.assert_close(adapter.delta(None, {}, params), expected)


@pytest.mark.parametrize(
    ("width", "rank", "tokens", "merged"),
    [(128, 4, 2080, True), (768, 32, 6304, False), (768, 32, 8, False)],
)
def test_the_route_follows_the_shapes(width, rank, tokens, merged):
    assert merging_pays(tokens, width, width, rank, backward=True) == merged


def test_an_invalid_rank_raises():
    with pytest.raises(InputError, match="rank=0"):
        LoRA(0)
