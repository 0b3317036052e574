"""Core heads that stay on their clients (``method=trishul-private``)."""

import numpy as np
import pytest
import torch
from method_runs import Recording, initial_state, resumed, run, server_of
from pydantic import ValidationError
from stacked_layers import check_stacked

from trishul_ray.adapters.model import Trained
from trishul_ray.federation.checkpoint import arrays_digest, state_digest
from trishul_ray.federation.messages import TrainJob
from trishul_ray.federation.worker.context import global_model
from trishul_ray.federation.worker.local import train_client
from trishul_ray.lab.methods.private_heads import PRIVATE_CORE, PrivateHeads

METHODS = ["ravan-private", "trishul-private"]
TWO = ("method=trishul-private", "method.private_heads=2")


def is_private(name):
    return name.endswith(PRIVATE_CORE)


@pytest.mark.parametrize("method", METHODS)
def test_private_heads_are_kept_and_never_sent(executor, tmp_path, method):
    words = [f"method={method}", "method.private_heads=2", "evaluation.per_client=true"]
    recording = Recording(executor(*words))
    server = run(recording, tmp_path)
    layout, wire = server.spec.layout, server.spec.wire
    private = [entry for entry in layout.entries if is_private(entry.name)]
    assert private and not [name for name in wire if is_private(name)]
    adapters = recording.inner.context.model.adapters
    for entry in private:
        layer = entry.name.removesuffix(f".{PRIVATE_CORE}")
        h = adapters[layer].heads
        assert entry.shape[0] == min(2, h - 1)
        assert layout.entry(f"{layer}.core").shape[0] == h - entry.shape[0] >= 1
    sent = server.spec.expected.lengths["shared"]
    scalars = sum(e.numel for e in layout.entries if e.kind == "scale")
    assert sent + scalars + sum(e.numel for e in private) == layout.size
    for upload in recording.uploads:
        assert upload.arrays.shared.shape == (sent,) and not upload.arrays.extra
    assert all(r.uploaded_parameters == 3 * sent for r in server.checkpoint.records[1:])
    kept = server.checkpoint.client_states
    sampled = {c for record in server.checkpoint.records for c in record.clients}
    assert kept.keys() == sampled and len({arrays_digest(s) for s in kept.values()}) == len(kept)
    for state in kept.values():
        assert {*state} == {entry.name for entry in private}
        assert all(np.abs(array).max() > 0 for array in state.values())
    last = server.checkpoint.records[-1]
    assert last.personal != last.per_client


@pytest.mark.parametrize(
    "words",
    [
        ["method=ravan-private"],
        ["method=trishul-private"],
        ["method=trishul-private", "method.head_fraction=0.5", "optimizer.weight_decay=0.1"],
        ["method=trishul-private", "uploads.codec=int8", "server.optimizer=adam"],
    ],
)
def test_personal_model_without_private_heads_is_global(executor, tmp_path, words):
    inline = executor(*words)
    server = run(inline, tmp_path)
    assert all(np.isfinite(record.train_loss) for record in server.checkpoint.records[1:])
    context, broadcast = inline.context, server.broadcast()
    of_all = global_model(context, broadcast, 2)
    layout = context.model.layout
    for state in server.checkpoint.client_states.values():
        assert all(np.abs(array).max() > 0 for array in state.values())
        zeros = {name: np.zeros_like(array) for name, array in state.items()}
        assert torch.equal(global_model(context, broadcast, 2, zeros).vector, of_all.vector)
        own = layout.views(global_model(context, broadcast, 2, state).vector)
        for name, view in layout.views(of_all.vector).items():
            assert torch.equal(view, torch.zeros_like(view) if is_private(name) else own[name])


def test_shared_and_private_updates_are_orthogonal(executor, tmp_path):
    inline = executor(*TWO)
    server = run(inline, tmp_path)
    context, layout = inline.context, inline.context.model.layout
    for state in server.checkpoint.client_states.values():
        vector = global_model(context, server.broadcast(), 2, state).vector

        def without(drops, vector=vector):
            part = vector.clone()
            for name, view in layout.views(part).items():
                if drops(name):
                    view.zero_()
            return context.model.deltas(Trained(part))

        shared, private = without(is_private), without(lambda name: name.endswith(".core"))
        for layer, whole in context.model.deltas(Trained(vector)).items():
            one, other = shared[layer], private[layer]
            torch.testing.assert_close(one + other, whole, atol=1e-12, rtol=1e-6)
            size = float(one.norm() * other.norm())
            assert abs(float((one * other).sum())) <= 1e-5 * size
            assert float(one.norm() ** 2 + other.norm() ** 2) == pytest.approx(
                float(whole.norm() ** 2), rel=1e-5
            )


