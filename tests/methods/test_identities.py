"""Identities between methods, and against plain references that share no code with them."""

import math

import numpy as np
import pytest
import torch
from torch.func import functional_call

from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.local import batch_order, train_client
from trishul_ray.federation.messages import TrainJob, to_arrays
from trishul_ray.federation.reduce import Reducer, finish, partial_sum
from trishul_ray.federation.workbench import global_model
from trishul_ray.methods.base import LocalRun
from trishul_ray.rng import numpy_rng, torch_rng

AS_RAVAN = [
    "method=trishul",
    "method.lam=0",
    "method.allocation=uniform",
    "adapter.init=random_normal",
]


def initial_state(inline):
    bench = inline.bench
    return to_arrays(bench.method.initial_state(bench.model.layout, bench.initial, {}))


def one_round(inline, clients=(0, 1, 2)):
    blueprint, bench = inline.describe({}), inline.bench
    before = initial_state(inline)
    uploads = [train_client(bench, before, TrainJob(1, c))[0] for c in clients]
    weighting = bench.settings.federation.weighting
    reducer = Reducer(bench.method, bench.model.layout, weighting, blueprint.expected)
    mean, trained = finish(partial_sum(uploads, reducer), before, blueprint.expected)
    return uploads, mean, trained


def test_trishul_without_its_prongs_is_ravan_byte_for_byte(executor):
    ravan, trishul = executor("method=ravan"), executor(*AS_RAVAN)
    first, second = one_round(ravan), one_round(trishul)
    assert state_digest(first[1]) == state_digest(second[1])
    # With the prox on it is another method: the identity above is not vacuous.
    shrunk = one_round(executor(*AS_RAVAN, "method.lam=1.0"))
    assert state_digest(shrunk[1]) != state_digest(first[1])


def ambient(bench, shared):
    return bench.model.deltas(global_model(bench, {"shared": shared}, 1).vector)


@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("method", ["trishul", "ravan", "fedit"])
def test_exactness_in_the_ambient_space(executor, method, weighting):
    """Mean of the clients' updates B_i s_i H_i A_i against the update of the mean (eq. exact_agg):
    equal to rounding with shared bases, measurably not for averaged LoRA factors."""
    # Two rounds' worth of drift, so that both LoRA factors differ between clients.
    inline = executor(f"method={method}", f"federation.weighting={weighting}")
    bench = inline.bench
    uploads, mean, _ = one_round(inline)
    weights = np.array([u.rows if weighting == "size" else 1.0 for u in uploads], dtype=float)
    weights /= weights.sum()
    clients = [ambient(bench, u.arrays["shared"]) for u in uploads]
    errors = []
    for name, aggregated in ambient(bench, mean["shared"]).items():
        exact = sum(w * c[name] for w, c in zip(weights, clients, strict=True))
        errors.append(float((aggregated - exact).norm() / exact.norm()))
    if method == "fedit":
        assert min(errors) > 1e-3
    else:
        assert max(errors) < 1e-6


