"""Core heads of different ranks on one matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from trishul_ray.adapters.base import FrozenLinear, LayerSpec
from trishul_ray.lab.trishul.mixed import MixedHeads

SPEC = LayerSpec("layer", "layer", 17, 14)


def drawn(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def case(ranks, tokens, scale=True, clients=()):
    """Return adapter, frozen layer, random trainables and input, float64."""
    adapter, generator = MixedHeads.of(ranks, train_scale=scale), torch.Generator().manual_seed(3)
    constants = {k: v.double() for k, v in adapter.constants(SPEC, 7).items()}
    shapes = adapter.shapes(SPEC).items()
    params = {name: drawn(generator, *clients, *shape) for name, shape in shapes}
    weight, bias = drawn(generator, 17, 14), drawn(generator, 17)
    x = drawn(generator, *clients, tokens, 14)
    return adapter, FrozenLinear(weight, bias, constants), params, x


def plain(x, frozen, params, ranks):
    """``W x + sum_i s_i B_i H_i A_i x``, head by head."""
    y, end = functional.linear(x, frozen.weight, frozen.bias), 0
    for i, rank in enumerate(ranks):
        head, end = slice(end, end + rank), end + rank
        thin = x @ frozen.constants["basis_A"][head].T @ params[f"head{i}.core"][0].T
        y = y + params.get(f"head{i}.scale", 1.0) * thin @ frozen.constants["basis_B"][:, head].T
    return y


def gradients(function, x, params):
    x, params = (
        x.clone().requires_grad_(),
        {k: v.clone().requires_grad_() for k, v in params.items()},
    )
    y = function(x, params)
    y.backward(torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), x.grad, *(params[name].grad for name in sorted(params))]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda ranks: sum(ranks) <= 14),
    st.sampled_from([1, 3, 40]),
    st.sampled_from(["auto", "merged", "factored"]),
    st.booleans(),
)
def test_values_and_gradients_are_those_of_each_head(ranks, tokens, path, scale):
    adapter, frozen, params, x = case(tuple(ranks), tokens, scale)
    got = gradients(lambda x, p: adapter.forward(x, frozen, p, path), x, params)
    expected = gradients(lambda x, p: plain(x, frozen, p, ranks), x, params)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    merged = adapter.merged_weight(frozen.weight, frozen.constants, params)
    delta = adapter.delta(frozen.weight, frozen.constants, params)
    torch.testing.assert_close(functional.linear(x, merged, frozen.bias), expected[0])
    torch.testing.assert_close(frozen.weight + delta, merged)


@pytest.mark.parametrize("path", ["merged", "factored"])
def test_clients_in_one_forward_are_computed_as_alone(path):
    ranks = (5, 3, 1)
    adapter, frozen, params, x = case(ranks, 6, clients=(3,))
    got = gradients(lambda x, p: adapter.forward_stacked(x, frozen, p, path), x, params)

    def alone(x, params):
        own = [{name: value[i] for name, value in params.items()} for i in range(3)]
        return torch.stack([plain(x[i], frozen, own[i], ranks) for i in range(3)])

    for one, other in zip(got, gradients(alone, x, params), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_heads_are_orthogonal_and_begin_at_zero():
    adapter = MixedHeads.of((6, 3, 2), train_scale=True)
    constants, start = adapter.constants(SPEC, 7), adapter.initial(SPEC, 7)
    basis_B, basis_A = constants["basis_B"], constants["basis_A"]
    torch.testing.assert_close(basis_B.T @ basis_B, torch.eye(11), atol=1e-5, rtol=0)
    torch.testing.assert_close(basis_A @ basis_A.T, torch.eye(11), atol=1e-5, rtol=0)
    assert not adapter.product(start).any() and start["head2.scale"].item() == 1
    assert adapter.num_parameters(SPEC) == 36 + 9 + 4 and adapter.num_scalars(SPEC) == 3
    assert adapter.head_ranks == (6, 3, 2)
