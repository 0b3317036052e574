"""FedRPCA: what robust PCA finds in the clients' updates, and how it counts in the mean."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_runs import Recording, run, same_run, server_of
from pydantic import ValidationError
from tolerances import between

from trishul_ray.lab.methods.fedrpca import ITERATIONS, TOLERANCE, shrunk, sparse_part
from trishul_ray.methods.base import method_class
from trishul_ray.methods.messages import ClientUpload, Round, State

seeds = st.integers(0, 2**32 - 1).map(lambda seed: torch.Generator().manual_seed(seed))


def uniform(generator, *shape):
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def by_svd(rows):
    """Divide M [m, P] as Candès et al. write it: by SVDs, with an undivided dual variable Y."""
    mu = rows.numel() / (4 * rows.abs().sum())
    lam = 1 / math.sqrt(max(rows.shape))
    sparse, dual = torch.zeros_like(rows), torch.zeros_like(rows)
    for _ in range(ITERATIONS):
        u, s, vt = torch.linalg.svd(rows - sparse + dual / mu, full_matrices=False)
        low = u * (s - 1 / mu).clamp(min=0) @ vt
        sparse = rows - low + dual / mu
        sparse = sparse.sign() * (sparse.abs() - lam / mu).clamp(min=0)
        dual = dual + mu * (rows - low - sparse)
        if (rows - low - sparse).norm() <= TOLERANCE * rows.norm():
            break
    return sparse


@settings(max_examples=25)
@given(seeds, st.sampled_from([(2, 30), (5, 200), (7, 7), (9, 4)]), st.sampled_from([0.0, 0.3, 1]))
def test_the_division_is_that_of_full_decompositions(generator, shape, noise):
    rows = normal(generator, shape[0], 1) * normal(generator, shape[1])
    rows = rows + noise * normal(generator, *shape)
    found = sparse_part(rows)
    torch.testing.assert_close(found, by_svd(rows), atol=1e-6 * float(rows.norm()), rtol=0)
    threshold = float(uniform(generator, 1)) * float(torch.linalg.matrix_norm(rows, 2))
    u, s, vt = torch.linalg.svd(rows, full_matrices=False)
    expected = u * (s - threshold).clamp(min=0) @ vt
    torch.testing.assert_close(shrunk(rows, threshold), expected, atol=1e-9, rtol=1e-9)


@settings(max_examples=25)
@given(seeds)
def test_few_large_entries_are_told_from_what_is_common(generator):
    clients, size, each = 20, 80, 2
    spread = (0.5 + uniform(generator, size)) * (uniform(generator, size) - 0.5).sign()
    common = (0.8 + 0.4 * uniform(generator, clients, 1)) * spread
    own = torch.zeros(clients, size, dtype=torch.float64)
    places = torch.randperm(size, generator=generator)[: clients * each].view(clients, each)
    signs = (uniform(generator, clients, each) - 0.5).sign()
    own.scatter_(1, places, signs * (3 + 7 * uniform(generator, clients, each)))
    found = sparse_part(common + own)
    torch.testing.assert_close(found, own, atol=1e-5, rtol=0)
    values = torch.linalg.svdvals(common + own - found)
    assert values[1] < 1e-5 * values[0]
    order = torch.randperm(clients, generator=generator)
    torch.testing.assert_close(sparse_part((common + own)[order]), found[order], atol=1e-5, rtol=0)


@given(seeds, st.integers(2, 8), st.sampled_from([0.9, 1.1]))
def test_equal_updates_have_a_sparse_part_only_where_entries_are_large(generator, clients, largest):
    """S is zero where ``max |v| <= sqrt(m / P) ||v||``; the first entry is 10 % off that."""
    size = 100
    update = 0.99 + 0.02 * uniform(generator, size)
    rest = update[1:].norm() ** 2
    bound = largest**2 * clients / size
    update[0] = math.sqrt(bound / (1 - bound) * rest)
    update *= (uniform(generator, size) - 0.5).sign()
    found = sparse_part(update.expand(clients, size).contiguous())
    assert (found[:, 0] != 0).all() if largest > 1 else (found == 0).all()


def test_updates_of_zero_have_no_sparse_part():
    assert (sparse_part(torch.zeros(3, 5, dtype=torch.float64)) == 0).all()


class Moved(Recording):
    """An executor in which every client moves all entries by the same amount, up or down."""

    def run(self, broadcast, jobs, *more):
        outcome = super().run(broadcast, jobs, *more)
        signs = np.where(np.arange(broadcast.shared.size) % 3, 1, -1).astype(np.float32)
        same = State(broadcast.shared + np.float32(0.01) * signs)
        outcome.uploads = [replace(upload, arrays=same) for upload in outcome.uploads]
        return outcome


@pytest.mark.parametrize("beta", ["2", "0", "adaptive"])
def test_equal_clients_are_averaged_whatever_beta_is(executor, tmp_path, beta):
    one = executor("method=fedrpca", f"method.beta={beta}")
    found = [run(Moved(inline), tmp_path) for inline in (one, executor("method=fedit"))]
    np.testing.assert_array_equal(*(server.checkpoint.state.shared for server in found))
    assert found[0].checkpoint.records[-1].diagnostics["sparse_share"] == 0


def test_fedrpca_of_beta_one_is_fedit(executor, tmp_path):
    same_run(executor, tmp_path, ["method=fedrpca", "method.beta=1"], ["method=fedit"])


@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("beta", ["2", "0", "adaptive"])
def test_the_mean_is_moved_by_the_sparse_part(executor, tmp_path, beta, weighting):
    words = [f"method.beta={beta}", f"federation.weighting={weighting}"]
    recording = Recording(executor("method=fedrpca", *words, "partition.variant=per-label"))
    server, said = server_of(recording, tmp_path), ""
    for _ in range(2):
        before = server.checkpoint.state.shared
        said += " ".join(server.step().events)
        rows = [upload.rows if weighting == "size" else 1 for upload in recording.uploads]
        weights = torch.tensor(rows, dtype=torch.float64) / sum(rows)
        old, new, *sent = (
            server.method.named_tensors(server.blueprint.layout, torch.from_numpy(shared))
            for shared in (
                before,
                server.checkpoint.state.shared,
                *(upload.arrays.shared for upload in recording.uploads),
            )
        )
        sparse_square = square = 0.0
        for name, value in new.items():
            moved = torch.stack([one[name].double() - old[name] for one in sent])
            mean, expected = torch.tensordot(weights, moved, 1), old[name].double()
            expected = expected + mean
            if "lora" in name:
                found = by_svd(moved.flatten(1)).view_as(moved)
                sparse = torch.tensordot(weights, found, 1)
                sparse_square += float(sparse.norm()) ** 2
                square += float(mean.norm()) ** 2
                factor = mean.norm() / sparse.norm() if beta == "adaptive" else float(beta)
                expected = expected + (factor - 1) * sparse
            sizes = max(float(one[name].abs().max()) for one in [new, *sent])
            # Difference of S that the two solvers' rounding may make.
            bound = between(4, sizes) + 1e-5 * float(moved.norm())
            torch.testing.assert_close(value.double(), expected, atol=bound, rtol=0)
        share = server.checkpoint.records[-1].diagnostics["sparse_share"]
        assert share == pytest.approx(math.sqrt(sparse_square / square), rel=1e-4)
        assert 0.01 < share < 1
    first = server.checkpoint.records[1].diagnostics["sparse_share"]
    warned = re.search(r"warning: sparse_share is (0\.\d\d) in round 1: method.beta=(\d)", said)
    assert (warned is not None) == (first >= 0.5 and beta == "2")
    assert not warned or warned.groups() == (f"{first:.2f}", beta)


def test_the_order_of_clients_does_not_matter(executor, tmp_path):
    recording = Recording(executor("method=fedrpca", "federation.rounds=1"))
    server = server_of(recording, tmp_path)
    before = State(torch.from_numpy(server.checkpoint.state.shared.copy()))
    server.step()
    layout, found = server.blueprint.layout, []
    mean = State(sum(torch.from_numpy(u.arrays.shared) for u in recording.uploads) / 3)
    uploads = [
        ClientUpload(u.client, 1.0 + u.client, State(torch.from_numpy(u.arrays.shared)))
        for u in recording.uploads
    ]
    for order in (uploads, uploads[::-1], uploads[1:] + uploads[:1]):
        round_ = Round(1, 3, 4, torch.ones(len(layout.entries)).bool(), tuple(order))
        found.append(server.method.aggregate(before, mean, round_, layout).shared)
    assert (found[0] - mean.shared).abs().max() > 1e-4
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("beta", [-1, math.nan, "often"])
def test_beta_is_a_weight_or_a_rule(beta):
    with pytest.raises(ValidationError, match="beta"):
        method_class("fedrpca").Config(beta=beta)
