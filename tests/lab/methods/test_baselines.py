"""Identities of later baselines: corrected, sketched, single and personal factors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_runs import Recording, run, same_run, server_of, weights_of

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.check import Trial
from trishul_ray.federation.checkpoint import arrays_digest
from trishul_ray.federation.messages import TrainJob
from trishul_ray.federation.worker.local import train_client
from trishul_ray.lab.methods.florg import align
from trishul_ray.lab.methods.gram import GramFactor
from trishul_ray.methods.base.adapters import lora_pairs

SGD = ["optimizer.name=sgd", "optimizer.lr=0.5", "optimizer.momentum=0"]


def factors(server, shared):
    """By layer: A and B of a wire vector, in float64."""
    tensors = server.method.named_tensors(server.spec.layout, torch.from_numpy(shared.copy()))
    return {layer: (a.double(), b.double()) for layer, a, b in lora_pairs(tensors)}


def test_lorafair_without_its_correction_is_fedit(executor, tmp_path):
    same_run(executor, tmp_path, ["method=lorafair", "method.correct=false"], ["method=fedit"])


@pytest.mark.parametrize("lam", [1e-4, 0.01, 1.0])
def test_lorafair_adds_the_minimum_of_its_objective(lam, executor, tmp_path):
    """At D, half of the objective's gradient is ``lam D - (mean(B_c A_c) - (B + D) A) A^T = 0``."""
    recording = Recording(executor("method=lorafair", f"method.lam={lam}", "budget=4"))
    server = server_of(recording, tmp_path)
    server.step()
    server.step()
    sent = [factors(server, upload.arrays.shared) for upload in recording.uploads]
    for layer, (a, b) in factors(server, server.checkpoint.state.shared).items():
        mean_A, mean_B = (sum(own[layer][i] for own in sent) / len(sent) for i in (0, 1))
        product = sum(own[layer][1] @ own[layer][0] for own in sent) / len(sent)
        torch.testing.assert_close(a, mean_A, atol=1e-7, rtol=1e-6)
        added = b - mean_B
        assert added.norm() > 1e-5
        gradient = lam * added - (product - b @ a) @ a.mT
        assert gradient.norm() < 1e-5 * ((product - mean_B @ mean_A) @ a.mT).norm() + 1e-8
    fedit = run(executor("method=fedit", "budget=4"), tmp_path)
    own, plain = (s.checkpoint.records[1].diagnostics["aggregation_error"] for s in (server, fedit))
    assert own < plain or lam == 1.0


def test_federa_averages_factors_of_the_principal_components(executor, tmp_path):
    recording = Recording(executor("method=federa", "adapter.alpha=8", "budget=4"))
    server = server_of(recording, tmp_path)
    start, model = server.checkpoint.state, recording.inner.context.model
    first = factors(server, start.shared)
    for spec in model.specs:
        u, s, vt = torch.linalg.svd(model.model.get_parameter(f"{spec.name}.weight").double())
        a, b = first[spec.name]
        torch.testing.assert_close(2 * b @ a, u[:, :4] * s[:4] @ vt[:4], atol=1e-6, rtol=1e-6)
    server.step()
    server.step()
    sent = [factors(server, upload.arrays.shared) for upload in recording.uploads]
    for layer, found in weights_of(recording.inner, server.broadcast()).items():
        np.testing.assert_array_equal(server.checkpoint.state.base[layer], start.base[layer])
        mean_A, mean_B = (sum(own[layer][i] for own in sent) / len(sent) for i in (0, 1))
        a, b = first[layer]
        torch.testing.assert_close(found, 2 * (mean_B @ mean_A - b @ a), atol=2e-6, rtol=1e-5)


def test_fslora_with_the_full_sketch_is_fedit(executor, tmp_path):
    same_run(executor, tmp_path, ["method=fslora"], ["method=fedit"])


