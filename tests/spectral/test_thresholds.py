"""Estimated thresholds against finite differences, grids and planted signals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.svt import singular_values, svt, svt_by_iteration, svt_stats
from trishul_ray.spectral.thresholds import (
    MEDIANS,
    NOISE_MEDIAN,
    client_noise,
    denoise,
    divergences,
    hard_threshold,
    next_level,
    noise_level,
    sure_threshold,
)

ROUTES = pytest.mark.parametrize("route", [svt, svt_by_iteration])


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch_rng(seed, "test"), dtype=torch.float64)


def divergence(values, tau):
    above = (values > tau[:, None]).sum(dim=-1, keepdim=True)
    constant, slope = (each.gather(-1, above).squeeze(-1) for each in divergences(values))
    return constant - slope * tau


def sure(values, sigma, tau):
    """Stein's unbiased estimate of the squared error of thresholding at tau, [n]."""
    removed = torch.minimum(values, tau[:, None]).square().sum(dim=-1)
    return removed + sigma.double() ** 2 * (2 * divergence(values, tau) - values.shape[-1] ** 2)


def planted(rank, size, r, seed=0):
    """[r, r] of the given rank, all of whose singular values are ``size``."""
    u, _ = torch.linalg.qr(gaussian(r, rank, seed=seed))
    v, _ = torch.linalg.qr(gaussian(r, rank, seed=seed + 1))
    return size * u @ v.mT


@ROUTES
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 99), scale=st.floats(-6, 6), share=st.floats(0.01, 0.9))
def test_a_relative_threshold_is_homogeneous_and_a_fixed_one_is_not(route, seed, scale, share):
    cores, c = gaussian(3, 9, 9, seed=seed), 10.0**scale
    one, other = route(cores, share, relative=True), route(c * cores, share, relative=True)
    torch.testing.assert_close(other, c * one, atol=1e-6 * c, rtol=1e-6)
    expected = svt(cores, share * torch.linalg.svdvals(cores)[:, 0])
    torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-6)
    if c > 2:
        difference = route(c * cores, share) - c * route(cores, share)
        assert float(difference.norm()) > 0.1 * share


@ROUTES
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_a_stack_is_its_cores_one_by_one(route, hard, relative):
    cores = torch.cat([gaussian(4, 8, 8), torch.zeros(1, 8, 8), torch.full((1, 8, 8), math.nan)])
    tau = torch.tensor([0.0, 0.3, 0.6, 2.0, 0.5, 0.5], dtype=torch.float64)
    found = route(cores, tau, relative=relative, hard=hard)
    for core, t, result in zip(cores, tau.tolist(), found, strict=True):
        alone = route(core[None], t, relative=relative, hard=hard)[0]
        torch.testing.assert_close(result, alone, atol=1e-6, rtol=0, equal_nan=True)
    u, values, vt = torch.linalg.svd(cores[:5])
    level = tau[:5, None] * (values[:, :1] if relative else 1.0)
    after = torch.where(values > level, values if hard else values - level, 0.0)
    torch.testing.assert_close(found[:5], (u * after[:, None]) @ vt, atol=2e-6, rtol=0)
    stats = svt_stats(cores[:5], tau[:5], relative=relative, hard=hard)
    torch.testing.assert_close(stats.after, after, atol=1e-6, rtol=0)
    torch.testing.assert_close(stats.threshold, level.squeeze(1), atol=1e-6, rtol=0)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), r=st.integers(2, 7), share=st.floats(0.05, 0.95))
def test_the_divergence_is_that_of_finite_differences(seed, r, share):
    core = gaussian(r, r, seed=seed)
    values = torch.linalg.svdvals(core)
    tau = share * values[0]
    apart = torch.cat([values, tau[None]]).sort().values.diff().min()
    if float(apart) < 1e-2:  # differences would cross the threshold
        return
    u, s, vt = torch.linalg.svd(core)
    step, total = 1e-5, 0.0
    for i in range(r):
        for j in range(r):
            moved = torch.zeros(r, r, dtype=torch.float64)
            moved[i, j] = step
            sides = []
            for sign in (1, -1):
                u, s, vt = torch.linalg.svd(core + sign * moved)
                sides.append(((u * (s - tau).clamp(min=0)) @ vt)[i, j])
            total += float(sides[0] - sides[1]) / (2 * step)
    assert float(divergence(values[None], tau[None])) == pytest.approx(total, rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 999), r=st.integers(1, 12), sigma=st.floats(0.01, 2.0))
def test_no_threshold_of_a_grid_has_a_lower_estimate(seed, r, sigma):
    cores = gaussian(2, r, r, seed=seed)
    cores[1] += planted(1, 5.0, r, seed)
    values, noise = torch.linalg.svdvals(cores), torch.full((2,), sigma)
    best = sure(values, noise, sure_threshold(values, noise))
    taus = torch.linspace(0, 1.05, 300, dtype=torch.float64)[:, None] * values[:, 0]
    others = sure(values.repeat(300, 1), noise.repeat(300), taus.flatten()).view(300, 2)
    assert bool((best <= others + 1e-8 * r * r).all())


