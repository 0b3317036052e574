"""Learning rates per local step, gradient clipping, and the fields that depend on them."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trishul_ray.config.fields import OptimizerConfig
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.local import LocalSteps, train_client
from trishul_ray.federation.worker.schedule import learning_rates
from trishul_ray.runtime.proportions import exact_fraction

SPANS = st.tuples(st.integers(1, 6), st.integers(1, 9))


def rates_of(settings, rounds, steps):
    """Return the rates [rounds, steps] float64."""
    return np.array([learning_rates(settings, r, rounds, steps) for r in range(1, rounds + 1)])


@given(SPANS, st.floats(1e-6, 1.0))
def test_the_constant_schedule_is_the_learning_rate(span, lr):
    assert (rates_of(OptimizerConfig(lr=lr), *span) == lr).all()


@given(SPANS, st.floats(0, 0.95), st.sampled_from(["linear", "cosine"]))
def test_decay_over_a_run_matches_torch_schedulers(span, warmup, name):
    """torch's schedulers have the same closed form, stepped once per local step."""
    rounds, steps = span
    total = rounds * steps
    settings = OptimizerConfig(lr=0.5, schedule=name, warmup=warmup)
    rates = rates_of(settings, rounds, steps).ravel()
    rise = math.ceil(exact_fraction(total, warmup))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    fall = total - rise
    if name == "linear":
        after = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=fall)
    else:
        after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, fall))
    expected = [0.5 * (t + 1) / rise for t in range(rise)]
    for _ in range(fall):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        after.step()
    np.testing.assert_allclose(rates, expected, rtol=1e-9, atol=1e-12)
    assert (rates > 0).all()


def test_the_warm_up_has_no_step_too_many():
    """In binary, 0.07 x 100 is slightly more than 7."""
    for percent in range(100):
        for total in range(1, 101):
            settings = OptimizerConfig(lr=1.0, warmup=percent / 100)
            rates = learning_rates(settings, 1, 1, total)
            rise = -(-percent * total // 100)
            assert sum(rate < 1 for rate in rates) == max(0, rise - 1)


def test_schedule_per_round_restarts_every_round():
    settings = OptimizerConfig(lr=1.0, schedule="linear", schedule_over="round", warmup=0.5)
    rates = rates_of(settings, 3, 4)
    np.testing.assert_allclose(rates, [[0.5, 1.0, 1.0, 0.5]] * 3)


@pytest.fixture
def short(small):
    """``short("method=ravan", ...)`` returns a small experiment of two rounds of three steps."""
    sizes = ("federation.rounds=2", "federation.local_steps=3", "resources.backend=inline")
    return functools.partial(small, *sizes)


def round_of(experiment, number):
    executor = InlineExecutor(experiment, prepare_run(experiment))
    context = executor.context
    broadcast = context.method.initial_state(context.model.layout, context.initial, {})
    upload, report = train_client(context, broadcast.map(to_array), TrainJob(number, 0))
    return context, upload.arrays.shared, report


def test_a_step_uses_its_own_rate(short):
    """Adam's first step is η times a sign, so one local step shows the round's rate."""
    overrides = ["method=ffalora", "optimizer.schedule=linear", "optimizer.lr=0.01"]
    experiment = short(*overrides, "federation.local_steps=1", "federation.rounds=4")
    moved = []
    for number in (1, 2, 4):
        context, shared, _ = round_of(experiment, number)
        start = context.method.pack(context.model.layout, context.initial).numpy()
        moved.append(np.abs(shared - start).max())
    np.testing.assert_allclose(moved, [0.01, 0.0075, 0.0025], rtol=1e-3)


@pytest.mark.parametrize("every", [1, 2])
def test_the_threshold_follows_the_rate(short, every):
    experiment = short(
        "method.lam=0.5",
        f"method.prox_every={every}",
        "optimizer.lr=0.01",
        "optimizer.schedule=linear",
        "federation.local_steps=4",
    )
    _, _, report = round_of(experiment, 2)
    rates = learning_rates(experiment.optimizer, 2, 2, 4)
    expected = 0.5 * sum(rates[-every:])
    assert report.spectra["threshold"][0] == pytest.approx(expected, rel=1e-12)
    assert expected < 0.5 * 0.01 * every


def test_scaffold_variate_under_schedule_is_mean_gradient(short):
    """With option II and a schedule: the mean of raw gradients, each with its step's rate."""
    overrides = [
        "method=scaffold",
        "method.option=II",
        "optimizer.name=sgd",
        "optimizer.lr=0.01",
        "optimizer.warmup=0.9",
    ]
    experiment = short(*overrides)
    executor = InlineExecutor(experiment, prepare_run(experiment))
    context, seen = executor.context, []
    broadcast = context.method.initial_state(context.model.layout, context.initial, {})
    inner = context.method.before_step
    context.method.before_step = lambda run: (seen.append(run.grad.double().clone()), inner(run))
    upload, _ = train_client(context, broadcast.map(to_array), TrainJob(1, 0))
    rates = learning_rates(experiment.optimizer, 1, 2, 3)
    assert len(set(rates)) == 3
    mean = sum(rate * grad for rate, grad in zip(rates, seen, strict=True)) / sum(rates)
    np.testing.assert_allclose(upload.arrays.extra["control"], mean.numpy(), rtol=1e-2, atol=1e-4)


def test_local_epochs_read_each_row_equally_often(short):
    experiment = short(
        "method=scaffold", "local_epochs=2", "partition.variant=per-label", "batch_size=128"
    )
    executor = InlineExecutor(experiment, prepare_run(experiment))
    context = executor.context
    sizes = context.shards.sizes
    assert sizes.min() < 128 < sizes.max()
    broadcast = context.method.initial_state(context.model.layout, context.initial, {})
    for client in map(int, (sizes.argmin(), sizes.argmax())):
        job = TrainJob(1, client)
        (trained,) = LocalSteps(context, broadcast.map(to_array), [job]).clients
        rows, counts = np.unique(trained.order, return_counts=True)
        np.testing.assert_array_equal(rows, context.shards.shard(client))
        assert counts.min() == 2 and counts.sum() < 2 * len(rows) + trained.order.shape[1]
        assert len(trained.run.rates) == trained.run.steps == len(trained.order)
        upload, _ = train_client(context, broadcast.map(to_array), job)
        assert np.isfinite(upload.arrays.shared).all()


def test_a_gradient_is_clipped_to_the_norm(short):
    options = [
        "method=ffalora",
        "optimizer.name=sgd",
        "optimizer.lr=1",
        "federation.local_steps=1",
    ]

    def moved(*more):
        context, shared, _ = round_of(short(*options, *more), 1)
        return shared - context.method.pack(context.model.layout, context.initial).numpy()

    free, clipped = moved(), moved("optimizer.clip_norm=0.001")
    assert np.linalg.norm(free) > 0.01
    assert np.linalg.norm(clipped) == pytest.approx(0.001, rel=1e-3)
    np.testing.assert_allclose(clipped, free * (0.001 / np.linalg.norm(free)), atol=1e-7)
    assert (moved("optimizer.clip_norm=1000") == free).all()
