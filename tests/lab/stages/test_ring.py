"""Sums in fixed point: the same bits in every order, close to the float sum, never an overflow."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from method_runs import KINDS, initial_state
from tiny_run import SMALL

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.messages import TrainJob
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.reduce import (
    FAN_IN,
    Reducer,
    combine,
    finish,
    partial_sum,
    round_units,
)
from trishul_ray.lab.ring import Ring
from trishul_ray.methods.base import build_method
from trishul_ray.stages import Change, Sender

values = arrays(np.float64, (7, 5), elements=st.floats(-1e3, 1e3))


def encoded(ring, row, weight=1.0):
    sender = Sender(0, 1, 0, weight, ())
    return ring.encode_change(Change(row, {}), sender).shared


@given(
    rows=values, weights=arrays(np.int64, 7, elements=st.integers(1, 500)), seed=st.integers(0, 10)
)
def test_the_sum_has_the_same_bits_in_every_order_and_its_mean_is_rounded_once_a_client(
    rows, weights, seed
):
    """Its error is at most m 2^-(f+1) / (sum of weights), half of what cutting off would make."""
    ring = Ring(32, len(rows))
    integers = np.array([encoded(ring, *each) for each in zip(rows, weights, strict=True)])
    order = np.random.default_rng(seed).permutation(len(rows))
    total = integers.sum(axis=0)
    first, rest = integers[order[:3]].sum(axis=0), integers[order[3:]].sum(axis=0)
    np.testing.assert_array_equal(total, rest + first)
    error = np.abs(ring.decode(total) / weights.sum() - np.average(rows, axis=0, weights=weights))
    assert (error <= len(rows) * 2.0**-33 / weights.sum() + 1e-11).all()


@pytest.mark.parametrize(("bits", "clients"), [(8, 1), (32, 3), (32, 1_000_000), (48, 17)])
def test_as_many_clipped_values_as_clients_do_not_overflow(bits, clients):
    ring = Ring(bits, clients)
    huge, clipped = ring.encode(np.array([1e300, -1e300, 0.5]))
    assert clipped == 2
    for value in huge[:2].tolist():
        assert abs(value) * clients < 2**63
    assert ring.decode(huge[2:])[0] == 0.5
    assert ring.encode(np.array([0.99 * ring.largest]))[1] == 0


def test_what_is_not_finite_is_left_for_the_server_to_refuse():
    spoilt = np.array([0.0, np.nan], dtype=np.float32)
    assert np.isnan(encoded(Ring(32, 3), spoilt)).any()


@pytest.fixture(scope="module")
def trained(cache):
    """Uploads of 20 clients in the ring and as values, with the reducer of each."""

    def make(*overrides):
        options = [
            *SMALL, "resources.backend=inline", f"storage.cache={cache}", "method=ravan",
            "method.head_fraction=0.5", "clients=20", "clients_per_round=20", "local_steps=1",
            "weighting=size", "partition.variant=per-label", *overrides,
        ]  # fmt: skip
        experiment = load_experiment(None, options)
        inline = InlineExecutor(experiment, prepare_run(experiment))
        blueprint = inline.describe({})
        before = initial_state(inline)
        uploads = [inline.train(before, [TrainJob(1, client)])[0][0] for client in range(20)]
        reducer = Reducer(inline.bench.method, blueprint.layout, "size", blueprint.expected)
        return inline, before, uploads, reducer

    return make


def test_any_grouping_of_masked_weighted_uploads_has_the_same_bits_near_the_float_mean(trained):
    inline, before, uploads, reducer = trained("server.sum=ring")
    assert len({upload.rows for upload in uploads}) > 1
    assert any(upload.active is not None for upload in uploads)
    unmoved = replace(before, shared=np.zeros_like(before.shared))
    groupings = [
        [uploads[:FAN_IN], uploads[FAN_IN:]],
        [uploads[::-1]],
        [[upload] for upload in uploads[10:] + uploads[:10]],
    ]
    means = []
    for groups in groupings:
        total = combine([partial_sum(group, reducer) for group in groups])
        means.append(finish(inline.bench.stages.total(total), unmoved, reducer)[0].shared)
    for other in means[1:]:
        np.testing.assert_array_equal(other, means[0])
    _, _, plain, floats = trained()
    exact = finish(partial_sum(plain, floats), before, floats)[0].shared
    np.testing.assert_allclose(before.shared + means[0], exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_what_too_few_clients_have_trained_stays_as_it_was(trained, least):
    inline, before, uploads, reducer = trained("server.sum=ring", f"server.min_clients={least}")
    unmoved = replace(before, shared=np.zeros_like(before.shared))
    uploads = [upload for upload in uploads if upload.active is not None][:4]
    count = np.sum([upload.active for upload in uploads], axis=0)
    assert {0, 1, 2} < {*count.tolist()}
    total = combine([partial_sum([upload], reducer) for upload in uploads])
    mean, moved = finish(inline.bench.stages.total(total), unmoved, reducer)
    np.testing.assert_array_equal(moved, count >= least)
    entries = np.repeat(moved, reducer.expected.unit_sizes)
    assert mean.shared[entries].any() and not mean.shared[~entries].any()


def test_a_run_says_how_much_too_few_clients_have_trained(edge_run):
    words = ["method=ravan", "rounds=1", "server.sum=ring", "evaluation.diagnostics_every=0"]
    few = edge_run(*words, "method.head_fraction=0.25")
    assert few.checkpoint.records[1].stages["withheld_units"] > 0
    assert any("server.min_clients=2: so many of 3 clients do not" in line for line in few.events)
    assert any("is the simulator's view" in line for line in few.events)
    every = edge_run(*words)
    assert every.checkpoint.records[1].stages["withheld_units"] == 0
    assert not any("min_clients" in line for line in every.events)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clients_per_round=1"], r"^server.min_clients=2 exceeds federation.clients_per_round=1"),
        (["server.min_clients=3", "privacy.noise=1"], r"^server.min_clients=3 has no .* privacy"),
    ],
)
def test_sums_that_are_never_or_always_used_are_refused(small, words, said):
    with pytest.raises(InputError, match=said):
        small("server.sum=ring", *words)


@pytest.mark.parametrize("method", [*KINDS, "rolora"])  # half of whose units rest
def test_a_round_in_the_ring_is_a_round(method, edge_run):
    options = [f"method={method}", "rounds=1"]
    plain, ring = edge_run(*options), edge_run(*options, "server.sum=ring")
    one, other = plain.checkpoint.state.shared, ring.checkpoint.state.shared
    np.testing.assert_allclose(other, one, rtol=1e-6, atol=2e-7)
    record = ring.checkpoint.records[1]
    assert record.stages["clipped_entries"] == 0
    # If units rest, a client also sends the weight of each.
    built = build_method(load_experiment(None, options).method)
    rests = round_units(built, ring.blueprint.layout, 1)
    weights = 0 if rests is None else len(rests) * len(record.clients)
    assert record.uploaded_bytes == 8 * (record.uploaded_parameters + weights)
    shown, known = record.metrics(), plain.checkpoint.records[1].metrics()
    for name in ("alignment", "delta_alignment", "entropy"):
        if name in known:
            assert shown[name] == pytest.approx(known[name], rel=1e-3), name


def test_clipped_entries_are_counted_over_the_whole_cohort(edge_run, monkeypatch):
    monkeypatch.setattr(Ring, "largest", property(lambda ring: ring.step))  # clips all but zeros
    result = edge_run("method=fedit", "rounds=1", "server.sum=ring")
    record = result.checkpoint.records[1]
    numbers = len(result.checkpoint.state.shared)
    assert numbers < record.stages["clipped_entries"] <= len(record.clients) * numbers


def test_a_resumed_run_has_the_same_bytes(edge_run, assert_same, tmp_path):
    options = ["method=trishul", "server.sum=ring", "server.optimizer=sgd"]
    again = edge_run(*options, stop=1)
    assert_same(again, edge_run(*options, f"storage.runs={tmp_path / 'whole'}"))


def test_fraction_bits_without_the_ring_are_refused(small):
    with pytest.raises(InputError, match=r"server: fraction_bits=40 .* sum='float'"):
        small("server.fraction_bits=40")