def plain_training(bench, method, lam, train_scale=True):
    """Algorithm 1 of the paper for one client, by torch's own autograd, Adam and SVD."""
    settings = bench.settings
    model = bench.model
    base = model.merge(bench.initial)  # a plain copy of the backbone
    state = {k: v.detach().clone() for k, v in base.state_dict().items()}
    views = model.layout.views(bench.initial.clone())
    leaves = {k: v.detach().clone().requires_grad_() for k, v in views.items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=settings.optimizer.lr)
    fed = settings.federation
    order = batch_order(
        bench.shards.shard(0),
        fed.local_steps,
        fed.batch_size,
        numpy_rng(settings.seed, "batches", 1, 0),
    )
    for rows in order:
        batch = bench.task.prepare_batch(bench.train.batch(rows), "cpu", torch.float32)
        weights = dict(state)
        for spec in model.specs:
            weight, constants = state[f"{spec.name}.weight"], model.constants(spec.name)
            if method == "fedit":
                update = leaves[f"{spec.name}.lora_B"] @ leaves[f"{spec.name}.lora_A"]
            else:
                core, scale = leaves[f"{spec.name}.core"], leaves[f"{spec.name}.scale"]
                left = constants["basis_B"].view(spec.d_out, len(core), -1)
                right = constants["basis_A"].view(len(core), -1, spec.d_in)
                update = torch.einsum("ohr,h,hrs,hsi->oi", left, scale, core, right)
            weights[f"{spec.name}.weight"] = weight + update
        for name, value in leaves.items():
            if name.startswith("head:"):
                weights[name.removeprefix("head:")] = value
        output = functional_call(base, weights, kwargs={"pixel_values": batch["pixel_values"]})
        loss = torch.nn.functional.cross_entropy(output.logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if method == "trishul":
            with torch.no_grad():
                for name, value in leaves.items():
                    if name.endswith(".core"):
                        u, s, vt = torch.linalg.svd(value)
                        s = (s - lam * settings.optimizer.lr).clamp(min=0)
                        value.copy_(u @ torch.diag_embed(s) @ vt)
                    if name.endswith(".scale"):
                        value.clamp_(0, 10)
    uploaded = {}
    for name, value in leaves.items():
        if name.endswith(".core"):
            value = leaves[name.removesuffix("core") + "scale"][:, None, None] * value
        uploaded[name] = value.detach()
    return uploaded


@pytest.mark.parametrize(("method", "lam"), [("trishul", 5.0), ("ravan", 0.0), ("fedit", 0.0)])
def test_a_clients_round_is_the_papers_algorithm(executor, method, lam):
    # lr is small enough that Adam's sign-like first steps do not amplify rounding.
    options = [f"method={method}", "optimizer.lr=0.002", "federation.local_steps=6"]
    if method == "trishul":
        options.append(f"method.lam={lam}")
    inline = executor(*options)
    bench = inline.bench
    upload, report = train_client(bench, initial_state(inline), TrainJob(1, 0))
    expected = plain_training(bench, method, lam)
    wire = bench.method.wire(bench.model.layout)
    flat = torch.cat([expected[name].reshape(-1) for name in wire]).numpy()
    moved = np.abs(flat - initial_state(inline)["shared"]).max()
    assert moved > 1e-3
    # Adam divides by sqrt(v): an entry whose gradient is rounding noise may step either way.
    close = np.isclose(upload.arrays["shared"], flat, rtol=1e-3, atol=1e-3 * moved)
    assert close.mean() > 0.995
    if method == "trishul":
        assert report.notes["metrics"]["svt_zeroed"] > 0.05


def local_run(bench, vector):
    return LocalRun(
        layout=bench.model.layout,
        vector=vector,
        grad=torch.zeros_like(vector),
        broadcast={},
        client_state={},
        optimizer=bench.settings.optimizer,
        generator=torch_rng(0, "test"),
        common=torch_rng(0, "common"),
    )


@pytest.mark.parametrize("steps", [6, 7])
def test_prox_cadence_keeps_the_total_threshold(executor, steps):
    """k times the threshold every k steps is the same shrinkage where nothing else moves."""
    every, thirds = executor("method.lam=2"), executor("method.lam=2", "method.prox_every=3")
    start = torch.randn(every.bench.initial.shape, generator=torch_rng(0, "x")) * 0.1
    results = []
    for inline in (every, thirds):
        run = local_run(inline.bench, start.clone())
        for step in range(1, steps + 1):
            inline.bench.method.after_step(run, step, steps)
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
    run = local_run(inline.bench, torch.full_like(inline.bench.initial, 3.0))
    views = run.layout.views(run.vector)
    names = [n for n in views if n.endswith(".scale")]
    views[names[0]].fill_(-2.0)
    inline.bench.method.after_step(run, 1, 4)
    assert (views[names[0]] == 0).all()
    assert all((views[n] == 1.5).all() for n in names[1:])


@pytest.mark.parametrize("method", ["trishul", "ravan"])
def test_fixed_scalars_are_not_trained(executor, method):
    inline = executor(f"method={method}", "method.scalars=fixed")
    assert not [e for e in inline.bench.model.layout.entries if e.name.endswith(".scale")]
    assert inline.describe({}).parameters["scalars"] == 0
    trained = executor(f"method={method}")
    assert inline.describe({}).expected.lengths == trained.describe({}).expected.lengths


@pytest.mark.parametrize("method", ["trishul", "ravan"])
def test_masked_heads(executor, method):
    inline = executor(f"method={method}", "method.head_fraction=0.5")
    blueprint, before = inline.describe({}), initial_state(inline)
    uploads, mean, trained = one_round(inline)
    masks = [u.active for u in uploads]
    assert not np.array_equal(masks[0], masks[1]), "each client draws its own heads"
    for upload in uploads:
        start = 0
        for size, active in zip(blueprint.expected.unit_sizes, upload.active, strict=True):
            part = upload.arrays["shared"][start : start + size]
            still = before["shared"][start : start + size]
            assert np.array_equal(part, still) != bool(active)
            start += size
    for entry in (e for e in blueprint.layout.entries if e.name.endswith(".core")):
        assert math.ceil(0.5 * entry.shape[0]) >= 1
    untouched = np.repeat(~trained, blueprint.expected.unit_sizes)
    np.testing.assert_array_equal(mean["shared"][untouched], before["shared"][untouched])
    _, report = train_client(inline.bench, before, TrainJob(1, 0))
    sizes = blueprint.expected.unit_sizes
    assert report.notes["uploaded_parameters"] == int(sizes[uploads[0].active].sum())


def test_weight_decay_leaves_inactive_heads_alone(executor):
    options = ["method=ravan", "method.head_fraction=0.5", "optimizer.weight_decay=0.5"]
    inline = executor(*options)
    start = initial_state(inline)
    start["shared"] = start["shared"] + 0.1  # zeros would not show a decay
    upload, _ = train_client(inline.bench, start, TrainJob(1, 0))
    still = np.repeat(~upload.active, inline.describe({}).expected.unit_sizes)
    np.testing.assert_array_equal(upload.arrays["shared"][still], start["shared"][still])
    assert (upload.arrays["shared"][~still] != start["shared"][~still]).mean() > 0.9


def test_water_filling_changes_the_heads_and_keeps_the_total(executor):
    filled, uniform = executor("method=trishul"), executor("method.allocation=uniform")
    heads = filled.describe({}).heads
    assert sum(heads.values()) == sum(uniform.describe({}).heads.values())
    assert set(uniform.describe({}).heads.values()) == {4}
    assert (
        filled.describe({}).parameters["adapter"] == uniform.describe({}).parameters["adapter"]
    ), "all layers of this backbone are alike, so the budget is kept exactly"
