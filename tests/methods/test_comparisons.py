"""Identities that hold between the methods of the paper's comparison."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from trishul_ray.adapters.export import export_peft
from trishul_ray.federation.checkpoint import CheckpointStore, state_digest
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.local import gradient_mask, train_client
from trishul_ray.federation.messages import TrainJob, to_arrays, to_tensors
from trishul_ray.federation.server import Server
from trishul_ray.federation.workbench import frozen_part, global_model, new_run
from trishul_ray.methods.adapters import lora_pairs
from trishul_ray.methods.base import exact_share, method_class, method_names
from trishul_ray.storage import Store

RUNS = iter(range(10_000))


def server_of(inline, tmp_path):
    experiment = inline.bench.settings
    store = Store.open(str(tmp_path / f"run-{next(RUNS)}"))
    return Server(experiment, inline, CheckpointStore(store, experiment.id), "attempt")


def run(inline, tmp_path):
    server = server_of(inline, tmp_path)
    while not server.finished:
        server.step()
    return server


def weights_of(inline, broadcast):
    trained = global_model(inline.bench, broadcast, 0)
    return inline.bench.model.deltas(trained.vector, trained.base, trained.constants)


class Recording:
    """An executor that remembers the uploads of its last jobs."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run(self, broadcast, jobs):
        outcome = self.inner.run(broadcast, jobs)
        if outcome.uploads:
            self.broadcast, self.uploads = broadcast, outcome.uploads
        return outcome


EXACT = {
    "fedex": [],
    "flora": [],
    "ffalora": [],
    "fedsb": [],
    "flexlora": ["method.truncate=false"],
    "ravan": [],
    "trishul": [],
}


@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("name", [*EXACT, "fedit", "scaffold", "hetlora"])
def test_exact_means_exact(executor, tmp_path, name, weighting):
    """The global update after a round against the weighted mean of the clients' own updates, in
    the second round, when every factor has moved."""
    options = [f"method={name}", f"federation.weighting={weighting}", *EXACT.get(name, [])]
    # Free sizes, so that the two weightings differ.
    recording = Recording(executor(*options, "partition.variant=per-label"))
    server = server_of(recording, tmp_path)
    server.step()
    server.step()
    bench = recording.inner.bench
    weights = np.array([u.rows if weighting == "size" else 1.0 for u in recording.uploads])
    frozen = frozen_part(to_tensors(recording.broadcast))
    clients = []
    for upload in recording.uploads:
        vector = bench.initial.clone()
        shared = torch.from_numpy(upload.arrays["shared"])
        server.method.unpack(bench.model.layout, vector, shared)
        clients.append(bench.model.deltas(vector, *frozen))
    errors = []
    for layer, found in weights_of(recording.inner, server.broadcast()).items():
        exact = sum(w * c[layer] for w, c in zip(weights / weights.sum(), clients, strict=True))
        errors.append(float((found - exact).norm() / exact.norm()))
    if name in EXACT:
        assert max(errors) < 1e-6
    else:
        assert min(errors) > 1e-3


