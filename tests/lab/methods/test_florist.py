"""FLoRIST: the decomposition of stacked factors, the selected rank, and the components sent."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_runs import (
    Recording,
    assert_alpha_scales_the_update,
    errors_of_the_mean,
    run,
    server_of,
    weights_of,
)

from trishul_ray.adapters.model import Trained
from trishul_ray.data.sampling import capacities
from trishul_ray.federation.messages import to_tensor
from trishul_ray.lab.methods.florist import kept_rank, product_svd
from trishul_ray.methods.base.adapters import lora_pairs

seeds = st.integers(0, 2**32 - 1).map(lambda seed: torch.Generator().manual_seed(seed))
thresholds = st.lists(st.floats(0.05, 1), min_size=1, max_size=4).map(sorted)


@settings(max_examples=25)
@given(seeds, st.sampled_from([(9, 7), (6, 12), (3, 40)]), st.integers(1, 4), thresholds)
def test_leading_part_equals_dense_product(generator, shape, clients, thresholds):
    weights = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.1
    ranks = [int(torch.randint(1, 5, (), generator=generator)) for _ in range(clients)]
    a = [torch.randn(r, shape[1], generator=generator, dtype=torch.float64) for r in ranks]
    b = [torch.randn(shape[0], r, generator=generator, dtype=torch.float64) for r in ranks]
    dense = sum(w * left @ right for w, left, right in zip(weights, b, a, strict=True))
    stack = torch.cat([w * right for w, right in zip(weights, a, strict=True)])
    u, s, vt = product_svd(torch.cat(b, dim=1), stack)
    U, S, Vt = torch.linalg.svd(dense, full_matrices=False)
    torch.testing.assert_close(s, S[: len(s)], atol=1e-10, rtol=1e-10)
    assert S[len(s) :].sum() < 1e-10 * S.sum()
    share = S.square().cumsum(0) / S.square().sum()
    kept = [kept_rank(s, threshold) for threshold in thresholds]
    assert kept == sorted(kept)
    for p, threshold in zip(kept, thresholds, strict=True):
        assert share[p - 1] >= threshold - 1e-12
        assert p == 1 or share[p - 2] < threshold + 1e-12
        found = u[:, :p] * s[:p] @ vt[:p]
        torch.testing.assert_close(found, (U[:, :p] * S[:p]) @ Vt[:p], atol=1e-8, rtol=1e-8)
    whole = kept_rank(s, 1)  # The omitted part is below the rounding of the sum of squares.
    torch.testing.assert_close(u[:, :whole] * s[:whole] @ vt[:whole], dense, atol=1e-6, rtol=0)


def components(server, shared):
    """Return the kept components [r] bool per matrix, and the entries of one component."""
    tensors = server.method.named_tensors(server.spec.layout, torch.from_numpy(shared))
    return [((a != 0).any(1), a.shape[1] + len(b)) for _, a, b in lora_pairs(tensors)]


@pytest.mark.parametrize("compute", ["full", "uniform"])
def test_clients_train_and_send_their_active_part(executor, tmp_path, compute):
    words = ["federation.weighting=size", "partition.variant=per-label", "budget=8"]
    recording = Recording(executor("method=florist", f"federation.compute={compute}", *words))
    server, context = server_of(recording, tmp_path), recording.inner.context
    fed, head = context.settings.federation, server.spec.parameters["head"]
    shares = capacities(fed.compute, context.settings.seed, fed.clients, fed.compute_shares)
    for number in (1, 2):
        cohort, before = server.draw(number), components(server, server.broadcast().shared)
        rank = len(before[0][0])
        rooms = [max(1, int(shares[client] * rank)) for client in cohort]
        server.step()
        record, sent = server.checkpoint.records[-1], recording.broadcast.map(to_tensor)
        counted = [head + sum(int(live[:r].sum()) * n for live, n in before) for r in rooms]
        assert record.downloaded_parameters == record.uploaded_parameters == sum(counted)
        rows = np.array([upload.rows for upload in recording.uploads], dtype=float)
        clients = []
        for upload, room in zip(recording.uploads, rooms, strict=True):
            vector, shared = context.initial.clone(), torch.from_numpy(upload.arrays.shared)
            server.method.unpack(context.model.layout, vector, shared)
            clients.append(context.model.deltas(Trained(vector, sent.base, sent.constants)))
            moved = components(server, upload.arrays.shared)
            for (live, _), (offered, _) in zip(moved, before, strict=True):
                assert torch.equal(live, offered & (torch.arange(rank) < room))
        kept, found = [], weights_of(recording.inner, server.broadcast())
        after = components(server, server.broadcast().shared)
        for (live, _), (layer, product) in zip(after, found.items(), strict=True):
            mean = sum(w * c[layer] for w, c in zip(rows / rows.sum(), clients, strict=True))
            u, s, vt = torch.linalg.svd(mean.double(), full_matrices=False)
            kept.append(min(kept_rank(s, 0.9), rank))
            assert torch.equal(live, torch.arange(rank) < kept[-1])
            expected = (u[:, : kept[-1]] * s[: kept[-1]]) @ vt[: kept[-1]]
            torch.testing.assert_close(product.double(), expected, atol=1e-6, rtol=1e-4)
        assert record.diagnostics["kept_rank"] == pytest.approx(np.mean(kept))
        assert min(kept) < rank


def test_rank_too_small_for_threshold_is_reported(executor, tmp_path):
    words = ["adapter.rank=1", "method.threshold=1", "federation.rounds=1"]
    server = server_of(executor("method=florist", *words), tmp_path)
    said = " ".join(server.step().events)
    kept = server.checkpoint.records[-1].diagnostics["kept_energy"]
    assert kept < 1
    assert f"warning: kept_energy is {kept:.3g} in round 1, below method.threshold=1" in said


def test_zero_uploads_leave_a_trainable_model(executor, tmp_path):
    server = run(executor("method=florist", "optimizer.lr=1e-45"), tmp_path)
    assert all(live.all() for live, _ in components(server, server.checkpoint.state.shared))


@pytest.mark.parametrize("weighting", ["uniform", "size", "tokens"])
def test_threshold_one_keeps_the_whole_mean(executor, tmp_path, weighting):
    whole = ["method.threshold=1", "adapter.rank=128"]  # no matrix exceeds this rank
    assert max(errors_of_the_mean(executor, tmp_path, "florist", weighting, whole)) < 1e-6


def test_alpha_scales_the_update(executor, tmp_path):
    assert_alpha_scales_the_update(executor, tmp_path, "florist", "method.threshold=1")


def test_rank_may_exceed_matrix_width(executor, tmp_path):
    server = run(executor("method=florist", "adapter.rank=80", "federation.rounds=1"), tmp_path)
    assert np.isfinite(server.checkpoint.state.shared).all()
