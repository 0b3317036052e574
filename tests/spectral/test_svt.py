"""The proximal map against a float64 SVD and against the properties that define it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.svt import (
    SvtStats,
    singular_values,
    svt,
    svt_by_iteration,
    svt_stats,
    svt_summary,
)

ROUTES = pytest.mark.parametrize("route", [svt, svt_by_iteration])


def nuclear_norm(x: Tensor) -> Tensor:
    """Compute ``||X||_*`` of every matrix of [..., p, q] (TRISHUL, eq. local_obj)."""
    return torch.linalg.svdvals(x.double()).sum(dim=-1)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_rng(seed, "test"), dtype=torch.float64)


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """Return [n, r, r] float32 with singular values [n, r] and random singular vectors."""
    n, r = values.shape
    u, _ = torch.linalg.qr(gaussian(n, r, r, seed=seed))
    v, _ = torch.linalg.qr(gaussian(n, r, r, seed=seed + 1))
    return ((u * values.unsqueeze(-2)) @ v.mT).float()


def reference(cores: Tensor, threshold: float) -> Tensor:
    u, s, vh = torch.linalg.svd(cores.double())
    return (u * (s - threshold).clamp(min=0).unsqueeze(-2)) @ vh


def spectral_norm(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x.double(), ord=2)


def assert_is_prox(result: Tensor, cores: Tensor, threshold: float) -> None:
    error = spectral_norm(result.double() - reference(cores, threshold))
    assert bool((error <= 1e-6 * spectral_norm(cores)).all()), error


@pytest.fixture
def set_threads():
    """Return ``torch.set_num_threads``, reset after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@st.composite
def spectra(draw) -> Tensor:
    """Draw [n, r] singular values over many scales, with repeats and exact zeros."""
    n, r = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    scale = 10.0 ** draw(st.integers(-12, 6))
    levels = st.one_of(
        st.just(0.0), st.just(1.0), st.floats(0.0, 1.0), st.floats(-9, 0).map(lambda e: 10.0**e)
    )
    rows = [[draw(levels) for _ in range(r)] for _ in range(n)]
    return torch.tensor(rows, dtype=torch.float64) * scale


@ROUTES
@settings(deadline=None, max_examples=150)
@given(values=spectra(), share=st.floats(1e-6, 1.5), seed=st.integers(0, 99))
def test_equals_the_float64_svd(route, values, share, seed):
    cores = with_spectrum(values, seed)
    threshold = max(share * float(values.max()), 1e-30)
    assert_is_prox(route(cores, threshold), cores, threshold)


@ROUTES
@pytest.mark.parametrize("share", [1e-5, 5e-4, 0.1, 0.7])
def test_equals_the_float64_svd_at_the_papers_size(route, share):
    cores = gaussian(3, 110, 110).float() * 5e-4
    threshold = share * float(spectral_norm(cores).max())
    assert_is_prox(route(cores, threshold), cores, threshold)


@pytest.mark.parametrize("share", [1e-3, 0.1])
def test_the_iteration_in_float32_is_within_1e_5(share):
    cores = gaussian(3, 110, 110).float() * 5e-4
    largest = spectral_norm(cores).max()
    error = svt_by_iteration(cores, share * float(largest), torch.float32).double()
    error -= reference(cores, share * float(largest))
    assert bool((spectral_norm(error) <= 1e-5 * largest).all())


@ROUTES
@settings(deadline=None, max_examples=60)
@given(values=spectra(), cut=st.integers(0, 23), seed=st.integers(0, 99))
def test_rank_is_right_away_from_the_threshold(route, values, cut, seed):
    cores = with_spectrum(values, seed)
    true = torch.linalg.svdvals(cores.double())  # descending [n, r]
    margin = 1e-5 * true[:, :1]
    threshold = float(true[0, cut % true.shape[1]]) + 2 * float(margin[0, 0])
    if threshold == 0.0:
        return
    after = torch.linalg.svdvals(route(cores, threshold).double())
    noise = 1e-6 * true[:, :1]
    assert bool(
        (after[true < threshold - margin] <= noise.expand_as(true)[true < threshold - margin]).all()
    )
    assert bool(
        (after[true > threshold + margin] > noise.expand_as(true)[true > threshold + margin]).all()
    )


