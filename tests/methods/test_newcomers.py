"""What the three methods of newcomers/ promise; test_battery.py runs them, too."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from method_runs import Recording, run, server_of

from trishul_ray.adapters.model import Trained
from trishul_ray.federation.checkpoint import arrays_digest, state_digest
from trishul_ray.methods.base import State
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


class Attacked(Recording):
    """An executor in which one client of every round sends huge values."""

    def run(self, broadcast, jobs):
        outcome = super().run(broadcast, jobs)
        if outcome.uploads:
            first = outcome.uploads[0]
            huge = State(np.full_like(first.arrays.shared, 1e9))
            outcome.uploads[0] = replace(first, arrays=huge)
        return outcome


def test_a_median_stays_among_the_honest_uploads(executor, tmp_path):
    attacked = Attacked(executor("method=fedmedian", "federation.rounds=1"))
    server = server_of(attacked, tmp_path)
    server.step()
    honest = np.stack([u.arrays.shared for u in attacked.uploads[1:]])
    found = server.checkpoint.state.shared
    assert (found >= honest.min(axis=0)).all() and (found <= honest.max(axis=0)).all()
    mean = server_of(Attacked(executor("method=fedit", "federation.rounds=1")), tmp_path)
    mean.step()
    assert abs(mean.checkpoint.state.shared).max() > 1e8


def test_the_median_of_equal_uploads_is_their_mean(executor, tmp_path):
    class Alike(Recording):
        def run(self, broadcast, jobs):
            outcome = super().run(broadcast, jobs)
            outcome.uploads = [
                replace(u, arrays=outcome.uploads[0].arrays) for u in outcome.uploads
            ]
            return outcome

    found = []
    for method in ("fedmedian", "fedit"):
        server = server_of(Alike(executor(f"method={method}", "federation.rounds=1")), tmp_path)
        server.step()
        found.append(server.checkpoint.state.shared)
    np.testing.assert_array_equal(*found)


def test_a_wide_round_gives_a_median_every_upload(executor, tmp_path):
    """More clients than one group of the tree that adds uploads."""
    options = ["federation.clients=18", "federation.clients_per_round=18", "federation.rounds=1"]
    recording = Recording(executor("method=fedmedian", *options, "federation.local_steps=1"))
    server = server_of(recording, tmp_path)
    server.step()
    sent = np.stack([u.arrays.shared for u in recording.uploads])
    assert len(sent) == 18
    np.testing.assert_allclose(
        server.checkpoint.state.shared, np.median(sent, axis=0), rtol=1e-6, atol=1e-9
    )
