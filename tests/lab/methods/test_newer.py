"""Identities of the newer methods: alternating, personal, residual and rotated factors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_runs import (
    Recording,
    assert_that_of_the_dequantized_backbone,
    run,
    same_run,
    server_of,
    weights_of,
)

from trishul_ray.adapters.lora import principal_factors
from trishul_ray.adapters.model import Trained
from trishul_ray.federation.checkpoint import arrays_digest, state_digest
from trishul_ray.lab.methods.fedrot import rotation_towards
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.tasks.sums import score_by_mix


def named(server, shared):
    return server.method.named_tensors(server.spec.layout, torch.from_numpy(shared.copy()))


def test_rolora_alternates_and_averages_exactly(executor, tmp_path):
    recording = Recording(executor("method=rolora", "federation.rounds=4"))
    server = server_of(recording, tmp_path)
    whole = server.spec.expected.lengths["shared"]
    sent = []
    for number in (1, 2, 3, 4):
        before = named(server, server.checkpoint.state.shared)
        server.step()
        after = named(server, server.checkpoint.state.shared)
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        factors = {name.rpartition(".")[2] for name in moved if "lora" in name}
        assert factors == {"lora_B" if number % 2 else "lora_A"}
        sent.append(server.checkpoint.records[-1].uploaded_parameters // 3)
        assert server.checkpoint.records[-1].diagnostics["aggregation_error"] < 1e-6
    assert sent[0] == sent[2] < whole and sent[1] == sent[3] < whole
    head = sum(e.numel for e in server.spec.layout.entries if e.kind == "classifier")
    assert sent[0] + sent[1] == whole + head
    fedit = run(executor("method=fedit"), tmp_path)
    assert fedit.checkpoint.records[-1].diagnostics["aggregation_error"] > 1e-3


def test_fedsa_shares_a_and_scores_personal_models(executor, tmp_path):
    options = ["method=fedsa", "federation.local_steps=30", "optimizer.lr=0.03"]
    inline = executor(*options, "evaluation.per_client=true")
    server = run(inline, tmp_path)
    wire, context = server.method.wire(server.spec.layout), inline.context
    assert not [name for name in wire if name.endswith("lora_B")]
    assert [name for name in wire if name.endswith("lora_A")]
    kept = server.checkpoint.client_states
    assert len(kept) >= 3 and len({arrays_digest(state) for state in kept.values()}) == len(kept)
    last = server.checkpoint.records[-1]
    # A client's update is not a function of its upload.
    assert "aggregation_error" not in last.diagnostics
    # By hand: put A, B and the head of each client into the vector, and score all test rows.
    broadcast = server.broadcast()
    scores = {}
    for client, state in kept.items():
        vector, tensors = context.initial.clone(), named(server, broadcast.shared)
        tensors |= {name: torch.from_numpy(value) for name, value in state.items()}
        for name, view in context.model.layout.views(vector).items():
            view.copy_(tensors[name])
        _, rows = context.scored["test"]
        batch = context.task.prepare_batch(context.test.batch(rows), "cpu", torch.float32)
        context.model.bind(Trained(vector))
        with torch.inference_mode():
            found = context.task.evaluate(context.task.predict(context.model, batch), batch)
        context.model.unbind()
        recall = context.task.metrics.recall([found])
        scores[client] = score_by_mix(recall, server.spec.client_mix)[client]
    own = {int(name): score for name, score in last.personal.items()}
    assert {client: own[client] for client in scores} == pytest.approx(scores)
    of_global = {int(name): score for name, score in last.per_client.items()}
    assert own != of_global
    for client in own.keys() - scores.keys():  # never sampled
        assert own[client] == of_global[client]
    assert last.scores["personal_mean"] == pytest.approx(np.mean(list(own.values())))
    # Scoring additional models does not change training.
    plain = run(executor(*options), tmp_path)
    assert state_digest(plain.checkpoint.state) == state_digest(server.checkpoint.state)
    assert "personal_mean" not in plain.checkpoint.records[-1].scores


SGD = ["optimizer.name=sgd", "optimizer.lr=0.5", "optimizer.momentum=0"]
ALONE = ["federation.clients=1", "federation.clients_per_round=1"]


@pytest.mark.parametrize("kind", ["lora", "multihead"])
def test_cohort_of_one_client_equals_its_upload(executor, tmp_path, kind):
    options = [f"method.adapter={kind}", *ALONE]
    local = run(executor("method=local", *options), tmp_path).checkpoint
    fedavg = run(executor("method=fedavg", *options), tmp_path).checkpoint
    np.testing.assert_array_equal(local.client_states[0]["vector"], fedavg.state.shared)


def test_local_training_keeps_the_global_model(executor, tmp_path):
    inline = executor("method=local", "evaluation.per_client=true", "federation.local_steps=30")
    checkpoint = run(inline, tmp_path).checkpoint
    first, *later = checkpoint.records
    for record in later:
        assert record.uploaded_parameters == record.downloaded_parameters == 0
        assert record.scores["accuracy"] == first.scores["accuracy"]
        assert record.scores["loss"] == first.scores["loss"]
        assert "aggregation_error" not in record.diagnostics
    last = later[-1]
    sampled = {str(client) for record in later for client in record.clients}
    for client, score in last.per_client.items():
        assert (last.personal[client] != score) == (client in sampled)
    assert last.scores["personal_mean"] > last.scores["per_client_mean"]
    kept = checkpoint.client_states
    assert {str(client) for client in kept} == sampled
    assert len({arrays_digest(state) for state in kept.values()}) == len(kept)


def pairs(server, shared):
    return {layer: (a.double(), b.double()) for layer, a, b in lora_pairs(named(server, shared))}


@pytest.mark.parametrize("alpha", ["4", "12"])
def test_fedsvd_keeps_the_global_model_and_turns_a(executor, tmp_path, alpha):
    options = [f"adapter.alpha={alpha}", "budget=4", "federation.rounds=3"]
    recording = Recording(executor("method=fedsvd", *options))
    server = server_of(recording, tmp_path)
    start = pairs(server, server.checkpoint.state.shared)
    whole = server.spec.expected.lengths["shared"]
    factor_A = sum(a.numel() for a, _ in start.values())
    for _ in range(3):
        before = pairs(server, server.checkpoint.state.shared)
        server.step()
        sent = [pairs(server, upload.arrays.shared) for upload in recording.uploads]
        record = server.checkpoint.records[-1]
        assert record.diagnostics["aggregation_error"] < 1e-6
        assert record.uploaded_parameters == 3 * (whole - factor_A)
        assert record.downloaded_parameters == 3 * whole
        for layer, (a, b) in pairs(server, server.checkpoint.state.shared).items():
            assert all(torch.equal(one[layer][0], before[layer][0]) for one in sent)
            exact = sum(one[layer][1] for one in sent) / len(sent) @ before[layer][0]
            torch.testing.assert_close(b @ a, exact, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(a @ a.mT, torch.eye(len(a)).double(), atol=1e-6, rtol=0)
            gram = b.mT @ b
            torch.testing.assert_close(gram, gram.diag().diag(), atol=1e-6, rtol=0)
    for layer, (a, _) in pairs(server, server.checkpoint.state.shared).items():
        assert not torch.allclose(a, start[layer][0])


def test_fedrot_of_strength_zero_is_fedit(executor, tmp_path):
    same_run(executor, tmp_path, ["method=fedrot", "method.strength=0"], ["method=fedit"])


@pytest.mark.parametrize("strength", ["0.5", "1"])
def test_fedrot_sends_the_trained_product_in_other_coordinates(executor, tmp_path, strength):
    """In round 2 the trained factors equal FedIT's, because round 1 is not rotated."""
    options = [f"method.strength={strength}"]
    found = []
    for words in (["method=fedrot", *options], ["method=fedit"]):
        recording = Recording(executor(*words))
        server = server_of(recording, tmp_path)
        server.step()
        server.step()
        found.append([pairs(server, upload.arrays.shared) for upload in recording.uploads])
    moved = 0.0
    for one, other in zip(*found, strict=True):
        for layer, (a, b) in one.items():
            trained_A, trained_B = other[layer]
            torch.testing.assert_close(b @ a, trained_B @ trained_A, atol=1e-6, rtol=1e-5)
            moved = max(moved, float((a - trained_A).abs().max()))
    assert moved > 1e-4


