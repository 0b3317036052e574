"""Identities that hold between the methods of the paper's comparison."""

import numpy as np
import pytest
import torch

from trishul_ray.federation.checkpoint import CheckpointStore, state_digest
from trishul_ray.federation.jobs import to_tensors
from trishul_ray.federation.server import Server
from trishul_ray.federation.workbench import frozen_part, global_model
from trishul_ray.methods.registry import method_class, method_names
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


def test_scaffold_variates(executor, tmp_path):
    """Option II equals the mean raw gradient under SGD; c is the mean of all c_i over N."""
    options = ["method=scaffold", "optimizer.name=sgd", "optimizer.lr=0.05"]
    server = run(executor(*options), tmp_path)
    total = sum(state["control"] for state in server.client_states.values())
    np.testing.assert_allclose(server.state["control"], total / 4, atol=1e-6)
    method = executor(*options).bench.method
    run_ = type("Run", (), {})()
    torch.manual_seed(0)
    start, correction, own = torch.randn(5), torch.randn(5), torch.randn(5)
    gradients = torch.randn(3, 5)
    lr = 0.05
    run_.optimizer = server.experiment.optimizer
    end = start - lr * (gradients + correction).sum(0)
    run_.layout, run_.vector = None, end
    run_.memory = {
        "start": start,
        "own": own,
        "correction": correction,
        "gradients": gradients.sum(0),
    }
    pack, method_pack = method.pack, lambda layout, vector: vector
    method.pack = method_pack
    try:
        _, kept = method.upload(run_, 3)
    finally:
        method.pack = pack
    torch.testing.assert_close(kept["control"], gradients.mean(0), atol=1e-5, rtol=1e-4)


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
