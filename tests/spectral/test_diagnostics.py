"""Diagnostics against their definitions, and their conventions in edge cases."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trishul_ray.errors import InputError
from trishul_ray.runtime.device import set_threads_of_thread
from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.diagnostics import (
    client_matrices,
    diagnose,
    dominant_direction_similarity,
    effective_rank,
    left_spectrum,
    principal_angle_similarity,
    significant,
    spectral_entropy,
    stack_spectra,
    variance_and_signal,
)
from trishul_ray.spectral.svt import PART, singular_values

PAIRWISE = {
    "principal_angle_similarity",
    "inconsistency_index",
    "dominant_similarity",
    "client_cosine",
}


def uploads(m: int = 3, n: int = 4, r: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(m, n, r, r, generator=torch_rng(seed, "test"))


def low_rank(m: int, n: int, r: int, rank: int, seed: int = 0) -> Tensor:
    generator = torch_rng(seed, "low rank")
    return torch.randn(m, n, r, rank, generator=generator) @ torch.randn(
        m, n, rank, r, generator=generator
    )


def similarity(z: Tensor, top_k: int) -> Tensor:
    return principal_angle_similarity(*left_spectrum(z), top_k)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20))
def test_entropy_and_effective_rank_by_definition(values):
    entropy = float(spectral_entropy(torch.tensor(values)))
    total = np.float32(values).astype(float).sum()
    shares = [float(np.float32(v)) / total for v in values if np.float32(v) > 0] if total else []
    assert entropy == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-9)
    expected = math.exp(entropy) if shares else 0.0
    assert float(effective_rank(torch.tensor(values))) == pytest.approx(expected)


def test_entropy_of_flat_one_direction_and_zero_spectra():
    values = torch.tensor([[2.0, 2.0, 2.0, 2.0], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(
        spectral_entropy(values), torch.tensor([math.log(4), 0.0, 0.0]).double()
    )
    torch.testing.assert_close(effective_rank(values), torch.tensor([4.0, 1.0, 0.0]).double())


def test_left_spectrum_equals_svd():
    z = uploads(2, 3, 12)
    vectors, values = left_spectrum(z)
    u, s, _ = torch.linalg.svd(z.double())
    torch.testing.assert_close(values, s, atol=1e-7, rtol=0)
    overlap = (vectors.mT @ u).abs()
    torch.testing.assert_close(
        overlap, torch.eye(12).double().expand_as(overlap), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("r", [7, 22])
def test_stack_shared_by_threads_keeps_bits(r):
    z = uploads(3, PART + 3, r)
    grams = z.double() @ z.double().mT
    values, vectors = torch.linalg.eigh(grams)  # at once
    with ThreadPoolExecutor(3, initializer=set_threads_of_thread, initargs=(1,)) as pool:
        for found in (left_spectrum(z), left_spectrum(z, pool)):
            assert torch.equal(found[0], vectors.flip(-1))
            assert torch.equal(found[1], values.clamp(min=0.0).sqrt().flip(-1))
    stack = z.flatten(0, 1)
    assert torch.equal(singular_values(stack, threads=3), singular_values(stack))


@settings(deadline=None, max_examples=30)
@given(r=st.integers(2, 12), k=st.integers(1, 12), seed=st.integers(0, 999))
def test_principal_angles_equal_scipy(r, k, seed):
    k = min(k, r)
    z = uploads(3, 2, r, seed)
    result = similarity(z, k)
    u = torch.linalg.svd(z.double())[0][..., :k].numpy()
    for head in range(2):
        for first in range(3):
            for second in range(3):
                angles = scipy.linalg.subspace_angles(u[first, head], u[second, head])
                expected = (np.cos(angles) ** 2).mean()
                assert float(result[head, first, second]) == pytest.approx(expected, abs=1e-6)


def test_similarity_of_equal_orthogonal_and_scaled_cores():
    z = torch.zeros(3, 1, 6, 6)
    z[0, 0, 0, 0], z[0, 0, 1, 1] = 2.0, 1.0
    z[1, 0, 2, 0], z[1, 0, 3, 1] = 2.0, 1.0  # other left directions, same right ones
    z[2] = -5.0 * z[0]
    torch.testing.assert_close(
        similarity(z, 2)[0], torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 0, 1]]).double()
    )
    dominant = dominant_direction_similarity(*left_spectrum(z))[0]
    torch.testing.assert_close(dominant, torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 0, 1]]).double())


def test_dominant_similarity_is_cosine_of_first_vectors():
    z = uploads(2, 5, 8)
    u = torch.linalg.svd(z.double())[0][..., 0]  # [2, 5, 8]
    expected = (u[0] * u[1]).sum(dim=-1).abs()
    result = dominant_direction_similarity(*left_spectrum(z))[:, 0, 1]
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


def test_missing_directions_are_not_compared():
    z = torch.zeros(2, 1, 6, 6)
    z[0, 0, 0, 0] = 1.0  # rank 1, inside the span of the other
    z[1, 0] = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0, 0, 0]))
    assert float(similarity(z, 3)[0, 0, 1]) == pytest.approx(1.0)
    z[0] = 0.0
    assert math.isnan(float(similarity(z, 3)[0, 0, 1]))


def test_unrelated_subspaces_have_similarity_k_over_r():
    result = similarity(uploads(2, 400, 12), 3)[:, 0, 1].mean()
    assert float(result) == pytest.approx(3 / 12, abs=0.02)


def test_significant_ignores_float32_rounding():
    z = low_rank(2, 3, 20, 5)
    _, values = left_spectrum(z)
    assert bool((significant(values).sum(dim=-1) == 5).all())
    assert not bool(significant(torch.zeros(4)).any())


def aggregation_variance(z: Tensor, weights: Tensor) -> Tensor:
    return variance_and_signal(z, weights)[0]


def test_variance_of_equal_weights_is_numpys():
    z = uploads(5, 3, 4)
    expected = z.double().numpy().reshape(5, 3, -1).var(axis=0).sum(axis=-1)
    np.testing.assert_allclose(aggregation_variance(z, torch.ones(5)).numpy(), expected)


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(0, 4), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_a_weight_of_k_is_k_equal_clients(sizes, seed):
    z = uploads(len(sizes), 2, 3, seed)
    if sum(sizes) == 0:
        assert bool((aggregation_variance(z, torch.tensor(sizes)) == 0).all())
        return
    repeated = z.repeat_interleave(torch.tensor(sizes), dim=0)
    torch.testing.assert_close(
        aggregation_variance(z, torch.tensor(sizes)),
        aggregation_variance(repeated, torch.ones(sum(sizes))),
    )


def test_diagnose_by_hand():
    z = torch.zeros(2, 2, 4, 4)
    z[0, 0] = z[1, 0] = torch.diag(torch.tensor([1.0, 1.0, 0, 0]))
    z[0, 1] = torch.diag(torch.tensor([3.0, 0, 0, 0]))
    z[1, 1] = torch.diag(torch.tensor([-3.0, 0, 0, 0]))
    result = diagnose(z, torch.tensor([1.0, 1.0]), top_k=2)
    assert result == pytest.approx(
        {
            "spectral_entropy": math.log(2) / 2,
            "effective_rank": 1.5,
            "top_singular_value": 2.0,
            "zeroed": 10 / 16,
            "aggregation_variance": (0 + 9) / 2,
            "relative_variance": (0 + 9) / (2 + 0),
            "principal_angle_similarity": 1.0,
            "inconsistency_index": 0.0,
            # u_1 is any unit vector of the first head's plane, so the two are equal by
            # construction.
            "dominant_similarity": 1.0,
            "client_cosine": 0.0,
        }
    )
    assert all(type(value) is float for value in result.values())


def test_diagnose_is_the_mean_of_the_parts():
    z, weights = uploads(3, 4, 6), torch.tensor([1.0, 2.0, 3.0])
    result = diagnose(z, weights, top_k=3)
    s = torch.linalg.svdvals(z.double())
    assert result["spectral_entropy"] == pytest.approx(float(spectral_entropy(s).mean()))
    assert result["effective_rank"] == pytest.approx(float(effective_rank(s).mean()))
    assert result["zeroed"] == 0.0
    assert result["aggregation_variance"] == pytest.approx(
        float(aggregation_variance(z, weights).mean())
    )
    upper = torch.ones(3, 3).triu(1).bool()
    assert result["principal_angle_similarity"] == pytest.approx(
        float(similarity(z, 3)[:, upper].mean())
    )
    a, b, c = z.double().flatten(2).unbind()
    cosines = [torch.cosine_similarity(x, y, dim=-1) for x, y in ((a, b), (a, c), (b, c))]
    assert result["client_cosine"] == pytest.approx(float(torch.stack(cosines).mean()))


def test_diagnostics_are_scale_invariant():
    z, weights = uploads(), torch.tensor([1.0, 2.0, 3.0])
    one = diagnose(z, weights, 2)
    two = diagnose(z * 2.0**-30, weights * 7, 2)
    two["top_singular_value"] *= 2.0**30
    two["aggregation_variance"] *= 2.0**60
    assert two == pytest.approx(one)


def test_untrained_heads_do_not_count():
    z, weights = uploads(3, 4, 6), torch.tensor([1.0, 2.0, 3.0])
    active = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]]).bool()
    result = diagnose(z, weights, 3, active)
    garbage = torch.where(active[..., None, None], z, torch.tensor(math.nan))
    assert diagnose(garbage, weights, 3, active) == result
    trained = torch.linalg.svdvals(z.double())[active]
    assert result["spectral_entropy"] == pytest.approx(float(spectral_entropy(trained).mean()))
    heads = [(0, [0, 1, 2]), (1, [0, 2]), (2, [0, 1])]
    variances = [aggregation_variance(z[c][:, [i]], weights[c]) for i, c in heads]
    assert result["aggregation_variance"] == pytest.approx(float(torch.cat(variances).mean()))
    pairs = [similarity(z[c][:, [i]], 3)[0] for i, c in heads]
    values = torch.cat([p[torch.ones_like(p).triu(1).bool()] for p in pairs])
    assert result["principal_angle_similarity"] == pytest.approx(float(values.mean()))


def test_one_client_and_zero_cores_have_no_pairs():
    assert not PAIRWISE & diagnose(uploads(1), torch.ones(1), 2).keys()
    zero = diagnose(torch.zeros(3, 2, 4, 4), torch.ones(3), 2)
    assert zero == {
        "spectral_entropy": 0.0,
        "effective_rank": 0.0,
        "top_singular_value": 0.0,
        "zeroed": 1.0,
        "aggregation_variance": 0.0,
    }


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(1, 4),
    n=st.integers(1, 3),
    r=st.integers(1, 4),
    seed=st.integers(0, 99),
    limited=st.booleans(),
)
def test_client_matrices_by_definition(m, n, r, seed, limited):
    z = uploads(m, n, r, seed)
    drawn = torch.rand(m, n, generator=torch_rng(seed, "active")) < 0.6
    active = drawn if limited else torch.ones(m, n).bool()
    garbage = torch.where(active[..., None, None], z, torch.tensor(7.0))
    result = client_matrices(garbage, 2, active if limited else None)
    cores = z.double().numpy()
    for a in range(m):
        for b in range(m):
            common = [i for i in range(n) if active[a, i] and active[b, i]]
            inner = 0.0
            cosines, angles = [], []
            for i in common:
                inner += (cores[a, i] * cores[b, i]).sum() / n
                norms = np.linalg.norm(cores[a, i]) * np.linalg.norm(cores[b, i])
                cosines.append((cores[a, i] * cores[b, i]).sum() / norms)
                bases = [np.linalg.svd(cores[c, i])[0][:, :2] for c in (a, b)]
                angles.append(np.mean(np.cos(scipy.linalg.subspace_angles(*bases)) ** 2))
            assert float(result["inner_products"][a, b]) == pytest.approx(inner, abs=1e-9)
            expected = np.mean(cosines) if common else math.nan
            assert float(result["cosine"][a, b]) == pytest.approx(expected, abs=1e-9, nan_ok=True)
            expected = np.mean(angles) if common else math.nan
            same = pytest.approx(expected, abs=1e-6, nan_ok=True)
            assert float(result["principal_angle_similarity"][a, b]) == same


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(1, 4), n=st.integers(1, 3), seed=st.integers(0, 99), scale=st.floats(1e-3, 1e3)
)
def test_relative_variance_is_noise_over_signal(m, n, seed, scale):
    z = uploads(m, n, 3, seed)
    weights = torch.rand(m, generator=torch_rng(seed, "weights")) + 0.1
    cores, w = z.double().numpy(), (weights.double() / weights.double().sum()).numpy()
    mean = np.einsum("c,cnij->nij", w, cores)
    noise = sum(w[c] * ((cores[c] - mean) ** 2).sum() for c in range(m))
    relative = diagnose(z, weights, 1)["relative_variance"]
    assert relative == pytest.approx(noise / (mean**2).sum(), rel=1e-6)
    scaled = diagnose(z.double() * scale, weights, 1)["relative_variance"]
    assert scaled == pytest.approx(relative, rel=1e-6, abs=1e-12)


def test_zero_mean_has_no_relative_variance():
    z = torch.stack([torch.eye(2), -torch.eye(2)]).unsqueeze(1)
    assert "relative_variance" not in diagnose(z, torch.ones(2), 1)


def test_the_inconsistency_index_is_one_minus_alignment():
    same = uploads(1).expand(3, -1, -1, -1)
    assert diagnose(same, torch.ones(3), 2)["inconsistency_index"] == pytest.approx(0.0, abs=1e-9)
    result = diagnose(uploads(3, 2, 40), torch.ones(3), 4)
    assert result["inconsistency_index"] == pytest.approx(0.9, abs=0.05)  # unrelated: 1 - k/r


def test_spectra_of_several_ranks_are_padded():
    stacked = stack_spectra([torch.ones(2, 3), torch.full((1, 1), 2.0)])
    expected = torch.tensor([[1.0, 1, 1], [1, 1, 1], [2, math.nan, math.nan]])
    torch.testing.assert_close(stacked, expected, equal_nan=True)


def test_no_active_cores_give_no_diagnostics():
    assert diagnose(torch.zeros(2, 0, 3, 3), torch.ones(2), 2) == {}
    assert diagnose(uploads(), torch.ones(3), 2, torch.zeros(3, 4).bool()) == {}


def test_cores_that_are_not_finite_are_rejected():
    with pytest.raises(InputError, match="NaN or infinite"):
        diagnose(uploads() * math.inf, torch.ones(3), 2)