@ROUTES
def test_optimality_zero_is_in_the_subdifferential(route):
    """Check (X - P)/tau = U V^T + W, ||W|| <= 1, U^T W = 0, W V = 0 on the range of P = U S V^T."""
    cores, threshold = gaussian(5, 20, 20).float(), 3.0
    shrunk = route(cores, threshold).double()
    dual = (cores.double() - shrunk) / threshold
    assert bool((spectral_norm(dual) <= 1 + 1e-5).all())
    u, s, vh = torch.linalg.svd(shrunk)
    for i in range(5):
        k = int((s[i] > 1e-4).sum())
        assert 0 < k < 20
        torch.testing.assert_close(dual[i] @ vh[i, :k].mT, u[i, :, :k], atol=1e-4, rtol=0)
        torch.testing.assert_close(dual[i].mT @ u[i, :, :k], vh[i, :k].mT, atol=1e-4, rtol=0)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 999), size=st.floats(-4, 0.5), tau=st.floats(0.01, 6.0))
def test_no_other_point_has_a_lower_objective(seed, size, tau):
    def objective(p: Tensor) -> Tensor:
        distance = (p.double() - cores.double()).square().sum(dim=(-2, -1)) / 2
        return distance + tau * nuclear_norm(p)

    cores = gaussian(2, 8, 8, seed=seed).float()
    best = svt(cores, tau)
    other = best + 10.0**size * gaussian(2, 8, 8, seed=seed + 1).float()
    assert bool((objective(best) <= objective(other) + 1e-6 * objective(best)).all())


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 999), tau=st.floats(0.01, 6.0), size=st.floats(-3, 1))
def test_nonexpansive(seed, tau, size):
    x = gaussian(3, 9, 9, seed=seed).float()
    y = x + 10.0**size * gaussian(3, 9, 9, seed=seed + 1).float()
    before = torch.linalg.matrix_norm((x - y).double())
    after = torch.linalg.matrix_norm((svt(x, tau) - svt(y, tau)).double())
    assert bool((after <= before + 1e-5).all())


def test_orthogonal_factors_pass_through():
    cores = gaussian(2, 10, 10)
    q, _ = torch.linalg.qr(gaussian(2, 10, 10, seed=1))
    turned = svt((q @ cores).float(), 1.5).double()
    torch.testing.assert_close(turned, q @ svt(cores.float(), 1.5).double(), atol=1e-5, rtol=0)


def test_two_shrinkages_equal_one_of_their_sum():
    cores = gaussian(3, 12, 12).float()
    torch.testing.assert_close(svt(svt(cores, 0.7), 0.7), svt(cores, 1.4), atol=1e-5, rtol=0)


@ROUTES
def test_threshold_zero_is_a_copy_bit_for_bit(route):
    cores = gaussian(2, 5, 5).float()
    same = route(cores, 0.0)
    assert torch.equal(same, cores)
    assert same.data_ptr() != cores.data_ptr()


@ROUTES
def test_empty_stack_and_zero_cores(route):
    assert route(torch.empty(0, 7, 7), 0.5).shape == (0, 7, 7)
    assert torch.equal(route(torch.zeros(3, 7, 7), 0.5), torch.zeros(3, 7, 7))


@ROUTES
def test_core_below_the_threshold_is_exactly_zero(route):
    cores = gaussian(3, 6, 6).float()
    cores[1] *= 1e-3
    shrunk = route(cores, 0.5)
    assert int(shrunk[1].count_nonzero()) == 0
    assert_is_prox(shrunk, cores, 0.5)


