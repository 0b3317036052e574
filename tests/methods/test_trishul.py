"""TRISHUL: allocation of core heads, the prox and the clipping."""

from dataclasses import replace

import pytest
import torch
from method_runs import local_run, server_of
from pydantic import ValidationError

from trishul_ray.adapters.model import Trained
from trishul_ray.federation.messages import to_array
from trishul_ray.federation.worker.context import new_run
from trishul_ray.federation.worker.local import gradient_mask
from trishul_ray.methods.trishul import TrishulConfig
from trishul_ray.runtime.random_streams import torch_rng


@pytest.mark.parametrize("allocation", ["gradient", "curvature"])
def test_measured_allocations(executor, tmp_path, allocation):
    inline = executor("method=trishul", f"method.allocation={allocation}")
    server = server_of(inline, tmp_path)
    asked = server.checkpoint.records[0].uploaded_parameters
    assert asked == 4 * len(inline.context.model.specs), "one number per layer and asked client"
    heads = server.spec.heads
    assert sum(heads.values()) == 4 * len(inline.context.targets.blocks())
    blocks = {}
    for spec in inline.context.model.specs:
        score = float(server.checkpoint.state.survey[spec.name][0])
        blocks[spec.block] = blocks.get(spec.block, 0.0) + score
    order = sorted(blocks, key=blocks.get)
    counts = [heads.get(block, 0) for block in order]
    assert counts == sorted(counts), "more gradient, no fewer heads"
    resumed = server_of(inline, tmp_path)
    assert resumed.spec.heads == heads


@pytest.mark.parametrize("allocation", ["gradient", "curvature"])
def test_measured_scores_cannot_give_one_block_all_heads(executor, allocation, caplog):
    def heads(*words):
        inline = executor("method=trishul", f"method.allocation={allocation}", *words)
        targets = inline.context.targets
        blocks = list(targets.blocks())
        survey = {
            layer.name: torch.tensor([1e9 if layer.block == blocks[0] else 1e-9])
            for layer in targets.layers
        }
        found = inline.context.method.adapters(replace(targets, survey=survey))
        return {layer.block: found[layer.name].heads for layer in targets.layers}, targets, found

    counts, targets, found = heads()
    layer = targets.layers[0]
    cap = min(layer.d_out, layer.d_in) // found[layer.name].rank
    total = 4 * len(counts)
    assert counts[layer.block] == cap < total == sum(counts.values())
    free, _, _ = heads("adapter.overflow=independent")
    assert free[layer.block] == total
    wide, _, _ = heads("adapter.init=random_normal", f"adapter.heads={total}", "adapter.rank=8")
    assert sum(wide.values()) == total * len(counts)


def test_water_filling_reallocates_heads_and_keeps_total(executor):
    filled, uniform = executor("method=trishul"), executor("method.allocation=uniform")
    heads = filled.describe({}).heads
    assert sum(heads.values()) == sum(uniform.describe({}).heads.values())
    assert set(uniform.describe({}).heads.values()) == {4}
    assert (
        filled.describe({}).parameters["adapter"] == uniform.describe({}).parameters["adapter"]
    ), "all layers of this backbone are alike, so the budget is kept exactly"


def test_blocks_are_scored_by_the_configured_weights(executor):
    for scores, count in (("adapted", 2), ("attention", 4), ("all", 6)):
        inline = executor("method=trishul", f"method.block_scores={scores}")
        targets = inline.context.targets
        weights = {
            n: p.double().square().sum()
            for n, p in inline.context.model.merge(
                Trained(inline.context.initial)
            ).named_parameters()
        }
        assert len(targets.scored) == count * len(targets.blocks())
        for layer in targets.scored:
            assert targets.squared_norms[layer.name] == pytest.approx(
                float(weights[layer.name + ".weight"]), rel=1e-9
            )
    # A block whose MLP outweighs the others' gets more heads only if all weights score.
    heavy = targets.scored[-1]
    assert "mlp" in heavy.name
    norms = dict(targets.squared_norms) | {heavy.name: 1e6}
    found = inline.context.method.adapters(replace(targets, squared_norms=norms))
    heads = {layer.block: found[layer.name].heads for layer in targets.layers}
    assert max(heads, key=heads.get) == heavy.block
    plain = executor("method=trishul", "method.block_scores=adapted").context
    found = plain.method.adapters(replace(plain.targets, squared_norms=norms))
    assert max(adapter.heads for adapter in found.values()) < max(heads.values())


@pytest.mark.parametrize("steps", [6, 7])
def test_prox_cadence_keeps_the_total_threshold(executor, steps):
    """k times the threshold every k steps is the same shrinkage without other changes."""
    every, thirds = executor("method.lam=2"), executor("method.lam=2", "method.prox_every=3")
    start = torch.randn(every.context.initial.shape, generator=torch_rng(0, "x")) * 0.1
    results = []
    for inline in (every, thirds):
        run = local_run(inline.context, start.clone())
        for step in range(1, steps + 1):
            inline.context.method.after_steps([run], step, steps)
        results.append(run.vector)
        banks = zip(run.layout.core_banks(run.vector), run.layout.core_banks(start), strict=True)
        for after, before in banks:
            expected = torch.linalg.svdvals(before) - steps * 2 * 0.01
            torch.testing.assert_close(
                torch.linalg.svdvals(after), expected.clamp(min=0), atol=1e-5, rtol=0
            )
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)


def test_scalars_are_clipped(executor):
    inline = executor("method.scalar_max=1.5")
    run = local_run(inline.context, torch.full_like(inline.context.initial, 3.0))
    views = run.layout.views(run.vector)
    names = [n for n in views if n.endswith(".scale")]
    views[names[0]].fill_(-2.0)
    inline.context.method.after_steps([run], 1, 4)
    assert (views[names[0]] == 0).all()
    assert all((views[n] == 1.5).all() for n in names[1:])


def test_a_bound_below_the_scalars_start_is_rejected():
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        TrishulConfig(name="trishul", scalar_max=0.5)


@pytest.mark.parametrize("share", [1, 0.5])
def test_the_prox_on_the_change_shrinks_the_change(executor, share):
    words = ["method=trishul", "method.prox_on=change", "method.lam=2"]
    inline = executor(*words, f"method.head_fraction={share}")
    context = inline.context
    start = context.method.initial_state(context.model.layout, context.initial, {})
    generator = torch.Generator().manual_seed(0)
    start = replace(start, shared=torch.randn(start.shared.shape, generator=generator))
    run_ = new_run(context, start.map(to_array), 1, 0)
    context.method.start(run_, context.initial)
    before = run_.vector.clone()
    mask = gradient_mask(run_, context.method.wire(run_.layout))
    step = 0.1 * torch.randn(before.shape, generator=generator)
    step = step if mask is None else step * mask
    run_.vector.add_(step)
    context.method.after_steps([run_], 1, 4)
    banks = [run_.layout.core_banks(v) for v in (before, step, run_.vector)]
    for old, change, new in zip(*banks, strict=True):
        u, s, vt = torch.linalg.svd(change.double())
        shrunk = u @ torch.diag_embed((s - 2 * 0.01).clamp(min=0)) @ vt
        torch.testing.assert_close(new.double(), old.double() + shrunk, atol=1e-5, rtol=1e-5)
