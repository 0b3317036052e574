"""The paper's theorems, numerically: isometry, exact aggregation, rank-controlled variance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.bases import draw_bases
from trishul_ray.spectral.svt import svt

D_OUT, D_IN = 40, 36


def bases(init: str, heads: int, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch_rng(seed, "bases")
    return draw_bases(init, heads, rank, D_OUT, D_IN, generator=generator, dtype=torch.float64)


def nuclear_norm(x: Tensor) -> Tensor:
    """Compute ``||X||_*`` of every matrix of [..., p, q] (TRISHUL, eq. local_obj)."""
    return torch.linalg.svdvals(x.double()).sum(dim=-1)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_rng(seed, "cores"), dtype=torch.float64)


def ambient(b: Tensor, cores: Tensor, a: Tensor) -> Tensor:
    """Compute sum_i B_i H_i A_i [d_out, d_in] of cores [h, r, r]."""
    return b @ torch.block_diag(*cores) @ a


@pytest.mark.parametrize("init", ["gram_schmidt", "random_normal", "shared_subspace", "constant"])
@settings(deadline=None, max_examples=20)
@given(rank=st.integers(1, 12), seed=st.integers(0, 999))
def test_isometry_of_one_head(init, rank, seed):
    """Check eq. norm_equiv: ||B H A||_* = ||H||_* for orthonormal B and A."""
    b, a = bases(init, 1, rank, seed)
    core = gaussian(1, rank, rank, seed=seed)
    torch.testing.assert_close(nuclear_norm(ambient(b, core, a)), nuclear_norm(core[0]))


def test_no_isometry_without_orthonormal_bases():
    b, a = bases("rv_random_normal", 1, 12)
    core = gaussian(1, 12, 12)
    ratio = float(nuclear_norm(ambient(b, core, a)) / nuclear_norm(core[0]))
    assert abs(ratio - 1) > 0.02


@settings(deadline=None, max_examples=20)
@given(heads=st.integers(1, 4), rank=st.integers(1, 9), seed=st.integers(0, 999))
def test_nuclear_norms_of_gram_schmidt_heads_add_up(heads, rank, seed):
    b, a = bases("gram_schmidt", heads, rank, seed)
    cores = gaussian(heads, rank, rank, seed=seed)
    torch.testing.assert_close(nuclear_norm(ambient(b, cores, a)), nuclear_norm(cores).sum())


@pytest.mark.parametrize("init", ["random_normal", "shared_subspace", "constant"])
def test_nuclear_norms_of_overlapping_heads_are_subadditive(init):
    b, a = bases(init, 4, 9)
    cores = gaussian(4, 9, 9)
    assert float(nuclear_norm(ambient(b, cores, a))) < 0.99 * float(nuclear_norm(cores).sum())


@settings(deadline=None, max_examples=20)
@given(heads=st.integers(1, 4), tau=st.floats(0.1, 5), seed=st.integers(0, 999))
def test_prox_of_cores_equals_prox_of_update(heads, tau, seed):
    b, a = bases("gram_schmidt", heads, 9, seed)
    cores = gaussian(heads, 9, 9, seed=seed)
    u, s, vh = torch.linalg.svd(ambient(b, cores, a), full_matrices=False)
    whole = (u * (s - tau).clamp(min=0)) @ vh
    torch.testing.assert_close(ambient(b, svt(cores, tau), a), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "init", ["gram_schmidt", "random_normal", "rv_random_normal", "shared_subspace", "constant"]
)
@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=6),
    heads=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_theorem_1_aggregation_is_exact(init, sizes, heads, seed):
    """Check sum_c w_c sum_i B_i (s H)_{c,i} A_i = sum_i B_i (sum_c w_c (s H)_{c,i}) A_i."""
    b, a = bases(init, heads, 7, seed)
    m = len(sizes)
    weights = torch.tensor(sizes, dtype=torch.float64)
    weights /= weights.sum()
    scales = gaussian(m, heads, 1, 1, seed=seed + 1)
    uploads = scales * gaussian(m, heads, 7, 7, seed=seed)
    mean_of_updates = sum(
        w * ambient(b, upload, a) for w, upload in zip(weights, uploads, strict=True)
    )
    update_of_mean = ambient(b, torch.einsum("c,chij->hij", weights, uploads), a)
    torch.testing.assert_close(update_of_mean, mean_of_updates)


def test_averaging_lora_factors_is_not_exact():
    b, a = gaussian(3, D_OUT, 4), gaussian(3, 4, D_IN, seed=1)
    exact = (b @ a).mean(dim=0)
    assert float((exact - b.mean(dim=0) @ a.mean(dim=0)).norm()) > 0.5 * float(exact.norm())


@pytest.mark.parametrize("tau", [0.0, 2.0, 4.0, 6.0])
def test_theorem_2_retained_rank_bounds_variance(tau):
    """Check E ||mean_c (Z_c - E Z)||_F^2 <= s_max^2 rho M^2 / m, over a finite set of cores."""
    population, m, draws = 400, 4, 2000
    cores = svt(gaussian(population, 16, 16), tau)
    scales = 0.2 + 1.3 * torch.rand(
        population, 1, 1, generator=torch_rng(0, "scales"), dtype=torch.float64
    )
    uploads = scales * cores
    values = torch.linalg.svdvals(cores)
    rank = int((values > 1e-9).sum(dim=-1).max())
    bound = float(scales.max()) ** 2 * rank * float(values.max()) ** 2 / m

    centered = uploads - uploads.mean(dim=0)
    exact = float(centered.square().sum(dim=(-2, -1)).mean()) / m
    assert exact <= bound
    # The 1/m of the proof, by sampling cohorts of m independent clients.
    cohorts = torch.randint(population, (draws, m), generator=torch_rng(0, "cohorts"))
    sampled = float(centered[cohorts].mean(dim=1).square().sum(dim=(-2, -1)).mean())
    assert sampled == pytest.approx(exact, rel=0.05)


def test_theorem_2_shrinkage_lowers_rank_and_variance():
    cores = gaussian(200, 16, 16)
    ranks, variances = [], []
    for tau in (0.0, 2.0, 4.0, 6.0):
        shrunk = svt(cores, tau)
        ranks.append(int((torch.linalg.svdvals(shrunk) > 1e-9).sum(dim=-1).max()))
        variances.append(float((shrunk - shrunk.mean(dim=0)).square().sum()))
    assert ranks == sorted(ranks, reverse=True) and ranks[-1] < ranks[0]
    assert variances == sorted(variances, reverse=True) and variances[-1] < 0.5 * variances[0]
