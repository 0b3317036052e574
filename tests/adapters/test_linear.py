"""Small updates of adapted layers in low precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from torch import nn

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.export import export_merged
from trishul_ray.adapters.linear import AdaptedLinear, split
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import Trained
from trishul_ray.adapters.multihead import MultiHead

LOW = torch.bfloat16
KINDS = {
    "lora": LoRA(rank=4, scale=0.5),
    "frozen-A": LoRA(rank=4, train_A=False),
    "multihead": MultiHead(heads=2, rank=6),
}


@settings(deadline=None, max_examples=50)
@given(st.integers(-12, 0), st.integers(-20, 2), st.integers(0, 10**6))
def test_two_parts_double_the_precision(weight_scale, update_scale, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = 2.0**weight_scale * torch.randn(9, 7, generator=generator)
    weight = weight.to(LOW).float()  # values of a bfloat16 backbone
    update = 2.0 ** (weight_scale + update_scale) * torch.randn(9, 7, generator=generator)
    whole = weight.double() + update.double()
    high, remainder = split((weight + update).double(), LOW)
    assert high.dtype == remainder.dtype == LOW
    error = (high.double() + remainder.double() - (weight + update).double()).abs()
    assert (error <= 2.0**-17 * whole.abs() + 1e-12).all()
    # Errors are relative to the update itself, however small.
    assert error.norm() <= 2.0**-8 * update.norm()


def regressed(x, y, bias):
    """Compute the matrix that a layer applied, by least squares over tokens, [d_out, d_in]."""
    x, y = x.detach().double().flatten(0, -2), y.detach().double().flatten(0, -2)
    return torch.linalg.lstsq(x, y - bias.detach().double()).solution.T


def gain(actual, expected):
    """Compute the fraction of ``expected`` in ``actual``: 1 if kept, 0 if rounded away."""
    return float((actual * expected).sum() / expected.square().sum())


def layer_of(adapter, path="auto", width=32):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(width, width)
    spec = LayerSpec("layer", "layer", width, width)
    with torch.no_grad():
        linear.weight.copy_(0.2 * torch.randn(width, width, generator=generator))
        linear.bias.copy_(torch.randn(width, generator=generator))
    linear = linear.to(LOW).requires_grad_(False)
    layer = AdaptedLinear(linear, adapter, adapter.constants(spec, 1), path)
    params = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in adapter.initial(spec, 1).items()
    }
    size = adapter.delta(linear.weight, layer.constants, params).norm()
    last = next(name for name in ("lora_B", "core") if name in params)
    # It is as large as the base: a thousandth of the weight.
    params[last] *= 1e-3 * linear.weight.double().norm() / size
    base = 0.2e-3 * torch.randn(width, width, generator=generator)
    return layer, params, base


@pytest.mark.parametrize(
    ("kind", "path", "bound_as"),
    pairwise(KINDS, ["auto", "merged", "factored"], ["trained", "evaluated", "evaluated on a GPU"]),
)
def test_small_updates_reach_the_output(kind, path, bound_as):
    """Test an update of a thousandth of the weight, from the adapter or the base.

    Rounding the summed weight to bfloat16, or adding to a rounded output, would lose at least half
    of it.
    """
    layer, params, base = layer_of(KINDS[kind], path)
    layer._two_products_pay = "GPU" in bound_as  # The merged weight has two parts.
    delta = layer.adapter.delta(layer.weight, layer.constants, params)
    x = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(2)).to(LOW)
    bound = {k: v.clone().requires_grad_(bound_as == "trained") for k, v in params.items()}
    for bound_base, update in ((None, delta), (base, delta + base.double())):
        layer.bind(bound, bound_base)
        y = layer(x)
        assert y.dtype == LOW
        actual = regressed(x, y, layer.bias) - layer.weight.double()
        assert gain(actual, update) == pytest.approx(1, abs=0.03)
        if bound_base is not None:
            assert gain(actual - delta, base.double()) == pytest.approx(1, abs=0.03)
            assert (actual - update).norm() < 0.15 * update.norm()  # rounding of the outputs


@pytest.mark.parametrize("path", ["auto", "merged", "factored"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_layer_with_its_base(kind, path):
    """Compare trainables and input with float64, with an update as large as the weight."""
    layer, params, base = layer_of(KINDS[kind], path)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 50, 32, generator=generator).to(LOW).requires_grad_()
    dy = torch.randn(3, 50, 32, generator=generator).to(LOW)
    base = 1e3 * base
    bound = {k: v.clone().requires_grad_() for k, v in params.items()}
    layer.bind(bound, base)
    (layer(x) * dy).sum().backward()
    leaves = {k: v.double().requires_grad_() for k, v in params.items()}
    frozen = {k: v.double() for k, v in layer.constants.items()}
    if "core" in leaves:
        blocks = torch.block_diag(*(leaves["scale"][:, None, None] * leaves["core"]))
        delta = frozen["basis_B"] @ blocks @ frozen["basis_A"]
    else:
        factor_A = leaves["lora_A"] if "lora_A" in leaves else frozen["lora_A"]
        delta = layer.adapter.scale * leaves["lora_B"] @ factor_A
    exact = x.detach().double().requires_grad_()
    weight = layer.weight.double() + base.double() + delta
    y = nn.functional.linear(exact, weight, layer.bias.double())
    (y * dy.double()).sum().backward()
    pairs = {"x": (x.grad, exact.grad)}
    pairs |= {name: (bound[name].grad, leaf.grad) for name, leaf in leaves.items()}
    for name, (got, expected) in pairs.items():
        assert (got.double() - expected).norm() < 1e-2 * expected.norm(), name


@pytest.mark.parametrize("trains", [True, False])
def test_a_bound_model_computes_with_its_base(make, trains):
    """Test the whole model, by the inputs and outputs of every layer."""
    bench = make("vit", "mixed", dtype=LOW)
    generator = torch.Generator().manual_seed(4)
    base = {
        name: 1e-3 * bench.model.get_submodule(name).weight.float()
        * torch.randn(24, 24, generator=generator)
        for name, _, _ in bench.adapted.iter_layers(bench.adapted.initial())
    }  # fmt: skip
    seen = {}
    for name in base:
        layer = bench.model.get_submodule(name)
        layer.register_forward_hook(lambda m, x, y, name=name: seen.update({name: (x[0], y)}))
    state = bench.adapted.initial()
    bench.adapted.bind(Trained(state, base), torch.zeros_like(state) if trains else None)
    pixels = torch.randn(2000, 3, 8, 8, generator=generator).to(LOW)
    bench.adapted.forward(pixel_values=pixels)
    gains = []
    for name, update in base.items():
        layer = bench.model.get_submodule(name)
        # The first token is the same for every image, so its rounding does not average out.
        x, y = (tensor.detach()[:, 1:].double() for tensor in seen[name])
        plain = nn.functional.linear(x, layer.weight.double(), layer.bias.double())
        gains.append(gain(y - plain, x @ update.double().T))
    # Rounding does not average out over few channels either, so take the mean over layers.
    assert sum(gains) / len(gains) == pytest.approx(1, abs=0.05)
    assert min(gains) > 0.8 and max(gains) < 1.2


def test_float32_weights_add_the_base_exactly(make):
    bench = make("vit", "lora")
    base = {spec.name: torch.randn(24, 24) for spec in bench.adapted.specs}
    state = bench.adapted.initial()
    bench.adapted.bind(Trained(state, base), torch.zeros_like(state))
    for name, update in base.items():
        layer = bench.model.get_submodule(name)
        assert torch.equal(layer.moved_weight, layer.weight + update)
        assert layer.remainder is None


def test_merging_leaves_the_base_bound(make):
    bench = make("vit", "lora")
    state = bench.random_state()
    base = {spec.name: torch.ones(24, 24) for spec in bench.adapted.specs}
    bench.adapted.bind(Trained(state, base), None)
    expected = bench.adapted.forward(**bench.inputs).logits
    bench.adapted.merge(Trained(state, base))
    assert torch.equal(bench.adapted.forward(**bench.inputs).logits, expected)


def test_merged_export_keeps_updates_below_bfloat16(make, tmp_path):
    bench = make("vit", "lora", dtype=LOW)
    state = bench.adapted.initial()
    weights = {s.name: bench.twin.get_parameter(s.name + ".weight") for s in bench.adapted.specs}
    base = {name: 1e-3 * weight.float().flip(0) for name, weight in weights.items()}
    folder = export_merged(bench.adapted, Trained(state, base), tmp_path / "model")
    loaded = type(bench.twin).from_pretrained(folder)
    for name, weight in weights.items():
        held = loaded.get_parameter(name + ".weight").double() - weight.double()
        assert (held - base[name].double()).norm() < 1e-3 * base[name].norm(), name
    head = loaded.get_parameter("classifier.weight")
    assert torch.equal(head, bench.twin.get_parameter("classifier.weight").float())