@pytest.mark.parametrize(
    "words",
    [
        ["method=ravan-private"],
        ["method=trishul-private"],
        [
            *("method=trishul-private", "method.head_fraction=0.5", "method.scalars=fixed"),
            "federation.stacked=3",
        ],
        ["method=trishul-private", "method.prox_on=change", "model.train_head=false"],
    ],
)
def test_all_private_heads_send_only_classification_head(executor, tmp_path, words):
    own = ["method.private_heads=4", "evaluation.per_client=true"]
    recording = Recording(executor(*own, *words))
    server = run(recording, tmp_path)
    layout, adapters = server.spec.layout, recording.inner.context.model.adapters
    classifier = sum(e.numel for e in layout.entries if e.kind == "classifier")
    assert bool(classifier) == ("model.train_head=false" not in words)
    assert server.spec.expected.lengths["shared"] == classifier
    assert all(u.arrays.shared.shape == (classifier,) for u in recording.uploads)
    kept, heads = server.checkpoint.client_states, server.spec.heads
    assert kept and sum(heads.values()) * 2 == sum(a.private for a in adapters.values())
    for state in kept.values():
        assert sum(map(len, state.values())) == sum(heads.values()) * 2
        assert all(np.abs(array).max() > 0 for array in state.values())
    deltas = recording.inner.context.model.deltas(
        global_model(recording.inner.context, server.broadcast(), 2)
    )
    assert not any(delta.any() for delta in deltas.values())
    last = server.checkpoint.records[-1]
    assert last.personal != last.per_client


@pytest.mark.parametrize("method", METHODS)
def test_private_heads_do_not_change_first_round(executor, method):
    found = []
    plain, lam = method.removesuffix("-private"), ["method.lam=0"] * method.startswith("trishul")
    for words in ([f"method={plain}"], [f"method={method}", "method.private_heads=2"]):
        inline = executor(*words, "method.scalars=fixed", *lam)
        context, before = inline.context, initial_state(inline)
        upload, report = train_client(context, before, TrainJob(1, 0))
        assert bool(report.state) == (len(words) == 2)
        found.append(context.model.deltas(global_model(context, upload.arrays, 1, report.state)))
    for layer, delta in found[0].items():
        assert delta.abs().max() > 0
        torch.testing.assert_close(found[1][layer], delta, atol=0, rtol=1e-6)


def test_stop_and_resume_changes_nothing(executor, tmp_path):
    words = [*TWO, "federation.rounds=3", "evaluation.per_client=true"]
    whole, parts = resumed(executor(*words), tmp_path, stops=2)
    assert parts.client_states.keys() == whole.client_states.keys()
    for client, state in whole.client_states.items():
        assert arrays_digest(parts.client_states[client]) == arrays_digest(state)
    assert parts.records[-1].personal == whole.records[-1].personal


def test_privacy_covers_uploads_but_not_private_heads(executor, tmp_path):
    words = [*TWO, "privacy.sampling=fixed", "privacy.noise=1"]
    noisy = server_of(executor(*words), tmp_path)
    plain = server_of(executor(*TWO), tmp_path)
    (privacy,) = noisy.stages
    assert privacy.length == noisy.spec.expected.lengths["shared"]
    noisy.step()
    plain.step()
    kept = plain.checkpoint.client_states
    assert kept and noisy.checkpoint.client_states.keys() == kept.keys()
    for client, state in kept.items():
        assert arrays_digest(noisy.checkpoint.client_states[client]) == arrays_digest(state)
    assert state_digest(noisy.checkpoint.state) != state_digest(plain.checkpoint.state)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method.private_heads=5"], "private_heads=5 must be at most adapter.heads=4"),
        (["method.private_heads=0"], "greater than or equal to 1"),
        (["federation.compute=uniform"], "not method='trishul-private'"),
    ],
)
def test_rejected_combinations(small, words, message):
    with pytest.raises((ValidationError, ValueError), match=message):
        small("method=trishul-private", *words)


@pytest.mark.parametrize("path", ["auto", "merged", "factored"])
@pytest.mark.parametrize("clients", [1, 3])
def test_stacked_private_heads_equal_each_clients_layer(path, clients):
    check_stacked(PrivateHeads(3, 2, private=1), path, clients, tokens=5, widths=(7, 9), seed=1)