def test_the_estimate_is_unbiased_on_average():
    signal, sigma, tau = planted(2, 6.0, 12), 0.5, torch.tensor([1.5], dtype=torch.float64)
    noisy = signal + sigma * gaussian(4000, 12, 12, seed=3)
    values = torch.linalg.svdvals(noisy)
    estimates = sure(values, torch.full((4000,), sigma), tau.expand(4000))
    errors = (svt(noisy, float(tau)) - signal).square().sum(dim=(1, 2))
    spread = float((estimates - errors).std()) / math.sqrt(4000)
    assert abs(float((estimates - errors).mean())) < 4 * spread


def test_without_noise_nothing_is_removed_and_equal_values_are_no_trouble():
    values = torch.tensor([[2.0, 2.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    assert float(sure_threshold(values, torch.zeros(1))) == 0.0
    assert math.isfinite(float(sure_threshold(values, torch.ones(1))))
    cores = gaussian(2, 5, 5)
    for how in ("edge", "sure"):
        assert torch.equal(denoise(cores, torch.zeros(2), how)[0], cores)


def test_the_constants():
    x = NOISE_MEDIAN  # half of the quarter circle lies below it
    mass = (x * math.sqrt(4 - x * x) / 2 + 2 * math.asin(x / 2)) / math.pi
    assert mass == pytest.approx(0.5, abs=1e-12)
    assert pytest.approx(2.858, abs=5e-4) == MEDIANS


def clients(m, r, sigma, signal):
    return signal + sigma * gaussian(m, 1, r, r, seed=5)


@pytest.mark.parametrize("how", ["edge", "sure"])
@pytest.mark.parametrize("shares", [[0.2] * 5, [0.5, 0.2, 0.1, 0.1, 0.1]])
def test_what_clients_differ_in_is_removed_and_what_they_share_is_kept(how, shares):
    r, sigma, k = 80, 0.01, 3
    weights = torch.tensor(shares, dtype=torch.float64)[:, None]
    noise_of_mean = sigma * float(weights.square().sum().sqrt())
    # A few large directions of one client are no noise: the estimate must not grow.
    own = torch.zeros(5, 1, r, r, dtype=torch.float64)
    own[0, 0] = planted(2, 1.0, r, seed=20)
    for signal, rank in ((torch.zeros(r, r).double(), 0), (planted(k, 1.0, r, seed=9), k)):
        uploads = clients(5, r, sigma, signal)
        one, mean = client_noise(uploads, weights)
        assert float(one) == pytest.approx(sigma, rel=0.03)
        assert float(mean) == pytest.approx(noise_of_mean, rel=0.03)
        assert float(client_noise(uploads + own, weights)[0]) == pytest.approx(sigma, rel=0.1)
        average = (weights[..., None, None] * uploads).sum(dim=0)
        shrunk, stats = denoise(average, mean, how)
        kept = int((stats.after > 0).sum())
        assert kept <= rank + 2 * (how == "edge") if how == "edge" else kept < r / 2
        assert int((stats.after > 0.5).sum()) == rank
        error = float((shrunk - signal).square().sum())
        assert error < (0.2 if rank else 0.02) * float((average - signal).square().sum())


@pytest.mark.parametrize("how", ["edge", "sure"])
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 99), sigma=st.floats(0.01, 0.5))
def test_denoising_commutes_with_orthogonal_changes_of_basis(how, seed, sigma):
    cores = gaussian(2, 7, 7, seed=seed)
    left, right = (torch.linalg.qr(gaussian(7, 7, seed=seed + n)).Q for n in (100, 200))
    noise = torch.full((2,), sigma, dtype=torch.float64)
    plain, turned = (denoise(x, noise, how)[0] for x in (cores, left @ cores @ right))
    torch.testing.assert_close(turned, left @ plain @ right, atol=1e-9, rtol=1e-9)


def test_a_core_of_fewer_than_two_clients_tells_no_noise():
    weights = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.5]], dtype=torch.float64)
    one, mean = client_noise(gaussian(2, 3, 6, 6), weights)
    assert one[:2].tolist() == mean[:2].tolist() == [0.0, 0.0]
    assert float(one[2]) > 0


def test_unknown_noise_is_removed_and_a_planted_signal_is_kept():
    r = 100
    noise = 0.3 * gaussian(1, r, r)
    signal = planted(4, 15.0, r, seed=3)
    for cores, rank in ((noise, 0), (noise + signal, 4)):
        values = singular_values(cores)
        assert float(noise_level(values)) == pytest.approx(0.3, rel=0.06)
        kept = torch.linalg.matrix_rank(svt(cores, hard_threshold(values), hard=True), tol=1e-6)
        assert int(kept) == rank


@given(rank=st.floats(0, 1), target=st.floats(0.05, 0.95), start=st.floats(-5, 0))
def test_the_controller_is_linear_in_rounds_and_stands_still_at_its_target(rank, target, start):
    level = torch.tensor([start], dtype=torch.float64)
    assert torch.equal(
        next_level(level, torch.tensor([target], dtype=torch.float64), target), level
    )
    levels = [level]
    for _ in range(5):
        levels.append(next_level(levels[-1], torch.tensor([rank], dtype=torch.float64), target))
    steps = torch.cat(levels).diff()
    torch.testing.assert_close(steps, torch.full_like(steps, 0.5 * (rank - target)))
