"""HetLoRA: weights, pruning, and components beyond a cohort's ranks (also of FlexLoRA)."""

import numpy as np
import pytest
import torch
from method_runs import Recording, run, server_of

from trishul_ray.adapters.model import Trained
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import State


def test_hetlora_of_equal_ranks_and_norms_is_fedit(executor):
    """Weights are only the norms, so equal norms give the plain mean."""
    inline = executor("method=hetlora")
    method, layout = inline.context.method, inline.context.model.layout
    vectors = []
    for seed in (1, 2, 3):
        shared = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
        norm = method.weight(State(shared), layout, 1.0)
        views = layout.views(shared)
        for name, value in views.items():
            if name.endswith("lora_B"):
                value.div_(norm)  # ||B A|| is linear in B
        vectors.append(shared)
    weights = [method.weight(State(v), layout, 5.0) for v in vectors]
    np.testing.assert_allclose(weights, 1.0, rtol=1e-4)


def test_hetlora_weight_is_the_norm_of_the_update(executor):
    inline = executor("method=hetlora")
    context = inline.context
    shared = torch.randn(context.model.layout.size, generator=torch.Generator().manual_seed(1))
    deltas = context.model.deltas(Trained(shared))
    norm = torch.stack([d.square().sum() for d in deltas.values()]).sum().sqrt()
    found = context.method.weight(State(shared), context.model.layout, 1.0)
    assert found == pytest.approx(float(norm), rel=1e-5)


def test_hetlora_prunes(executor, tmp_path):
    options = ["method=hetlora", "method.prune=true", "method.gamma=0.5", "method.penalty=5"]
    server = run(executor(*options, "federation.clients_per_round=4"), tmp_path)
    ranks = [int(state["rank"][0]) for state in server.checkpoint.client_states.values()]
    assert set(ranks) <= {1, 2, 4}
    assert min(ranks) < 4


def live_components(context, shared):
    """Return [layers, r] bool: components that can train (a nonzero row of A or column of B)."""
    pairs = lora_pairs(context.method.named_tensors(context.model.layout, torch.from_numpy(shared)))
    return torch.stack([(a != 0).any(1) | (b != 0).any(0) for _, a, b in pairs])


@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_limited_cohorts_leave_every_component_alive(executor, tmp_path, name):
    """A round without a client of full rank must not end the training of higher components."""
    words = [f"method={name}", "federation.compute=skewed-right", "federation.clients_per_round=1"]
    recording = Recording(executor(*words, "federation.rounds=6", "federation.local_steps=1"))
    server = server_of(recording, tmp_path)
    context, least = recording.inner.context, 1.0
    while not server.finished:
        server.step()
        sent = recording.uploads[0].arrays.shared
        least = min(least, float(live_components(context, sent).float().mean()))
    assert least < 1, "choose another seed: no limited client took part"
    assert live_components(context, server.checkpoint.state.shared).all()


def test_hetlora_with_zeros_equals_the_formula(executor, tmp_path):
    """With unsent=zero the padding is always averaged; sent components are averaged alike."""
    words = ["method=hetlora", "federation.compute=skewed-right", "federation.clients_per_round=1"]
    states = {}
    for unsent in ("keep", "zero"):
        inline = executor(*words, f"method.unsent={unsent}")
        server = server_of(inline, tmp_path)
        server.step()
        states[unsent] = (
            server.checkpoint.state.shared,
            live_components(inline.context, server.checkpoint.state.shared),
        )
    assert states["keep"][1].all() and not states["zero"][1].all()
    sent = states["zero"][0] != 0
    np.testing.assert_array_equal(states["keep"][0][sent], states["zero"][0][sent])


def test_hetlora_averages_the_classification_head_by_federation_weighting(executor, tmp_path):
    """The norm of B A must not weight the classification head."""
    words = ["method=hetlora", "federation.weighting=size", "partition.variant=per-label"]
    recording = Recording(executor(*words))
    server = server_of(recording, tmp_path)
    server.step()
    context, rows = recording.inner.context, [u.rows for u in recording.uploads]
    assert len(set(rows)) > 1

    def heads(shared):
        named = context.method.named_tensors(context.model.layout, torch.from_numpy(shared))
        return np.concatenate([v.ravel() for k, v in named.items() if k.startswith("head:")])

    mean = np.average([heads(u.arrays.shared) for u in recording.uploads], axis=0, weights=rows)
    np.testing.assert_allclose(heads(server.checkpoint.state.shared), mean, rtol=1e-5, atol=1e-7)
