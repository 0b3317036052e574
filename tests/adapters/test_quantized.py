"""Frozen weights of 4 and 8 bits: stored tensors, computed values, and unchanged storage."""

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trishul_ray.adapters import quantized
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.adapters.quantized import QuantizedLinear, squared_norm
from trishul_ray.adapters.targets import find_layers
from trishul_ray.errors import InputError
from trishul_ray.models.compute import quantize_layers

KINDS = ("nf4", "int8")
DTYPES = (torch.float32, torch.bfloat16)
widths = st.integers(1, 150)

#: The 16 values of NF4, as in Appendix E of arXiv 2305.14314, rounded to float32.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


def layer(d_in, d_out, dtype, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(d_in, d_out, bias=bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return linear.requires_grad_(False)


def dense_nf4(weight):
    """Compute NF4 with blocks of 64 from its definition: nearest value times largest weight."""
    flat = weight.float().reshape(-1)
    blocks = nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / scale.clamp(min=1e-30))[..., None].sub(NF4).abs().argmin(-1)
    return (NF4[nearest] * scale).view(-1)[: len(flat)].view(weight.shape)


@settings(max_examples=40, deadline=None)
@given(d_in=widths, d_out=widths, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_stored_weight_matches_the_definition(d_in, d_out, dtype, seed):
    linear = layer(d_in, d_out, dtype, seed)
    weight = linear.weight.float()
    eight = QuantizedLinear(linear, "int8", dtype).weight
    step = weight.abs().amax(1, keepdim=True) / 127
    rounding = torch.finfo(dtype).eps * weight.abs()
    assert eight.dtype == dtype
    assert ((eight.float() - weight).abs() <= 0.5001 * step + rounding).all()
    four = QuantizedLinear(linear, "nf4", dtype).weight.float()
    # Scales have 8 bits of a dynamic code: within 4% of the largest deviation from their mean.
    scales = weight.abs().max()
    assert (four - dense_nf4(weight)).abs().max() <= 0.05 * scales


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (32, 96), (10, 7), (130, 66)])
def test_rows_beyond_a_block_keep_their_scales(shape):
    """On a CPU, bitsandbytes itself uses another row's scales, with errors of 25% of the weight."""
    linear = layer(shape[1], shape[0], torch.float32)
    error = QuantizedLinear(linear, "nf4", torch.float32).weight - linear.weight
    assert error.norm() / linear.weight.norm() < 0.12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_repeat_and_weight_is_rounded_once(kind, dtype):
    linear = layer(96, 80, dtype)
    one, two = (QuantizedLinear(linear, kind, dtype) for _ in range(2))
    for name, stored in one.named_buffers():
        assert torch.equal(stored, two.get_buffer(name)), name
    assert torch.equal(one.weight, two.weight) and one.weight.dtype == dtype
    exact = QuantizedLinear(linear, kind, torch.float32)
    assert torch.equal(exact.weight.to(dtype), one.weight)


