"""RAVAN: the core heads that a client trains, and the entries that it does not change."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from method_runs import Recording, initial_state, one_round, server_of

from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.worker.context import new_run
from trishul_ray.federation.worker.local import train_client


@pytest.mark.parametrize("selection", ["random", "weight", "gradient"])
def test_head_selection(executor, tmp_path, selection):
    options = ["method=ravan", "method.head_fraction=0.5", f"method.selection={selection}"]
    recording = Recording(executor(*options))
    server = server_of(recording, tmp_path)
    server.step()
    server.step()
    context = recording.inner.context
    masks = [u.active for u in recording.uploads]
    sizes = server.spec.expected.unit_sizes
    heads = sum(e.shape[0] for e in context.model.layout.entries if e.name.endswith(".core"))
    assert all(mask[:heads].sum() == heads / 2 for mask in masks)
    same = all(np.array_equal(masks[0], mask) for mask in masks[1:])
    # Norms of the broadcast are equal on all clients, the paper's argument against this choice.
    assert same == (selection == "weight")
    if selection == "weight":
        shared = recording.broadcast.shared
        norms, start = [], 0
        for size in sizes[:heads]:
            norms.append(np.linalg.norm(shared[start : start + size]))
            start += size
        for layer in np.arange(heads).reshape(-1, 4):
            best = set(layer[np.argsort(-np.array(norms)[layer])[:2]])
            assert best == {i for i in layer if masks[0][i]}


def no_gradient(step):
    """Leave the gradient at zero."""
    return torch.zeros(())


@pytest.mark.parametrize("selection", ["weight", "gradient"])
def test_ties_are_broken_at_random(executor, tmp_path, selection):
    """All cores are zero in round 1: no core head may be preferred for its index."""
    options = ["method=ravan", "method.head_fraction=0.25", f"method.selection={selection}"]
    inline = executor(*options)
    context = inline.context
    start = context.method.initial_state(context.model.layout, context.initial, {}).map(to_array)
    chosen = np.zeros(4)
    for client in range(4):
        run_ = new_run(context, start, 1, client)
        run_.gradient = no_gradient
        context.method.start(run_, context.initial)
        heads = run_.active[: 4 * len(context.model.specs)].view(-1, 4)
        assert (heads.sum(1) == 1).all()
        chosen += heads.sum(0).numpy()
    assert chosen.min() > 0
    again = new_run(context, start, 1, 3)
    again.gradient = no_gradient
    context.method.start(again, context.initial)
    assert torch.equal(again.active, run_.active)


@pytest.mark.parametrize("method", ["trishul", "ravan"])
def test_fixed_scalars_are_not_trained(executor, method):
    inline = executor(f"method={method}", "method.scalars=fixed")
    assert not [e for e in inline.context.model.layout.entries if e.name.endswith(".scale")]
    assert inline.describe({}).parameters["scalars"] == 0
    trained = executor(f"method={method}")
    assert inline.describe({}).expected.lengths == trained.describe({}).expected.lengths


@pytest.mark.parametrize("method", ["trishul", "ravan"])
def test_masked_heads(executor, method):
    inline = executor(f"method={method}", "method.head_fraction=0.5")
    spec, before = inline.describe({}), initial_state(inline)
    uploads, mean, trained = one_round(inline)
    masks = [u.active for u in uploads]
    assert not np.array_equal(masks[0], masks[1]), "each client draws other core heads"
    for upload in uploads:
        start = 0
        for size, active in zip(spec.expected.unit_sizes, upload.active, strict=True):
            part = upload.arrays.shared[start : start + size]
            still = before.shared[start : start + size]
            assert np.array_equal(part, still) != bool(active)
            start += size
    for entry in (e for e in spec.layout.entries if e.name.endswith(".core")):
        assert math.ceil(0.5 * entry.shape[0]) >= 1
    untouched = np.repeat(~trained, spec.expected.unit_sizes)
    np.testing.assert_array_equal(mean.shared[untouched], before.shared[untouched])
    _, report = train_client(inline.context, before, TrainJob(1, 0))
    sizes = spec.expected.unit_sizes
    assert report.uploaded == int(sizes[uploads[0].active].sum())


def test_weight_decay_leaves_inactive_core_heads_unchanged(executor):
    options = ["method=ravan", "method.head_fraction=0.5", "optimizer.weight_decay=0.5"]
    inline = executor(*options)
    start = initial_state(inline)
    start = replace(start, shared=start.shared + 0.1)  # Zeros would not show a decay.
    upload, _ = train_client(inline.context, start, TrainJob(1, 0))
    still = np.repeat(~upload.active, inline.describe({}).expected.unit_sizes)
    np.testing.assert_array_equal(upload.arrays.shared[still], start.shared[still])
    assert (upload.arrays.shared[~still] != start.shared[~still]).mean() > 0.9
