"""Orthonormality of the bases, for every initialization."""

import logging
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trishul_ray.errors import InputError, warn_once
from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.bases import BasisInit, draw_bases, heads_that_fit

INITS = get_args(BasisInit)
ORTHONORMAL_HEADS = [init for init in INITS if init != "rv_random_normal"]


def blocks(columns: Tensor, heads: int) -> list[Tensor]:
    return list(columns.double().chunk(heads, dim=1))


def is_orthonormal(columns: Tensor, tolerance: float = 1e-5) -> bool:
    """Return whether the columns of [d, k] are orthonormal, by every entry of the Gram matrix."""
    gram = columns.double().mT @ columns.double()
    return bool(((gram - torch.eye(len(gram))).abs() <= tolerance).all())


def span_dimension(columns: Tensor) -> int:
    return int(torch.linalg.matrix_rank(columns.double(), rtol=1e-5))


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_shapes_and_dtype(init, heads):
    b, a = draw_bases(init, heads, 5, 20, 17, generator=torch_rng(0, "bases"))
    assert b.shape == (20, heads * 5)
    assert a.shape == (heads * 5, 17)
    assert b.dtype == a.dtype == torch.float32
    assert b.is_contiguous() and a.is_contiguous()


@settings(deadline=None, max_examples=40)
@given(
    init=st.sampled_from(ORTHONORMAL_HEADS),
    heads=st.integers(1, 5),
    rank=st.integers(1, 12),
    d_out=st.integers(12, 70),
    d_in=st.integers(12, 70),
    seed=st.integers(0, 2**32),
)
def test_each_head_is_orthonormal(init, heads, rank, d_out, d_in, seed):
    generator = torch_rng(seed, "bases")
    b, a = draw_bases(init, heads, rank, d_out, d_in, generator=generator, overflow="independent")
    for block in blocks(b, heads) + blocks(a.mT, heads):
        assert is_orthonormal(block)


@settings(deadline=None, max_examples=40)
@given(rank=st.integers(1, 12), heads=st.integers(1, 5), extra=st.integers(0, 9))
def test_gram_schmidt_is_jointly_orthonormal(rank, heads, extra):
    width = rank * heads + extra
    b, a = draw_bases(
        "gram_schmidt", heads, rank, width, width + 3, generator=torch_rng(1, "bases")
    )
    assert is_orthonormal(b) and is_orthonormal(a.mT)


def test_gram_schmidt_at_the_papers_size():
    b, a = draw_bases("gram_schmidt", 4, 110, 768, 768, generator=torch_rng(0, "bases"))
    assert is_orthonormal(b, 2e-6) and is_orthonormal(a.mT, 2e-6)


def test_gram_schmidt_orthonormalizes_a_gaussian():
    """Include the signs: the basis is unique, for any sign convention of a QR library."""
    gaussian = torch.randn(12, 6, generator=torch_rng(0, "bases"), dtype=torch.float64)
    columns: list[Tensor] = []
    for column in gaussian.unbind(dim=1):
        for _ in range(2):  # twice is enough
            column = column - sum((q * (q @ column) for q in columns), torch.zeros(12))
        columns.append(column / column.norm())
    b, _ = draw_bases(
        "gram_schmidt", 2, 3, 12, 12, generator=torch_rng(0, "bases"), dtype=torch.float64
    )
    torch.testing.assert_close(b, torch.stack(columns, dim=1))


def test_random_normal_heads_are_not_orthogonal():
    b, _ = draw_bases("random_normal", 2, 8, 40, 40, generator=torch_rng(0, "bases"))
    first, second = blocks(b, 2)
    assert float((first.mT @ second).abs().max()) > 0.1
    assert span_dimension(b) == 16


@pytest.mark.parametrize("sigma", [None, 0.5])
def test_rv_random_normal_has_its_entry_scale(sigma):
    b, a = draw_bases(
        "rv_random_normal", 4, 30, 400, 100, generator=torch_rng(0, "bases"), sigma=sigma
    )
    for side, width in ((b, 400), (a, 100)):
        expected = 1 / math.sqrt(width) if sigma is None else sigma
        assert float(side.std()) == pytest.approx(expected, rel=0.03)
        assert abs(float(side.mean())) < 0.05 * expected
    assert not is_orthonormal(b, 0.05)


