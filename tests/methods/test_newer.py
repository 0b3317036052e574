"""Identities of the newer methods: alternating, personal, residual and rotated factors."""

import numpy as np
import pytest
import torch
from method_runs import Recording, run, server_of

from trishul_ray.adapters.model import Trained
from trishul_ray.federation.checkpoint import arrays_digest, state_digest
from trishul_ray.tasks.sums import score_by_mix


def named(server, shared):
    return server.method.named_tensors(server.blueprint.layout, torch.from_numpy(shared.copy()))


def test_rolora_alternates_and_averages_exactly(executor, tmp_path):
    recording = Recording(executor("method=rolora", "federation.rounds=4"))
    server = server_of(recording, tmp_path)
    whole = server.blueprint.expected.lengths["shared"]
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
    head = sum(e.numel for e in server.blueprint.layout.entries if e.kind == "classifier")
    assert sent[0] + sent[1] == whole + head
    fedit = run(executor("method=fedit"), tmp_path)
    assert fedit.checkpoint.records[-1].diagnostics["aggregation_error"] > 1e-3


def test_fedsa_shares_a_and_scores_each_clients_own_model(executor, tmp_path):
    options = ["method=fedsa", "federation.local_steps=30", "optimizer.lr=0.03"]
    inline = executor(*options, "evaluation.per_client=true")
    server = run(inline, tmp_path)
    wire, bench = server.method.wire(server.blueprint.layout), inline.bench
    assert not [name for name in wire if name.endswith("lora_B")]
    assert [name for name in wire if name.endswith("lora_A")]
    kept = server.checkpoint.client_states
    assert len(kept) >= 3 and len({arrays_digest(state) for state in kept.values()}) == len(kept)
    last = server.checkpoint.records[-1]
    assert (
        "aggregation_error" not in last.diagnostics
    )  # a client's update is no function of what it sends
    # By hand: put A, B and the head of each client into the vector, and score all test rows.
    broadcast = server.broadcast()
    scores = {}
    for client, state in kept.items():
        vector = bench.initial.clone()
        tensors = named(server, broadcast.shared) | {
            k: torch.from_numpy(v) for k, v in state.items()
        }
        for name, view in bench.model.layout.views(vector).items():
            view.copy_(tensors[name])
        _, rows = bench.scored["test"]
        batch = bench.task.prepare_batch(bench.test.batch(rows), "cpu", torch.float32)
        bench.model.bind(Trained(vector))
        with torch.inference_mode():
            found = bench.task.evaluate(bench.task.predict(bench.model, batch), batch)
        bench.model.unbind()
        recall = bench.task.metrics.recall([found])
        scores[client] = score_by_mix(recall, server.blueprint.client_mix)[client]
    own = {int(name): score for name, score in last.personal.items()}
    assert {client: own[client] for client in scores} == pytest.approx(scores)
    of_global = {int(name): score for name, score in last.per_client.items()}
    assert own != of_global
    for client in own.keys() - scores.keys():  # never sampled
        assert own[client] == of_global[client]
    assert last.scores["personal_mean"] == pytest.approx(np.mean(list(own.values())))
    # Scoring more models changes no training.
    plain = run(executor(*options), tmp_path)
    assert state_digest(plain.checkpoint.state) == state_digest(server.checkpoint.state)
    assert "personal_mean" not in plain.checkpoint.records[-1].scores


ALONE = ["federation.clients=1", "federation.clients_per_round=1"]


@pytest.mark.parametrize("kind", ["lora", "multihead"])
def test_a_client_alone_is_what_the_mean_of_one_is(executor, tmp_path, kind):
    options = [f"method.adapter={kind}", *ALONE]
    local = run(executor("method=local", *options), tmp_path).checkpoint
    fedavg = run(executor("method=fedavg", *options), tmp_path).checkpoint
    np.testing.assert_array_equal(local.client_states[0]["vector"], fedavg.state.shared)


def test_local_sends_nothing_and_leaves_the_global_model_untouched(executor, tmp_path):
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