@settings(max_examples=30, deadline=None)
@given(
    d_in=st.integers(2, 80), d_out=st.integers(2, 80), n=st.integers(1, 9),
    kind=st.sampled_from(KINDS), dtype=st.sampled_from(DTYPES), bias=st.booleans(),
)  # fmt: skip
def test_layer_output_equals_dequantized_product(d_in, d_out, n, kind, dtype, bias):
    stored = QuantizedLinear(layer(d_in, d_out, dtype, bias=bias), kind, dtype)
    dense = layer(d_in, d_out, dtype, bias=bias)
    dense.weight.data = stored.weight
    results = []
    for module in (stored, dense):
        x = torch.randn(2, n, d_in, generator=torch.Generator().manual_seed(1)).to(dtype)
        x.requires_grad_()
        y = module(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", [LoRA(rank=3), MultiHead(heads=2, rank=3)])
@pytest.mark.parametrize("with_base", [False, True])
def test_adapted_layer_equals_adapted_dequantized_layer(kind, dtype, adapter, with_base):
    """Compare bitwise, with the gradients of inputs and trainables; a base is never stored."""
    models = [nn.Sequential(layer(24, 40, dtype), nn.GELU(), layer(40, 24, dtype, seed=1))]
    models.append(copy.deepcopy(models[0]))
    quantize_layers(models[0], kind, dtype)
    for index in (0, 2):
        models[1][index].weight.data = models[0][index].weight
    codes = [b.clone() for b in models[0].buffers()]
    results = []
    for model in models:
        layers = {spec.name: adapter for spec in find_layers(model)}
        # A dense weight in float32 might be merged, with another order of sums.
        adapted = AdaptedModel(
            model, layers, seed=0, train_head=False,
            path="factored" if dtype == torch.float32 else "auto",
        )  # fmt: skip
        generator = torch.Generator().manual_seed(2)
        vector = 0.1 * torch.randn(adapted.layout.size, generator=generator)
        base = {"0": torch.randn(40, 24, generator=generator)} if with_base else {}
        grad = torch.zeros_like(vector)
        x = torch.randn(5, 24, generator=generator).to(dtype).requires_grad_()
        adapted.bind(Trained(vector, base), grad)
        y = adapted.forward(input=x)
        y.square().sum().backward()
        adapted.bind(Trained(vector, base))
        with torch.inference_mode():
            scored = adapted.forward(input=x)
        merged = adapted.merge(Trained(vector, base))
        results.append((y.detach(), x.grad, grad, scored, *merged.state_dict().values()))
    assert all(map(torch.equal, *results))
    assert grad.abs().max() > 0
    assert not any(isinstance(m, QuantizedLinear) for m in merged.modules())
    assert all(map(torch.equal, codes, models[0].buffers()))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_keeps_no_dense_weight(kind):
    """Measure the tensors that autograd saves for a chain of wide layers, without weights."""
    layers = nn.Sequential(*(layer(256, 256, torch.float32, n) for n in range(4)))
    quantize_layers(layers, kind, torch.float32)
    saved = []

    def note(tensor):
        saved.append(tensor.numel())
        return tensor

    x = torch.randn(2, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = layers(x)
    assert sum(saved) == 0
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_layers_of_every_family(make, family, kind):
    bench = make(family, "lora")
    model = bench.twin
    before = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    kept = {name: p.clone() for name, p in model.named_parameters()}
    quantize_layers(model, kind, torch.float32)
    after = dict(model.named_modules())
    changed = {name for name in before if isinstance(after[name], QuantizedLinear)}
    assert {spec.name for spec in find_layers(model)} <= changed
    for name, linear in before.items():
        assert (name in changed) == any(part.isdigit() for part in name.split("."))
        assert squared_norm(after[name]) == squared_norm(linear)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, kept[name]), name
    with torch.no_grad():
        logits = model(**bench.inputs).logits
    assert torch.isfinite(logits).all()


def test_stored_bits_are_those_promised():
    """Also test on the meta device: 4.13 bits per weight with NF4, 8 plus row scales with int8."""
    with torch.device("meta"):
        linear = nn.Linear(2048, 8192, bias=False)
    for kind, bits in (("nf4", 4.127), ("int8", 8.016)):
        stored = QuantizedLinear(linear, kind, torch.bfloat16)
        size = sum(b.numel() * b.element_size() for b in stored.buffers())
        assert 8 * size / linear.weight.numel() == pytest.approx(bits, abs=1e-3)
    small = layer(33, 65, torch.float32)
    for kind in KINDS:
        real, shape = (QuantizedLinear(x, kind, torch.float32) for x in (small, small.to("meta")))
        for name, stored in real.named_buffers():
            twin = shape.get_buffer(name)
            assert (stored.shape, stored.dtype) == (twin.shape, twin.dtype), name
        small = layer(33, 65, torch.float32)


def test_a_model_without_blocks_is_rejected():
    with pytest.raises(InputError, match=r"model\.quantize='nf4': Bilinear has no linear layer"):
        quantize_layers(nn.Bilinear(2, 2, 2), "nf4", torch.float32)


def test_without_the_library_the_message_names_the_extra(monkeypatch):
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    quantize_layers(nn.Sequential(nn.Linear(2, 2)), "none", torch.float32)
    with pytest.raises(InputError, match=r"pip install '\.\[quant\]'"):
        quantize_layers(nn.Sequential(nn.Linear(2, 2)), "int8", torch.float32)


def test_library_is_imported_lazily_and_silently():
    code = (
        "import sys, torch; from trishul_ray.adapters import export, quantized as q;"
        "print('bitsandbytes' in sys.modules);"
        "q.QuantizedLinear(torch.nn.Linear(4, 4), 'nf4', torch.float32);"
        "print('bitsandbytes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")
