import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from torch.nn import functional

from trishul_ray.adapters.base import FrozenLinear, LayerSpec
from trishul_ray.adapters.multihead import (
    Call,
    MultiHead,
    Routes,
    aligned_bases,
    choose_routes,
    multihead_linear,
)
from trishul_ray.errors import InputError

ROUTES = [Routes(*pair) for pair in itertools.product((True, False), repeat=2)]


def case(d_out, d_in, heads, rank, tokens, dtype=torch.float64, *, bias=True, seed=0, scale=True):
    """Draw a layer with a random adapter, tensors and input."""
    adapter = MultiHead(heads, rank, init="random_normal", train_scale=scale)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    spec = LayerSpec("layer", "layer", d_out, d_in)
    constants = {k: v.to(dtype) for k, v in adapter.constants(spec, 7).items()}
    params = {name: normal(*shape) for name, shape in adapter.shapes(spec).items()}
    x, weight = normal(*tokens, d_in), normal(d_out, d_in) / d_in**0.5
    return adapter, FrozenLinear(weight, normal(d_out) if bias else None, constants), params, x


def as_dtype(frozen, dtype):
    constants = {name: value.to(dtype) for name, value in frozen.constants.items()}
    return FrozenLinear(frozen.weight.to(dtype), frozen.bias.to(dtype), constants)


def plain(x, frozen, params):
    """Compute eq. (forward) term by term, for autograd."""
    core = params["core"]
    heads, rank, _ = core.shape
    y = functional.linear(x, frozen.weight, frozen.bias)
    for i in range(heads):
        columns = slice(i * rank, (i + 1) * rank)
        scale = params["scale"][i] if "scale" in params else 1.0
        thin = x @ frozen.constants["basis_A"][columns].T @ core[i].T
        y = y + scale * thin @ frozen.constants["basis_B"][:, columns].T
    return y


def gradients(function, x, params):
    x = x.clone().requires_grad_()
    params = {k: v.clone().requires_grad_() for k, v in params.items()}
    y = function(x, params)
    cotangent = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    y.backward(cotangent)
    return y.detach(), {"x": x.grad, **{k: v.grad for k, v in params.items()}}


shapes = st.tuples(
    st.integers(6, 14),  # d_out
    st.integers(6, 14),  # d_in
    st.integers(1, 4),  # heads
    st.integers(1, 6),  # rank
    st.sampled_from([(1,), (3,), (40,), (2, 5), (4, 9), (1, 1)]),  # tokens
)


@settings(deadline=None, max_examples=60)
@given(shapes, st.sampled_from(["auto", "merged", "factored"]), st.booleans(), st.booleans())
def test_values_and_gradients_match_the_formula(shape, path, bias, scale):
    adapter, frozen, params, x = case(*shape, bias=bias, scale=scale)
    y, got = gradients(lambda x, p: adapter.forward(x, frozen, p, path), x, params)
    y_ref, expected = gradients(lambda x, p: plain(x, frozen, p), x, params)
    torch.testing.assert_close(y, y_ref, rtol=1e-12, atol=1e-12)
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-11, atol=1e-11)


@settings(deadline=None, max_examples=30)
@given(shapes, st.sampled_from([Routes(False, True), Routes(False, False)]))
def test_aligned_heads_change_no_value_and_no_gradient(shape, routes):
    _, frozen, params, x = case(*shape)
    wide = replace(frozen, constants=aligned_bases(frozen.constants, shape[2]))
    assert len(wide.constants["basis_A"]) % 8 == 0
    found, expected = (
        gradients(lambda x, p, f=f: multihead_linear(x, p["core"], f, routes), x, params)
        for f in (wide, frozen)
    )
    torch.testing.assert_close(found[0], expected[0])
    for name in ("x", "core"):
        torch.testing.assert_close(found[1][name], expected[1][name])


def test_stacked_clients_compute_with_aligned_heads():
    adapter, frozen, params, x = case(12, 16, 2, 5, (6, 4))
    both = {name: torch.stack([value, -value]) for name, value in params.items()}
    wide = replace(frozen, constants=aligned_bases(frozen.constants, 2))
    rows = x.view(2, -1, 16)
    found = adapter.forward_stacked(rows, wide, both, "factored")
    torch.testing.assert_close(found, adapter.forward_stacked(rows, frozen, both, "factored"))


@pytest.mark.parametrize(
    ("routes", "shape", "tokens"), pairwise(ROUTES, [(5, 9), (9, 5)], [(2,), (3, 4)])
)
def test_gradcheck(routes, shape, tokens):
    d_out, d_in = shape
    adapter, frozen, params, x = case(d_out, d_in, 2, 2, tokens)
    leaves = x.requires_grad_(), adapter.product(params).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: multihead_linear(x, p, frozen, routes), leaves)


@pytest.mark.parametrize("d_out, d_in", [(96, 96), (48, 96), (96, 48)])
@pytest.mark.parametrize("tokens", [(8,), (4, 200)])
def test_routes_agree_in_float32(d_out, d_in, tokens):
    adapter, frozen, params, x = case(d_out, d_in, 4, 10, tokens, dtype=torch.float32)

    def through(routes):
        return lambda x, p: multihead_linear(x, adapter.product(p), frozen, routes)

    results = [gradients(through(routes), x, params) for routes in ROUTES]
    y_ref, expected = results[0]
    for y, got in results[1:]:
        assert (y - y_ref).abs().max() <= 1e-5 * y_ref.abs().max()
        for name in expected:
            error = (got[name] - expected[name]).abs().max()
            assert error <= 1e-5 * expected[name].abs().max(), name