matrices = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(seed)).double()
)


@given(matrices, st.sampled_from([0.3, 0.9, 1.0]))
def test_alignment_rotation_is_orthogonal_and_optimal(drawn, strength):
    own, reference, other = drawn
    rotation = rotation_towards(own @ reference.mT, strength)
    identity = torch.eye(5).double()
    torch.testing.assert_close(rotation @ rotation.mT, identity, atol=1e-9, rtol=0)
    if strength < 1:
        assert torch.linalg.det(rotation) > 0
        return
    # No orthogonal matrix brings A closer, for any coordinates in which A was trained.
    best = (rotation.mT @ own - reference).norm()
    turn = torch.linalg.qr(other).Q
    assert best <= (turn.mT @ own - reference).norm() + 1e-9
    turned = turn.mT @ own
    again = rotation_towards(turned @ reference.mT, strength)
    torch.testing.assert_close(again.mT @ turned, rotation.mT @ own, atol=1e-8, rtol=0)


@pytest.mark.parametrize(("method", "changes"), [("fedrot", False), ("fedit", True)])
def test_client_trains_in_its_own_coordinates(method, changes, executor, tmp_path, monkeypatch):
    """Hard FedRot rotates them back, by A in odd rounds and by B in even rounds, from round 2."""
    inline = executor(f"method={method}", "federation.rounds=3", *SGD)
    found, upload = [], inline.context.method.upload

    def turned(run, steps):
        if run.round > 1:
            for _, a, b in lora_pairs(run.layout.views(run.vector)):
                noise = torch.randn(len(a), len(a), generator=run.generator)
                turn = torch.linalg.qr(noise).Q
                a.copy_(turn.mT @ a)
                b.copy_(b @ turn)
        return upload(run, steps)

    for one in (upload, turned):
        monkeypatch.setattr(inline.context.method, "upload", one)
        server, weights = server_of(inline, tmp_path), []
        while server.checkpoint.round < 3:
            server.step()
            weights.append(weights_of(inline, server.broadcast()))
        found.append(weights)
    for number, (plain, other) in enumerate(zip(*found, strict=True), 1):
        errors = [float((other[k] - v).norm() / v.norm()) for k, v in plain.items()]
        if changes and number > 1:
            assert min(errors) > 0.1
        else:
            assert max(errors) < 1e-3