def test_shared_subspace_heads_span_one_space_and_differ():
    b, a = draw_bases("shared_subspace", 3, 6, 40, 30, generator=torch_rng(0, "bases"))
    for side in (b, a.mT):
        assert span_dimension(side) == 6
        first, second, third = blocks(side, 3)
        assert float((first - second).norm()) > 0.5
        assert float((second - third).norm()) > 0.5
    # One R_i is used on both sides: tr(B_1^T B_2) = tr(R_1^T R_2) = tr(R_1 R_2^T) = tr(A_1 A_2^T).
    b1, b2, _ = blocks(b, 3)
    a1, a2, _ = blocks(a.mT, 3)
    assert float((b1 * b2).sum()) == pytest.approx(float((a1 * a2).sum()), abs=1e-5)
    # ... and not its transpose, which would give R_1^T R_2 for both.
    assert not torch.allclose(b1.mT @ b2, a1.mT @ a2, atol=1e-3)


def test_constant_heads_are_equal():
    b, a = draw_bases("constant", 3, 6, 40, 30, generator=torch_rng(0, "bases"))
    for side in (b, a.mT):
        first, second, third = blocks(side, 3)
        assert torch.equal(first, second) and torch.equal(second, third)


@pytest.mark.parametrize("init", INITS)
def test_same_generator_same_bytes_other_generator_other_bases(init):
    def draw(seed):
        return draw_bases(init, 2, 4, 16, 12, generator=torch_rng(seed, "bases", "layer"))

    assert all(torch.equal(x, y) for x, y in zip(draw(3), draw(3), strict=True))
    assert not any(torch.allclose(x, y) for x, y in zip(draw(3), draw(4), strict=True))


def test_the_two_sides_are_drawn_independently():
    b, a = draw_bases("gram_schmidt", 2, 4, 16, 16, generator=torch_rng(0, "bases"))
    assert not torch.allclose(b, a.mT)


def test_overflow_raises_with_the_number_that_fits():
    with pytest.raises(InputError, match=r"6 x 156 = 936 exceeds the width 768.*4 heads"):
        draw_bases("gram_schmidt", 6, 156, 768, 768, generator=torch_rng(0, "bases"))


@settings(deadline=None, max_examples=40)
@given(
    rank=st.integers(2, 9), fit=st.integers(1, 3), left=st.integers(0, 8), more=st.integers(1, 3)
)
def test_overflow_uses_the_full_width_before_falling_back(rank, fit, left, more):
    left = min(left, rank - 1)
    width, heads = fit * rank + left, fit + more
    b, _ = draw_bases(
        "gram_schmidt",
        heads,
        rank,
        width,
        heads * rank,
        generator=torch_rng(2, "bases"),
        overflow="independent",
    )
    assert is_orthonormal(b[:, : fit * rank])
    assert is_orthonormal(b[:, :width])  # The next head starts with the remaining directions.
    assert all(is_orthonormal(block) for block in blocks(b, heads))
    assert span_dimension(b) == width


def test_overflow_of_one_side_leaves_the_other_orthonormal():
    b, a = draw_bases(
        "gram_schmidt", 4, 6, 20, 30, generator=torch_rng(0, "bases"), overflow="independent"
    )
    assert not is_orthonormal(b)
    assert is_orthonormal(a.mT)


def test_overflow_is_logged_once_per_shape(caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            draw_bases(
                "gram_schmidt",
                3,
                5,
                11,
                11,
                generator=torch_rng(seed, "bases"),
                overflow="independent",
            )
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "2 heads of rank 5 fit" in caplog.text


@pytest.mark.parametrize(
    ("rank", "width", "heads"), [(110, 512, 4), (110, 768, 6), (110, 2048, 18), (156, 512, 3)]
)
def test_heads_that_fit(rank, width, heads):
    assert heads_that_fit(rank, width, 2048) == heads_that_fit(rank, 2048, width) == heads


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 13}, "rank=13 exceeds the width 12"),
        ({"sigma": 0.1}, "sigma=0.1"),
        ({"init": "rv_random_normal", "sigma": 0.0}, "sigma=0.0"),
        ({"init": "rv_random_normal", "rank": 13}, "rank=13 exceeds the width 12"),
    ],
)
def test_invalid_input_raises(change, message):
    arguments = {"init": "random_normal", "heads": 2, "rank": 4, "d_out": 16, "d_in": 12, **change}
    with pytest.raises(InputError, match=message):
        draw_bases(**arguments, generator=torch_rng(0, "bases"))