def test_the_frozen_weight_and_bias_get_no_gradient():
    adapter, frozen, params, x = case(8, 8, 2, 2, (4,))
    for tensor in (frozen.weight, frozen.bias, params["core"]):
        tensor.requires_grad_()
    for path in ("merged", "factored"):
        adapter.forward(x, frozen, params, path).sum().backward()
    assert frozen.weight.grad is None
    assert frozen.bias.grad is None
    assert params["core"].grad is not None


def test_no_graph_without_trainables():
    adapter, frozen, params, x = case(8, 8, 2, 2, (4,))
    y = adapter.forward(x, frozen, params)
    assert not y.requires_grad and not torch.isnan(y).any()


@pytest.mark.parametrize("path", ["auto", "merged", "factored"])
def test_the_start_is_the_pretrained_layer(path):
    adapter, frozen, _, x = case(16, 16, 2, 4, (40,), dtype=torch.float32)
    start = adapter.initial(LayerSpec("layer", "layer", 16, 16), seed=1)
    assert torch.equal(start["core"], torch.zeros(2, 4, 4))
    assert torch.equal(start["scale"], torch.ones(2))
    # W + 0 is W, so the bits are equal.
    expected = functional.linear(x, frozen.weight, frozen.bias)
    assert torch.equal(adapter.forward(x, frozen, start, path), expected)


def test_bases_are_drawn_per_layer_and_seed():
    adapter = MultiHead(2, 3)
    one, two = LayerSpec("one", "b", 8, 9), LayerSpec("two", "b", 8, 9)
    first = adapter.constants(one, 0)
    assert first["basis_B"].shape == (8, 6)
    assert first["basis_A"].shape == (6, 9)
    assert torch.equal(first["basis_B"], adapter.constants(one, 0)["basis_B"])
    assert not torch.equal(first["basis_B"], adapter.constants(two, 0)["basis_B"])
    assert not torch.equal(first["basis_B"], adapter.constants(one, 1)["basis_B"])


def test_orthonormal_bases_preserve_the_norm():
    adapter = MultiHead(3, 4)
    spec = LayerSpec("layer", "layer", 20, 16)
    constants = {k: v.double() for k, v in adapter.constants(spec, 0).items()}
    params = {"core": torch.randn(3, 4, 4).double(), "scale": torch.tensor([1.0, -2.0, 0.5])}
    product = adapter.product(params)
    delta = adapter.delta(None, constants, params)
    assert delta.dtype == torch.float64
    torch.testing.assert_close(delta.norm(), product.norm(), rtol=1e-5, atol=0)
    nuclear = torch.linalg.matrix_norm
    torch.testing.assert_close(
        nuclear(delta, "nuc"), nuclear(product, "nuc").sum(), rtol=1e-5, atol=0
    )


def test_bfloat16_weights_keep_small_updates():
    adapter, frozen, params, x = case(32, 32, 2, 8, (64,), dtype=torch.float32)
    tiny = {k: 1e-4 * v for k, v in params.items()}
    low, x = as_dtype(frozen, torch.bfloat16), x.to(torch.bfloat16)
    tiny["core"].requires_grad_()
    y = adapter.forward(x, low, tiny)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert tiny["core"].grad.dtype == torch.float32
    reference = {k: v.detach().double().clone() for k, v in tiny.items()}
    reference["core"].requires_grad_()
    exact = replace(
        as_dtype(low, torch.float64), constants=as_dtype(frozen, torch.float64).constants
    )
    plain(x.double(), exact, reference).square().sum().backward()
    error = (tiny["core"].grad - reference["core"].grad).norm() / reference["core"].grad.norm()
    assert error < 0.02
    # A merged bfloat16 weight would lose such a small update.
    call = Call(6304, 768, 768, 4, 110, core_grad=True, input_grad=True)
    assert not choose_routes(call, low_precision=True).merged_forward


@pytest.mark.parametrize(
    ("tokens", "routes"),
    [(6304, (True, True)), (16, (False, False))],
)
def test_routes_follow_the_number_of_tokens(tokens, routes):
    call = Call(tokens, 768, 768, 4, 110, core_grad=True, input_grad=True)
    assert choose_routes(call) == routes


def test_no_heads_leave_the_layer_unchanged():
    adapter, spec = MultiHead(0, 4), LayerSpec("layer", "layer", 8, 8)
    assert adapter.shapes(spec) == adapter.constants(spec, 0) == adapter.initial(spec, 0) == {}
    assert adapter.num_parameters(spec) == adapter.num_scalars(spec) == 0
    x, weight = torch.randn(3, 8), torch.randn(8, 8)
    assert torch.equal(adapter.forward(x, FrozenLinear(weight), {}), x @ weight.T)


@pytest.mark.parametrize(
    ("arguments", "message"), [((-1, 2), "heads=-1"), ((2, 0), "rank=0 must be at least 1")]
)
def test_invalid_sizes_raise(arguments, message):
    with pytest.raises(InputError, match=message):
        MultiHead(*arguments)


def test_heads_that_do_not_fit_raise_or_overflow():
    spec = LayerSpec("layer", "layer", 16, 8)
    with pytest.raises(InputError):
        MultiHead(3, 4).constants(spec, 0)
    bases = MultiHead(3, 4, overflow="independent").constants(spec, 0)
    assert bases["basis_A"].shape == (12, 8)