@ROUTES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_core_affects_no_other_core(route, bad):
    cores = gaussian(3, 6, 6).float()
    alone = route(cores, 0.5)
    cores[1, 2, 3] = bad
    shrunk = route(cores, 0.5)
    assert bool(shrunk[1].isnan().all())
    torch.testing.assert_close(shrunk[[0, 2]], alone[[0, 2]])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_at_the_ends_of_float32(scale):
    cores = gaussian(2, 6, 6).float() * scale
    assert_is_prox(svt(cores, 0.8 * scale), cores, 0.8 * scale)


def test_keeps_dtype_and_drops_gradient_history():
    cores = gaussian(2, 4, 4).requires_grad_()
    shrunk = svt(cores, 0.3)
    assert shrunk.dtype == torch.float64
    assert not shrunk.requires_grad
    assert_is_prox(shrunk, cores.detach(), 0.3)


def test_stats_give_the_spectra_and_the_removed_shares():
    values = torch.tensor([[4.0, 3.0, 1.0, 0.0], [2.0, 0.5, 0.5, 0.5]], dtype=torch.float64)
    cores = with_spectrum(values)
    stats = svt_stats(cores, 1.5)
    torch.testing.assert_close(stats.before, values, atol=1e-6, rtol=0)
    after = torch.tensor([[2.5, 1.5, 0, 0], [0.5, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(stats.after, after, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        stats.after, torch.linalg.svdvals(svt(cores, 1.5).double()), atol=1e-6, rtol=0
    )
    summary = svt_summary([stats])
    assert summary["zeroed"] == 5 / 8
    assert summary["energy_removed"] == pytest.approx(1 - (6.25 + 2.25 + 0.25) / (26 + 4.75))


def test_statistics_combine_banks_of_different_rank():
    one = svt_stats(with_spectrum(torch.tensor([[4.0, 1.0]])), 2.0)
    two = svt_stats(with_spectrum(torch.tensor([[1.0, 1.0, 1.0, 1.0]])), 2.0)
    summary = svt_summary([one, two])
    assert summary["zeroed"] == 5 / 6
    assert summary["energy_removed"] == pytest.approx(1 - 4 / 21)
    assert svt_summary([]) == {"zeroed": 0.0, "energy_removed": 0.0}


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_stats_at_the_edges(threshold):
    stats = svt_stats(torch.zeros(2, 3, 3), threshold)
    assert svt_summary([stats]) == {"zeroed": 1.0, "energy_removed": 0.0}
    empty = svt_stats(torch.empty(0, 3, 3), threshold)
    assert svt_summary([empty]) == {"zeroed": 0.0, "energy_removed": 0.0}
    assert isinstance(empty, SvtStats) and empty.before.shape == (0, 3)


def test_non_finite_core_has_nan_singular_values():
    cores = gaussian(2, 5, 5)
    cores[0, 0, 0] = math.inf
    values = singular_values(cores)
    assert bool(values[0].isnan().all())
    torch.testing.assert_close(values[1], torch.linalg.svdvals(cores[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1e-5, 5e-4, 0.3])
def test_on_a_gpu(share):
    cores = gaussian(8, 110, 110).float()
    threshold = share * float(spectral_norm(cores).max())
    on_gpu = svt(cores.cuda(), threshold)
    assert on_gpu.is_cuda
    assert_is_prox(on_gpu.cpu(), cores, threshold)


def test_stack_divided_among_threads_keeps_bits(set_threads):
    # LAPACK would divide matrices of this size, and round differently.
    low = gaussian(5, 200, 5, seed=1) @ gaussian(5, 5, 200, seed=2)
    cores = (1e-3 * gaussian(5, 200, 200) + 1e-2 * low).float()
    cores[0, 0, 0] = math.nan
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        found.append(svt(cores, 2e-5))
        assert torch.get_num_threads() == threads
    assert bool(found[0][0].isnan().all()) and bool(found[0][1:].isfinite().all())
    for each in found[1:]:
        assert torch.equal(found[0].nan_to_num(7.0), each.nan_to_num(7.0))