@pytest.mark.parametrize("method", ["fedit", "fedrot", "rolora", "fedsvd", "fedex"])
def test_common_rotation_keeps_products_under_sgd(method, executor, tmp_path):
    found = []
    for turned in (False, True):
        inline = executor(f"method={method}", "federation.local_steps=4", *SGD)
        server = server_of(inline, tmp_path)
        state = server.checkpoint.state
        start = torch.from_numpy(state.shared.copy())
        for _, a, _b in lora_pairs(server.method.named_tensors(server.spec.layout, start)):
            turn = torch.linalg.qr(torch.randn(len(a), len(a), generator=torch_rng(0, "turn"))).Q
            if turned:  # B is zero
                a.copy_(turn @ a)
        server.checkpoint.state = replace(state, shared=start.numpy())
        server.step()
        server.step()
        found.append(weights_of(inline, server.broadcast()))
    for layer, update in found[0].items():
        assert update.abs().max() > 1e-5
        assert (found[1][layer] - update).norm() < 1e-3 * update.norm()


def test_fedplora_at_full_capacity_is_fedit(executor, tmp_path):
    same_run(executor, tmp_path, ["method=fedplora"], ["method=fedit"])


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_fedplora_averages_parts_over_their_trainers(executor, tmp_path, weighting):
    words = ["federation.compute=skewed-right", "optimizer.weight_decay=0.1", "budget=8"]
    words += [f"federation.weighting={weighting}", "partition.variant=per-label"]
    recording = Recording(executor("method=fedplora", *words, "federation.rounds=4"))
    server = server_of(recording, tmp_path)
    shares = set()
    for _ in range(4):
        before = pairs(server, server.checkpoint.state.shared)
        server.step()
        after, sent = pairs(server, server.checkpoint.state.shared), []
        for upload in recording.uploads:
            parts = torch.from_numpy(upload.arrays.extra["trained"]) > 0
            assert 1 <= parts.sum() <= 8
            weight = upload.rows if weighting == "size" else 1.0
            sent.append((weight, parts, pairs(server, upload.arrays.shared)))
        for layer, (a, b) in after.items():
            old_A, old_B = before[layer]
            for part in range(8):
                those = [(w, own[layer]) for w, parts, own in sent if parts[part]]
                shares.add(len(those))
                for _, parts, own in sent:
                    if not parts[part]:  # in the client's model, as sent
                        assert torch.equal(own[layer][0][part], old_A[part])
                        assert torch.equal(own[layer][1][:, part], old_B[:, part])
                if not those:
                    assert torch.equal(a[part], old_A[part])
                    assert torch.equal(b[:, part], old_B[:, part])
                    continue
                total = sum(w for w, _ in those)
                mean_A = sum(w * own[0][part] for w, own in those) / total
                mean_B = sum(w * own[1][:, part] for w, own in those) / total
                torch.testing.assert_close(a[part], mean_A, atol=1e-7, rtol=1e-5)
                torch.testing.assert_close(b[:, part], mean_B, atol=1e-7, rtol=1e-5)
    assert {0, 1} < shares  # Some parts have no owner, some one, some more.