def test_fslora_adds_mean_changes_of_sketches(executor, tmp_path):
    words = ["method.ratio=0.5", "federation.compute=skewed-right", "optimizer.weight_decay=0.1"]
    recording = Recording(executor("method=fslora", *words, "budget=8", "federation.rounds=3"))
    server = server_of(recording, tmp_path)
    counts = set()
    for _ in range(3):
        before = factors(server, server.checkpoint.state.shared)
        server.step()
        sent = [factors(server, upload.arrays.shared) for upload in recording.uploads]
        for layer, (a, b) in factors(server, server.checkpoint.state.shared).items():
            old_A, old_B = before[layer]
            for own_A, own_B in (own[layer] for own in sent):
                moved = (own_B != old_B).any(0)
                counts.add(int(moved.sum()))
                assert torch.equal(own_A[~moved], old_A[~moved])
            mean_A, mean_B = (sum(own[layer][i] for own in sent) / len(sent) for i in (0, 1))
            torch.testing.assert_close(a, mean_A, atol=1e-7, rtol=1e-5)
            torch.testing.assert_close(b, mean_B, atol=1e-7, rtol=1e-5)
        record = server.checkpoint.records[-1]
        assert record.downloaded_parameters == record.uploaded_parameters
    assert counts <= {1, 2, 3, 4} and len(counts) > 1


def test_fslora_steps_by_the_chain_rule(executor, tmp_path):
    """FedIT from B S has the gradient G of B S: that of B is G S, and A's is the same."""
    words = [*SGD, "federation.local_steps=1", "budget=8"]
    sketched = executor("method=fslora", "method.ratio=0.25", *words)
    broadcast = run(sketched, tmp_path).broadcast()
    server, job = server_of(sketched, tmp_path), TrainJob(3, 1)
    upload, _ = train_client(sketched.context, broadcast, job)
    old, found = factors(server, broadcast.shared), factors(server, upload.arrays.shared)
    started = torch.from_numpy(broadcast.shared.copy())
    drawn = {}
    for layer, a, b in lora_pairs(server.method.named_tensors(server.spec.layout, started)):
        drawn[layer] = (found[layer][1] != old[layer][1]).any(0)
        assert drawn[layer].sum() == 2
        assert len(a) == 8
        b *= 4 * drawn[layer]
    plain = executor("method=fedit", *words).context
    upload, _ = train_client(plain, replace(broadcast, shared=started.numpy()), job)
    start, stepped = factors(server, started.numpy()), factors(server, upload.arrays.shared)
    for layer, those in drawn.items():
        change_A, change_B = (stepped[layer][i] - start[layer][i] for i in (0, 1))
        assert change_A.abs().max() > 1e-6
        torch.testing.assert_close(found[layer][0] - old[layer][0], change_A, atol=1e-6, rtol=1e-3)
        moved = 4 * change_B * those
        torch.testing.assert_close(found[layer][1] - old[layer][1], moved, atol=1e-6, rtol=1e-3)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


seeds = st.integers(0, 2**31)


@given(seeds, st.sampled_from([(3, 8), (5, 5), (6, 4)]), st.integers(1, 3))
def test_the_aligned_factor_is_nearest_to_the_last(seed, shape, clients):
    factor, last = normal(*shape, seed=seed), normal(*shape, seed=seed + 1)
    gram = factor.mT @ factor
    found = align(gram, last)
    torch.testing.assert_close(found.mT @ found, gram, atol=1e-9, rtol=0)
    turn = torch.linalg.qr(normal(shape[0], shape[0], seed=seed + 2)).Q
    assert (found - last).norm() <= (turn @ found - last).norm() + 1e-9
    torch.testing.assert_close(align(gram, turn @ last), turn @ found, atol=1e-7, rtol=0)
    # Of more clients Q may have a larger rank: no projection has a larger product with the last A.
    others = [normal(*shape, seed=seed + 3 + i) for i in range(clients)]
    whole = sum((other.mT @ other for other in others), gram) / (clients + 1)
    root = torch.linalg.cholesky(whole + 1e-12 * torch.eye(shape[1])).mT
    turn = torch.linalg.qr(normal(shape[1], shape[1], seed=seed + 2)).Q[: shape[0]]
    if len(turn) == shape[0]:
        assert (last * align(whole, last)).sum() >= (last * (turn @ root)).sum() - 1e-6


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_florg_aligns_the_mean_gram_matrix(weighting, executor, tmp_path):
    words = [f"federation.weighting={weighting}", "partition.variant=per-label"]
    recording = Recording(executor("method=florg", "adapter.alpha=6", "budget=2", *words))
    server, model = server_of(recording, tmp_path), recording.inner.context.model
    server.step()
    last = server.method.factors(
        server.spec.layout, torch.from_numpy(server.checkpoint.state.shared.copy())
    )
    server.step()
    sent = [
        server.method.factors(server.spec.layout, torch.from_numpy(upload.arrays.shared))
        for upload in recording.uploads
    ]
    weights = np.array([u.rows if weighting == "size" else 1.0 for u in recording.uploads])
    state = torch.from_numpy(server.checkpoint.state.shared)
    found, errors = weights_of(recording.inner, server.broadcast()), []
    for name, factor in server.method.factors(server.spec.layout, state).items():
        each = zip(weights / weights.sum(), sent, strict=True)
        gram = sum(w * own[name].double().mT @ own[name].double() for w, own in each)
        u, s, _ = torch.linalg.svd(gram)
        root = s.sqrt()[:, None] * u.mT
        left, _, right = torch.linalg.svd(last[name].double() @ root.mT, full_matrices=False)
        expected = left @ right @ root
        torch.testing.assert_close(factor.double(), expected, atol=1e-6, rtol=1e-5)
        assert (expected - last[name]).norm() > 1e-3
        errors.append(float((expected.mT @ expected - gram).norm() / gram.norm()))
        layer = name.removesuffix(".gram_A")
        frozen = {key: value.double() for key, value in model.constants(layer).items()}
        left, right = frozen["left"], frozen["right"]
        start = frozen["gram_A0"]
        moved = 3 * left @ (expected.mT @ expected - start.mT @ start) @ right
        torch.testing.assert_close(found[layer], moved, atol=2e-6, rtol=1e-4)
    record = server.checkpoint.records[-1]
    assert record.diagnostics["gram_error"] == pytest.approx(np.mean(errors), rel=1e-3)
    assert record.uploaded_parameters == 3 * server.spec.expected.lengths["shared"]
    numbers = sum(2 * min(spec.d_out, spec.d_in) for spec in model.specs)
    assert server.spec.parameters["adapter"] == numbers