@pytest.mark.parametrize(
    ("name", "lr"), [("fedex", "0.003"), ("flora", "0.0002"), ("flexlora", "0.003")]
)
def test_bfloat16_keeps_what_is_folded(executor, tmp_path, name, lr):
    """The layers' outputs move by ``x base^T`` from those without it, as in FedEx beside FedIT."""
    options = [*EXACT[name], f"optimizer.lr={lr}", "federation.rounds=1"]
    inline = executor(f"method={name}", "model.precision=bf16", *options)
    trained = global_model(inline.bench, run(inline, tmp_path).broadcast(), 2)
    model, gains, kept = inline.bench.model, [], []
    generator = torch.Generator().manual_seed(0)
    for layer, base in list(trained.base.items())[:4]:
        d_in = base.shape[1]
        x = torch.randn(2**19 // d_in, d_in, generator=generator).bfloat16()
        moved = x.double() @ base.double().T
        outputs = []
        for frozen in (trained.base, {}):
            model.bind(trained.vector, torch.zeros_like(trained.vector), frozen)
            adapted = model.model.get_submodule(layer)
            outputs.append(adapted(x).detach().double())
            if frozen:
                kept.append(base.norm() / adapted.weight.float().norm())
        gains.append(float(((outputs[0] - outputs[1]) * moved).sum() / moved.square().sum()))
        model.unbind()
    assert max(kept) < 1e-2  # so small that most of it lies below half a step of the weight
    assert np.mean(gains) == pytest.approx(1, abs=0.05)


def same_run(executor, tmp_path, first, second):
    results = [run(executor(*options), tmp_path) for options in (first, second)]
    assert state_digest({"shared": results[0].state["shared"]}) == state_digest(
        {"shared": results[1].state["shared"]}
    )


@pytest.mark.parametrize("adapter", ["lora", "ffa", "multihead"])
def test_fedprox_without_pull_is_fedavg(executor, tmp_path, adapter):
    kind = f"method.adapter={adapter}"
    same_run(
        executor,
        tmp_path,
        ["method=fedprox", kind, "method.mu=0"],
        ["method=fedavg", kind],
    )


def test_fedprox_holds_back(executor, tmp_path):
    moved = {}
    for mu in (0, 100):
        inline = executor(
            "method=fedprox", f"method.mu={mu}", "optimizer.name=sgd", "optimizer.lr=0.005"
        )
        server = server_of(inline, tmp_path)
        start = server.state["shared"]
        server.step()
        moved[mu] = np.linalg.norm(server.state["shared"] - start)
    assert moved[100] < 0.9 * moved[0]


def test_fedavg_on_lora_is_fedit(executor, tmp_path):
    same_run(executor, tmp_path, ["method=fedavg"], ["method=fedit"])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_scaffold_in_its_first_round_is_fedit(executor, tmp_path, optimizer):
    """All variates are zero, so there is nothing to correct."""
    options = [f"optimizer.name={optimizer}", "federation.rounds=1"]
    same_run(executor, tmp_path, ["method=scaffold", *options], ["method=fedit", *options])


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_scaffold_server_variate_is_the_mean_over_all_clients(executor, tmp_path, weighting):
    """c moves by 1/N times the plain sum of the changes, however the trainables are weighed."""
    words = ["method=scaffold", f"federation.weighting={weighting}", "partition.variant=per-label"]
    recording = Recording(executor(*words))
    server = run(recording, tmp_path)
    assert len({u.rows for u in recording.uploads}) > 1
    total = sum(state["control"].astype(np.float64) for state in server.client_states.values())
    np.testing.assert_allclose(server.state["control"], total / 4, rtol=1e-4, atol=1e-6)


def variate(executor, *words):
    """The control variate of one client after round 1, in which there is no correction."""
    inline = executor("method=scaffold", *words)
    bench = inline.bench
    start = bench.method.initial_state(bench.model.layout, bench.initial, {})
    with deterministic(bench.settings):
        _, report = train_client(bench, to_arrays(start), TrainJob(1, 0))
    return report.state["control"].astype(np.float64)


def test_scaffold_variate_at_small_rates_is_the_mean_gradient(executor):
    """At a rate so small that nothing moves, it does not depend on optimizer or option."""
    found = variate(executor, "optimizer.name=sgd", "optimizer.lr=1e-7")
    exact = variate(executor, "optimizer.name=adam", "optimizer.lr=1e-9")
    assert np.linalg.norm(exact) > 0
    assert np.linalg.norm(found - exact) < 1e-4 * np.linalg.norm(exact)
    first = variate(executor, "optimizer.name=sgd", "optimizer.lr=1e-7", "method.option=I")
    np.testing.assert_allclose(found, first, rtol=1e-3, atol=1e-6)


def test_scaffold_options_differ_where_they_should(executor):
    """Option II is the mean raw gradient under plain SGD and no gradient under Adam."""
    for optimizer, equal in (("sgd", True), ("adam", False)):
        words = [f"optimizer.name={optimizer}", "optimizer.lr=0.05"]
        auto = variate(executor, *words)
        literal = variate(executor, *words, "method.option=II")
        first = variate(executor, *words, "method.option=I")
        assert (np.linalg.norm(literal - auto) < 1e-3 * np.linalg.norm(auto)) == equal
        assert np.linalg.norm(first - auto) > 1e-2 * np.linalg.norm(auto)


def test_scaffold_server_step(executor, tmp_path):
    """The server goes eta_g times as far from the broadcast as the mean does."""
    moved = {}
    for rate in (1, 0.5):
        server = server_of(executor("method=scaffold", f"method.server_lr={rate}"), tmp_path)
        start = server.state["shared"]
        server.step()
        moved[rate] = server.state["shared"] - start
    np.testing.assert_allclose(moved[0.5], 0.5 * moved[1], atol=1e-6)


def test_hetlora_of_equal_ranks_and_norms_is_fedit(executor):
    """Its weights are the norms alone: equal norms are the plain mean."""
    inline = executor("method=hetlora")
    method, layout = inline.bench.method, inline.bench.model.layout
    vectors = []
    for seed in (1, 2, 3):
        shared = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
        norm = method.weight({"shared": shared}, layout, 1.0)
        views = layout.views(shared)
        for name, value in views.items():
            if name.endswith("lora_B"):
                value.div_(norm)  # ||B A|| is linear in B
        vectors.append(shared)
    weights = [method.weight({"shared": v}, layout, 5.0) for v in vectors]
    np.testing.assert_allclose(weights, 1.0, rtol=1e-4)


def test_hetlora_weight_is_the_norm_of_the_update(executor):
    inline = executor("method=hetlora")
    bench = inline.bench
    shared = torch.randn(bench.model.layout.size, generator=torch.Generator().manual_seed(1))
    deltas = bench.model.deltas(shared)
    norm = torch.stack([d.square().sum() for d in deltas.values()]).sum().sqrt()
    found = bench.method.weight({"shared": shared}, bench.model.layout, 1.0)
    assert found == pytest.approx(float(norm), rel=1e-5)


def test_hetlora_prunes_when_asked(executor, tmp_path):
    options = ["method=hetlora", "method.prune=true", "method.gamma=0.5", "method.penalty=5"]
    server = run(executor(*options, "federation.clients_per_round=4"), tmp_path)
    ranks = [int(state["rank"][0]) for state in server.client_states.values()]
    assert set(ranks) <= {1, 2, 4}
    assert min(ranks) < 4


def test_flora_with_one_client_is_merging(executor, tmp_path):
    one = ["federation.clients=1", "federation.clients_per_round=1", "federation.rounds=1"]
    recording = Recording(executor("method=flora", *one))
    server = server_of(recording, tmp_path)
    server.step()
    bench = recording.inner.bench
    vector = bench.initial.clone()
    shared = torch.from_numpy(recording.uploads[0].arrays["shared"])
    server.method.unpack(bench.model.layout, vector, shared)
    merged = bench.model.deltas(vector)
    for layer, value in weights_of(recording.inner, server.broadcast()).items():
        torch.testing.assert_close(value, merged[layer], atol=1e-7, rtol=1e-6)


LIMITED = [name for name in method_names() if method_class(name).takes_limits]


@pytest.mark.parametrize("name", LIMITED)
def test_the_full_profile_is_the_unmasked_run(executor, tmp_path, name):
    same_run(
        executor,
        tmp_path,
        [f"method={name}"],
        [f"method={name}", "federation.compute=full"],
    )


@pytest.mark.parametrize("name", LIMITED)
def test_limited_clients_send_less(executor, tmp_path, name):
    full = run(executor(f"method={name}"), tmp_path)
    limited = run(executor(f"method={name}", "federation.compute=skewed-right"), tmp_path)
    for before, after in zip(full.records[1:], limited.records[1:], strict=True):
        assert after["uploaded_parameters"] < before["uploaded_parameters"]


@pytest.mark.parametrize("selection", ["random", "weight", "gradient"])
def test_head_selection(executor, tmp_path, selection):
    options = ["method=ravan", "method.head_fraction=0.5", f"method.selection={selection}"]
    recording = Recording(executor(*options))
    server = server_of(recording, tmp_path)
    server.step()
    server.step()
    bench = recording.inner.bench
    masks = [u.active for u in recording.uploads]
    sizes = server.blueprint.expected.unit_sizes
    heads = sum(e.shape[0] for e in bench.model.layout.entries if e.name.endswith(".core"))
    assert all(mask[:heads].sum() == heads / 2 for mask in masks)
    same = all(np.array_equal(masks[0], mask) for mask in masks[1:])
    # Norms of the broadcast are the same for everybody: the paper's reason against this choice.
    assert same == (selection == "weight")
    if selection == "weight":
        shared = recording.broadcast["shared"]
        norms, start = [], 0
        for size in sizes[:heads]:
            norms.append(np.linalg.norm(shared[start : start + size]))
            start += size
        for layer in np.arange(heads).reshape(-1, 4):
            best = set(layer[np.argsort(-np.array(norms)[layer])[:2]])
            assert best == {i for i in layer if masks[0][i]}


@pytest.mark.parametrize("allocation", ["gradient", "curvature"])
def test_measured_allocations(executor, tmp_path, allocation):
    inline = executor("method=trishul", f"method.allocation={allocation}")
    server = server_of(inline, tmp_path)
    asked = server.records[0]["uploaded_parameters"]
    assert asked == 4 * len(inline.bench.model.specs), "one number per layer and asked client"
    heads = server.blueprint.heads
    assert sum(heads.values()) == 16
    blocks = {}
    for spec in inline.bench.model.specs:
        score = float(server.survey[spec.name][0])
        blocks[spec.block] = blocks.get(spec.block, 0.0) + score
    order = sorted(blocks, key=blocks.get)
    counts = [heads.get(block, 0) for block in order]
    assert counts == sorted(counts), "more gradient, no fewer heads"
    resumed = server_of(inline, tmp_path)
    assert resumed.blueprint.heads == heads


def test_fedex_counts_its_residual(executor, tmp_path):
    dense = run(executor("method=fedex"), tmp_path)
    factors = run(executor("method=fedex", "method.ship=factors"), tmp_path)
    lora = dense.blueprint.parameters["adapter"]
    head = dense.blueprint.parameters["head"]
    widths = 8 * 64 * 64
    cohort = 3
    assert [r["downloaded_parameters"] for r in dense.records[1:]] == [
        cohort * (lora + head),
        cohort * (lora + head + widths),
    ]
    assert factors.records[2]["downloaded_parameters"] == cohort * (
        lora + head + (cohort + 1) * lora
    )
    assert state_digest(dense.state) == state_digest(factors.state)


def test_full_fine_tuning_trains_every_parameter(executor, tmp_path):
    inline = executor("method=fullft")
    assert inline.bench.model.layout.size == sum(
        p.numel() for p in inline.bench.model.merge(inline.bench.initial).parameters()
    )
    server = server_of(inline, tmp_path)
    start = server.state["shared"]
    server.step()
    assert (server.state["shared"] != start).mean() > 0.9


def test_round_0_is_the_pretrained_backbone_for_every_method(executor, tmp_path):
    """Fed-SB's first broadcast has moved it already; its record of round 0 must not show that."""
    records = {
        name: run(executor(f"method={name}"), tmp_path).records[0] for name in ("fedit", "fedsb")
    }
    for metric in ("loss", "accuracy"):
        assert records["fedsb"][metric] == records["fedit"][metric]


def test_fedsb_counts_its_bases_once_for_each_client(executor, tmp_path):
    inline = executor("method=fedsb", "federation.rounds=3")
    server = run(inline, tmp_path)
    specs, adapters = inline.bench.model.specs, inline.bench.model.adapters
    bases = sum(adapters[spec.name].rank * (spec.d_out + spec.d_in) for spec in specs)
    core = sum(server.blueprint.parameters.values())
    known = set()
    for record in server.records[1:]:
        new = set(record["clients"]) - known
        known |= new
        assert record["downloaded_parameters"] == 3 * core + len(new) * bases
    assert len(known) == 4 and len(server.records[3]["clients"]) == 3


@pytest.mark.parametrize("name", ["trishul", "ravan", "fedit", "ffalora"])
def test_what_is_drawn_from_the_seed_is_not_downloaded(executor, tmp_path, name):
    server = run(executor(f"method={name}"), tmp_path)
    wire = server.blueprint.expected.lengths["shared"]
    assert [r["downloaded_parameters"] for r in server.records[1:]] == [3 * wire, 3 * wire]


def live_components(bench, shared):
    """[layers, r] bool: components whose row of A or column of B is not zero, and so can train."""
    pairs = lora_pairs(bench.method.named_tensors(bench.model.layout, torch.from_numpy(shared)))
    return torch.stack([(a != 0).any(1) | (b != 0).any(0) for _, a, b in pairs])


@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_limited_cohorts_leave_every_component_alive(executor, tmp_path, name):
    """Rounds without a client of full rank must not end the training of the ranks beyond."""
    words = [f"method={name}", "federation.compute=skewed-right", "federation.clients_per_round=1"]
    recording = Recording(executor(*words, "federation.rounds=6", "federation.local_steps=1"))
    server = server_of(recording, tmp_path)
    bench, least = recording.inner.bench, 1.0
    while not server.finished:
        server.step()
        sent = recording.uploads[0].arrays["shared"]
        least = min(least, float(live_components(bench, sent).float().mean()))
    assert least < 1, "choose another seed: no limited client took part"
    assert live_components(bench, server.state["shared"]).all()


def test_hetlora_of_zeros_sent_by_all_is_the_formula(executor, tmp_path):
    """With unsent=zero the padding is averaged whoever takes part; the sent part is the same."""
    words = ["method=hetlora", "federation.compute=skewed-right", "federation.clients_per_round=1"]
    states = {}
    for unsent in ("keep", "zero"):
        inline = executor(*words, f"method.unsent={unsent}")
        server = server_of(inline, tmp_path)
        server.step()
        states[unsent] = (
            server.state["shared"],
            live_components(inline.bench, server.state["shared"]),
        )
    assert states["keep"][1].all() and not states["zero"][1].all()
    sent = states["zero"][0] != 0
    np.testing.assert_array_equal(states["keep"][0][sent], states["zero"][0][sent])


def test_hetlora_head_goes_by_federation_weighting(executor, tmp_path):
    """The norm of B A says nothing of a client's classification head."""
    words = ["method=hetlora", "federation.weighting=size", "partition.variant=per-label"]
    recording = Recording(executor(*words))
    server = server_of(recording, tmp_path)
    server.step()
    bench, rows = recording.inner.bench, [u.rows for u in recording.uploads]
    assert len(set(rows)) > 1

    def heads(shared):
        named = bench.method.named_tensors(bench.model.layout, torch.from_numpy(shared))
        return np.concatenate([v.ravel() for k, v in named.items() if k.startswith("head:")])

    mean = np.average([heads(u.arrays["shared"]) for u in recording.uploads], axis=0, weights=rows)
    np.testing.assert_allclose(heads(server.state["shared"]), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("selection", ["weight", "gradient"])
def test_equal_scores_are_drawn(executor, tmp_path, selection):
    """All cores are zero in round 1: no head may be preferred for its index."""
    options = ["method=ravan", "method.head_fraction=0.25", f"method.selection={selection}"]
    inline = executor(*options)
    bench = inline.bench
    start = to_arrays(bench.method.initial_state(bench.model.layout, bench.initial, {}))
    chosen = np.zeros(4)
    for client in range(4):
        run_ = new_run(bench, start, 1, client)  # its gradient stays zero
        bench.method.start(run_, bench.initial)
        heads = run_.active[: 4 * len(bench.model.specs)].view(-1, 4)
        assert (heads.sum(1) == 1).all()
        chosen += heads.sum(0).numpy()
    assert chosen.min() > 0
    again = new_run(bench, start, 1, 3)
    bench.method.start(again, bench.initial)
    assert torch.equal(again.active, run_.active)


@given(st.integers(1, 400), st.integers(1, 1000), st.integers(1, 1000))
def test_shares_of_a_number_are_exact(count, first, second):
    """Against integer arithmetic on thousandths."""
    share = exact_share(count, first / 1000, second / 1000)
    assert share * 10**6 == count * first * second
    assert math.ceil(exact_share(5, 0.8, 0.75)) == 3


def test_the_clip_leaves_inactive_scalars_alone(executor):
    inline = executor("method=trishul", "method.scalar_max=0.5", "method.head_fraction=0.5")
    bench = inline.bench
    start = to_arrays(bench.method.initial_state(bench.model.layout, bench.initial, {}))
    run_ = new_run(bench, start, 1, 0)
    bench.method.start(run_, bench.initial)
    bench.method.after_step(run_, 1, 4)
    trained = gradient_mask(run_, bench.method.wire(run_.layout))
    masks = {k: v.bool() for k, v in run_.layout.views(trained).items() if k.endswith(".scale")}
    assert masks
    for name, mask in masks.items():
        scale = run_.layout.views(run_.vector)[name]
        assert 0 < mask.sum() < len(mask)
        assert (scale[mask] == 0.5).all() and (scale[~mask] == 1).all()


@pytest.mark.parametrize("allocation", ["gradient", "curvature"])
def test_measured_scores_cannot_give_one_block_all_heads(executor, allocation, caplog):
    def heads(*words):
        inline = executor("method=trishul", f"method.allocation={allocation}", *words)
        site = inline.bench.site
        blocks = list(site.blocks())
        survey = {
            layer.name: torch.tensor([1e9 if layer.block == blocks[0] else 1e-9])
            for layer in site.layers
        }
        found = inline.bench.method.adapters(replace(site, survey=survey))
        return {layer.block: found[layer.name].heads for layer in site.layers}, site, found

    counts, site, found = heads()
    layer = site.layers[0]
    cap = min(layer.d_out, layer.d_in) // found[layer.name].rank
    total = 4 * len(counts)
    assert counts[layer.block] == cap < total == sum(counts.values())
    free, _, _ = heads("adapter.overflow=independent")
    assert free[layer.block] == total
    wide, _, _ = heads("adapter.init=random_normal", f"adapter.heads={total}", "adapter.rank=8")
    assert sum(wide.values()) == total * len(counts)


@pytest.mark.parametrize("name", ["fedit", "ffalora", "fedex", "flora", "flexlora", "hetlora"])
def test_alpha_scales_the_update(executor, tmp_path, name):
    """Exactness, folding and export hold at alpha = 3 r, where every factor of alpha / r counts."""
    own = ["method.truncate=false"] if name == "flexlora" else []
    one = ["federation.clients=1", "federation.clients_per_round=1"]
    recording = Recording(executor(f"method={name}", "adapter.alpha=24", "budget=8", *own, *one))
    server = server_of(recording, tmp_path)
    server.step()
    bench = recording.inner.bench
    if name != "ffalora":
        assert {adapter.scale for adapter in bench.model.adapters.values()} == {3.0}
    vector = bench.initial.clone()
    shared = torch.from_numpy(recording.uploads[0].arrays["shared"])
    server.method.unpack(bench.model.layout, vector, shared)
    clients = bench.model.deltas(vector)
    found = weights_of(recording.inner, server.broadcast())
    for layer, update in clients.items():
        adapter = bench.model.adapters[layer]
        factors = bench.model.layout.views(vector)
        left = factors[f"{layer}.lora_B"].double()
        right = factors.get(f"{layer}.lora_A", bench.model.constants(layer).get("lora_A"))
        torch.testing.assert_close(update, 24 / adapter.rank * left @ right.double())
        torch.testing.assert_close(found[layer], update, atol=1e-6, rtol=1e-5)
    trained = global_model(bench, server.broadcast(), 1)
    if not trained.base:
        folder = export_peft(bench.model, trained, tmp_path / "adapter", "base")
        tensors = load_file(folder / "adapter_model.safetensors")
        for layer, update in found.items():
            path = f"base_model.model.{layer}"
            left, right = (tensors[f"{path}.lora_{side}.weight"].double() for side in "BA")
            torch.testing.assert_close(left @ right, update, atol=1e-6, rtol=1e-5)


def test_blocks_are_scored_by_the_weights_asked_for(executor):
    for scores, count in (("adapted", 2), ("attention", 4), ("all", 6)):
        inline = executor("method=trishul", f"method.block_scores={scores}")
        site = inline.bench.site
        weights = {
            n: p.double().square().sum()
            for n, p in inline.bench.model.merge(inline.bench.initial).named_parameters()
        }
        assert len(site.scored) == count * len(site.blocks())
        for layer in site.scored:
            assert site.squared_norms[layer.name] == pytest.approx(
                float(weights[layer.name + ".weight"]), rel=1e-9
            )
    # A block whose MLP outweighs the others' gets more heads only where all weights score.
    heavy = site.scored[-1]
    assert "mlp" in heavy.name
    norms = dict(site.squared_norms) | {heavy.name: 1e6}
    found = inline.bench.method.adapters(replace(site, squared_norms=norms))
    heads = {layer.block: found[layer.name].heads for layer in site.layers}
    assert max(heads, key=heads.get) == heavy.block
    plain = executor("method=trishul", "method.block_scores=adapted").bench
    found = plain.method.adapters(replace(plain.site, squared_norms=norms))
    assert max(adapter.heads for adapter in found.values()) < max(heads.values())


@pytest.mark.parametrize("share", [1, 0.5])
def test_the_prox_on_the_change_shrinks_the_change(executor, share):
    words = ["method=trishul", "method.prox_on=change", "method.lam=2"]
    inline = executor(*words, f"method.head_fraction={share}")
    bench = inline.bench
    start = bench.method.initial_state(bench.model.layout, bench.initial, {})
    generator = torch.Generator().manual_seed(0)
    start["shared"] = torch.randn(start["shared"].shape, generator=generator)
    run_ = new_run(bench, to_arrays(start), 1, 0)
    bench.method.start(run_, bench.initial)
    before = run_.vector.clone()
    mask = gradient_mask(run_, bench.method.wire(run_.layout))
    step = 0.1 * torch.randn(before.shape, generator=generator)
    step = step if mask is None else step * mask
    run_.vector.add_(step)
    bench.method.after_step(run_, 1, 4)
    banks = [run_.layout.core_banks(v) for v in (before, step, run_.vector)]
    for old, change, new in zip(*banks, strict=True):
        u, s, vt = torch.linalg.svd(change.double())
        shrunk = u @ torch.diag_embed((s - 2 * 0.01).clamp(min=0)) @ vt
        torch.testing.assert_close(new.double(), old.double() + shrunk, atol=1e-5, rtol=1e-5)