def frozen_weights(server, inline):
    model = inline.context.model
    return {s.name: model.model.get_parameter(f"{s.name}.weight").double() for s in model.specs}


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (4, 4)])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_principal_factors_are_the_leading_singular_components(shape, rank):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, right = principal_factors(weight, rank)
    u, s, vt = torch.linalg.svd(weight.double(), full_matrices=False)
    torch.testing.assert_close(left @ right, u[:, :rank] * s[:rank] @ vt[:rank])
    assert left.shape == (shape[0], rank) and right.shape == (rank, shape[1])
    kept = min(rank, *shape)  # Both factors have the root of the singular values.
    for norms in (left.norm(dim=0), right.norm(dim=1)):
        torch.testing.assert_close(norms[:kept], s[:kept].sqrt())
        assert (norms[kept:] == 0).all()


@pytest.mark.parametrize("method", ["frlora", "fedsvd"])
def test_rank_may_exceed_matrix_width(method, executor, tmp_path):
    """The factors then have directions that stay zero."""
    inline = executor(f"method={method}", "adapter.rank=80", "federation.rounds=1")
    assert all(min(spec.d_out, spec.d_in) < 80 for spec in inline.context.model.specs)
    assert np.isfinite(run(inline, tmp_path).checkpoint.state.shared).all()


@pytest.mark.parametrize("exact", ["false", "true"])
def test_frlora_folds_what_principal_components_move_by(executor, tmp_path, exact):
    options = [f"method.exact={exact}", "adapter.alpha=8", "budget=4", "federation.rounds=3"]
    recording = Recording(executor("method=frlora", *options))
    server = server_of(recording, tmp_path)
    start = server.checkpoint.state
    frozen, first = frozen_weights(server, recording.inner), pairs(server, start.shared)
    scale, moved = 2.0, {}
    for layer, (a, b) in first.items():
        u, s, vt = torch.linalg.svd(frozen[layer])
        principal = u[:, :4] * s[:4] @ vt[:4]
        torch.testing.assert_close(scale * b @ a, principal, atol=1e-6, rtol=1e-6)
        taken = torch.from_numpy(start.base[layer]).double()
        torch.testing.assert_close(taken, -principal, atol=1e-6, rtol=1e-6)
        moved[layer] = torch.zeros_like(principal)
    for _ in range(3):
        server.step()
        sent = [pairs(server, upload.arrays.shared) for upload in recording.uploads]
        for layer, (a, b) in pairs(server, server.checkpoint.state.shared).items():
            assert torch.equal(a, first[layer][0]) and torch.equal(b, first[layer][1])
            factors = [one[layer] for one in sent]
            if exact == "true":
                new = sum(left @ right for right, left in factors) / len(factors)
            else:
                new = sum(f[1] for f in factors) @ sum(f[0] for f in factors) / len(factors) ** 2
            moved[layer] += scale * (new - b @ a)
    found = weights_of(recording.inner, server.broadcast())
    for layer, update in moved.items():
        assert update.abs().max() > 1e-3
        torch.testing.assert_close(found[layer], update, atol=2e-6, rtol=1e-5)
    error = server.checkpoint.records[-1].diagnostics["aggregation_error"]
    assert error < 1e-6 if exact == "true" else error > 1e-6


def test_exact_frlora_reads_the_factors_of_all(executor, tmp_path):
    plain = run(executor("method=frlora"), tmp_path)
    exact = run(executor("method=frlora", "method.exact=true"), tmp_path)
    whole = plain.spec.expected.lengths["shared"]
    head = plain.spec.parameters["head"]
    read = [[r.downloaded_parameters for r in s.checkpoint.records[1:]] for s in (plain, exact)]
    lora = whole - head
    new = len({*exact.draw(2)} - {*exact.draw(1)})  # These clients also download the first factors.
    dense = sum(base.size for base in exact.checkpoint.state.base.values())
    assert read == [
        [3 * whole, 3 * whole + new * lora],
        [3 * whole, 3 * (head + min(3 * lora, dense)) + new * lora],
    ]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_frlora_takes_principal_components_of_a_quantized_backbone(
    kind, small, inline_result, tmp_path
):
    words = ["method=frlora"]
    assert_that_of_the_dequantized_backbone(small, inline_result, tmp_path, kind, words)