@pytest.mark.parametrize("shape", [(6, 6), (6, 9), (9, 6)])
def test_the_adapter_of_one_factor_agrees_with_itself(shape):
    spec, adapter = LayerSpec("layer", "block", *shape), GramFactor(4, 0.5)
    trial = Trial.of(adapter, spec)
    trial.forward_is_the_merged_weight()
    trial.factors_are_the_update()
    constants, identity = trial.frozen.constants, torch.eye(6)
    torch.testing.assert_close(constants["left"].mT @ constants["left"], identity)
    torch.testing.assert_close(constants["right"] @ constants["right"].mT, identity)
    update = adapter.delta(trial.frozen.weight, constants, adapter.initial(spec, 0))
    assert update.abs().max() < 1e-7


def test_ditto_without_a_pull_is_local_training(executor, tmp_path):
    words = ["optimizer.schedule=cosine", "optimizer.clip_norm=0.5", "optimizer.weight_decay=0.1"]
    words += ["evaluation.per_client=true", "federation.rounds=3"]
    ditto = run(executor("method=ditto", "method.lam=0", *words), tmp_path).checkpoint
    local = run(executor("method=local", *words), tmp_path).checkpoint
    fedavg = run(executor("method=fedavg", *words), tmp_path).checkpoint
    np.testing.assert_array_equal(ditto.state.shared, fedavg.state.shared)
    assert ditto.client_states.keys() == local.client_states.keys()
    for client, state in ditto.client_states.items():
        assert arrays_digest(state) == arrays_digest(local.client_states[client])
    sampled = {str(client) for record in ditto.records for client in record.clients}
    for client, score in ditto.records[-1].personal.items():
        other = local if client in sampled else fedavg
        scores = other.records[-1].personal or other.records[-1].per_client
        assert score == scores[client]


@pytest.mark.parametrize("kind", ["lora", "multihead"])
def test_ditto_pulls_each_client_to_the_broadcast(kind, executor, tmp_path):
    """With one step per round, lam first matters in round 2: ``v2 = v2(0) - lr lam (v1 - w1)``."""
    kept = {}
    for lam in (0.0, 0.4):
        words = [*SGD, "federation.local_steps=1", "federation.clients=3", f"method.lam={lam}"]
        server = server_of(executor("method=ditto", f"method.adapter={kind}", *words), tmp_path)
        server.step()
        states, broadcast = {**server.checkpoint.client_states}, server.checkpoint.state.shared
        server.step()
        kept[lam] = server.checkpoint.client_states
    for client, state in states.items():
        away = state["vector"] - broadcast
        assert np.abs(away).max() > 1e-4
        moved = kept[0.4][client]["vector"] - kept[0.0][client]["vector"]
        np.testing.assert_allclose(moved, -0.5 * 0.4 * away, atol=1e-6)
