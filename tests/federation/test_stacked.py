"""Clients of a cohort that train in one forward (``federation.stacked``)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_runs import PUBLISHED
from pydantic import ValidationError
from stacked_layers import check_stacked
from torch import nn

from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.contract.methods import without_timings
from trishul_ray.errors import InputError
from trishul_ray.federation.checkpoint import CheckpointStore
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.inline import InlineDriver, InlineExecutor
from trishul_ray.federation.messages import TrainJob, units_of_work
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.server import Server
from trishul_ray.federation.worker.local import train_client, train_clients
from trishul_ray.methods.base import method_class
from trishul_ray.storage.store import Store

STACKABLE = [name for name in PUBLISHED if not method_class(name).train_all]


def relative(found, expected, moved=None):
    """Return the distance of two arrays over the norm of the second, or of its change."""
    size = np.linalg.norm(expected if moved is None else expected - moved)
    distance = np.linalg.norm(np.subtract(found, expected, dtype=np.float64))
    return distance / size if size else distance


#: Adam divides by the size of a gradient, and so amplifies the rounding of gradients near 0.
AMPLIFIED = 1e-3


@pytest.fixture
def second_round(small, tmp_path):
    """``second_round("method=ravan", ...)`` returns executor, broadcast and states of round 2."""

    def after_one(*overrides):
        unread = ["evaluation.diagnostics_every=0", "evaluation.limit=8"]
        experiment = small("resources.backend=inline", *unread, *overrides)
        inline = InlineExecutor(experiment, prepare_run(experiment))
        store = CheckpointStore(Store.open(str(tmp_path / experiment.id)), experiment.id)
        server = Server(experiment, inline, store, "a")
        server.step()
        return inline, server.broadcast(), server.checkpoint.client_states

    return after_one


VARIANTS = [[f"method={name}"] for name in STACKABLE] + [
    ["method=fedit", "adapter.path=factored", "optimizer.clip_norm=0.5"],
    ["method=fedit", "adapter.alpha=16", "model.train_head=false"],
    ["method=trishul", "adapter.path=factored", "model.gradient_checkpointing=true"],
    ["method=trishul", "method.prox_on=change", "optimizer.name=sgd", "optimizer.momentum=0.9"],
    ["method=ravan", "federation.compute=uniform", "optimizer.weight_decay=0.1"],
    ["method=ravan", "method.head_fraction=0.5", "method.selection=gradient"],
    ["method=scaffold", "method.option=I"],
    ["method=fedprox", "method.adapter=multihead"],
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=" ".join)
def test_stacked_client_equals_single_client(overrides, second_round):
    """After several steps, updates, client states and losses differ only by rounding."""
    inline, broadcast, states = second_round(*overrides)
    jobs = [TrainJob(2, client, states.get(client, {})) for client in (0, 1, 3)]
    with deterministic(inline.experiment):
        alone = [train_client(inline.context, broadcast, job) for job in jobs]
        together = train_clients(inline.context, broadcast, jobs)
    for (upload, report), (shared, beside) in zip(alone, together, strict=True):
        assert (shared.client, shared.rows) == (upload.client, upload.rows)
        assert np.array_equal(shared.active, upload.active)
        start = broadcast.shared if len(broadcast.shared) == len(upload.arrays.shared) else None
        assert relative(shared.arrays.shared, upload.arrays.shared, start) < AMPLIFIED
        for name, expected in upload.arrays.extra.items():
            assert relative(shared.arrays.extra[name], expected) < AMPLIFIED
        for name, expected in report.state.items():
            assert relative(beside.state[name], expected) < AMPLIFIED
        assert beside.loss == pytest.approx(report.loss, rel=1e-5)
        assert beside.uploaded == report.uploaded and beside.metrics.keys() == report.metrics.keys()


def test_stacked_client_equals_single_client_in_bf16(second_round):
    """Compare up to the rounding of bf16 in a forward, 2^-8 of each entry, over four steps."""
    for method in ("fedit", "fedex", "trishul"):
        options = ["model.precision=bf16", "optimizer.name=sgd", "optimizer.lr=0.1"]
        inline, broadcast, _ = second_round(f"method={method}", *options)
        jobs = [TrainJob(2, client) for client in (0, 1)]
        with deterministic(inline.experiment):
            alone = [train_client(inline.context, broadcast, job) for job in jobs]
            together = train_clients(inline.context, broadcast, jobs)
        for (upload, _), (shared, _) in zip(alone, together, strict=True):
            arrays = shared.arrays.shared, upload.arrays.shared
            assert relative(*arrays, broadcast.shared) < 0.05


@given(
    adapter=st.sampled_from(
        [
            *(LoRA(2), LoRA(3, scale=0.5), LoRA(2, train_A=False)),
            *(MultiHead(2, 2), MultiHead(2, 3, train_scale=False)),
        ]
    ),
    path=st.sampled_from(["auto", "merged", "factored"]),
    clients=st.integers(1, 4),
    tokens=st.integers(1, 12),
    widths=st.tuples(st.integers(6, 9), st.integers(6, 9)),
    seed=st.integers(0, 99),
)
def test_stacked_layer_equals_each_clients_layer(adapter, path, clients, tokens, widths, seed):
    check_stacked(adapter, path, clients, tokens, widths, seed)


def test_clients_are_grouped_except_in_a_survey():
    jobs = [TrainJob(1, client) for client in range(5)]
    assert units_of_work(jobs, 2) == [[0, 1], [2, 3], [4]] and units_of_work([], 2) == []
    assert units_of_work([TrainJob(0, client) for client in range(3)], 3) == [[0], [1], [2]]


def run_of(experiment, drive_to_end):
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    try:
        return drive_to_end(driver)
    finally:
        driver.close()


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fedit", "uploads.codec=int8", "uploads.error_feedback=true"],
        ["method=trishul", "method.allocation=gradient", "evaluation.diagnostics_cohort=all"],
    ],
    ids=" ".join,
)
def test_stacked_run_equals_unstacked_run_within_rounding(overrides, small, drive_to_end):
    pytest.importorskip("trishul_ray.lab")
    overrides = ["resources.backend=inline", "optimizer.lr=0.003", *overrides]
    alone = run_of(small(*overrides), drive_to_end)
    together = run_of(small(*overrides, "federation.stacked=2"), drive_to_end)
    one, other = alone.checkpoint, together.checkpoint
    assert [record.clients for record in one.records] == [r.clients for r in other.records]
    # A code of 8 bits may round to the other side.
    bound = 0.05 if "uploads.codec=int8" in overrides else 1e-3
    assert relative(other.state.shared, one.state.shared) < bound
    for record, expected in zip(other.records[1:], one.records[1:], strict=True):
        assert record.train_loss == pytest.approx(expected.train_loss, rel=bound)
        assert record.uploaded_parameters == expected.uploaded_parameters


def test_larger_stack_is_the_whole_cohort(small, drive_to_end):
    def states(stacked):
        experiment = small("resources.backend=inline", f"federation.stacked={stacked}")
        result = run_of(experiment, drive_to_end)
        return result.digest, without_timings(result.checkpoint.records)

    assert states(3) == states(50) != states(2)


def test_stack_size_changes_the_id(small):
    ids = {small(f"federation.stacked={count}").id for count in (1, 2, 3)}
    assert len(ids) == 3 and small().id in ids


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=fullft"], "federation.stacked=2 needs a method with adapters ("),
        (["model.dropout=true"], "with dropout; set federation.stacked=1 or model.dropout=false"),
        (["adapter.dropout=0.1"], "with dropout; set federation.stacked=1 or adapter.dropout=0"),
        (["federation.stacked=0"], "federation.stacked"),
    ],
)
def test_unstackable_options_are_rejected(small, overrides, message):
    with pytest.raises((InputError, ValidationError)) as caught:
        small("federation.stacked=2", *overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def stacked_model(model, targets):
    adapters = {name: LoRA(2) for name in targets}
    adapted = AdaptedModel(model, adapters, seed=0, train_head=True)
    vectors = adapted.initial().repeat(2, 1)
    return adapted, vectors, torch.zeros_like(vectors)


def test_head_of_other_layers_is_rejected():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classifier = nn.Linear(4, 4), nn.LayerNorm(4)

    adapted, _, _ = stacked_model(Net(), ["body"])
    with pytest.raises(InputError, match=r"'classifier.weight' .* belongs to a LayerNorm"):
        adapted.check_stackable()


def test_inputs_of_mixed_clients_are_rejected():
    """Test a model that puts positions before examples."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classifier = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.classifier(self.body(x.transpose(0, 1)).mean(dim=0))

    adapted, vectors, grads = stacked_model(Net(), ["body"])
    adapted.bind(Trained(vectors), grads)
    with pytest.raises(InputError, match=r"inputs of shape \(6, 4, 4\) for 4 examples"):
        adapted.forward(x=torch.randn(4, 6, 4))


def test_model_is_restored_after_a_stack():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classifier = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.classifier(self.body(x))

    net = Net()
    x = torch.randn(4, 4)
    before = net(x)
    adapted, vectors, grads = stacked_model(net, ["body"])
    adapted.bind(Trained(vectors), grads)
    adapted.forward(x=x).sum().backward()
    assert grads.any()
    adapted.bind(Trained(vectors[0]))
    torch.testing.assert_close(adapted.forward(x=x), before)
    adapted.unbind()
    torch.testing.assert_close(adapted.forward(x=x), before, rtol=0, atol=0)
