"""Capacities of clients, and the test rows that a worker context evaluates."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trishul_ray.config.fields import COMPUTE_LEVELS, COMPUTE_PROFILES
from trishul_ray.data.sampling import capacities
from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.messages import EvalJob, TrainJob, to_array
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.context import build_context, new_run
from trishul_ray.federation.worker.evaluation import EvaluatedModel, evaluate_chunk
from trishul_ray.runs.runner import central_twin

CUSTOM = ["federation.compute=custom", "federation.compute_shares=[0, 0.5, 0.5, 0]"]


def counts(profile, clients, shares=None, seed=0):
    drawn = capacities(profile, seed, clients, shares)
    assert len(drawn) == clients
    return [drawn.count(level) for level in COMPUTE_LEVELS]


@pytest.mark.parametrize(
    ("profile", "clients", "expected"),
    [
        ("skewed-right", 20, [10, 6, 3, 1]),
        ("bell", 20, [2, 8, 8, 2]),
        ("uniform", 50, [13, 13, 12, 12]),
        ("full", 7, [0, 0, 0, 7]),
        ("skewed-right", 3, [2, 1, 0, 0]),  # 1.5, 0.9, 0.45, 0.15
    ],
)
def test_every_seed_has_the_counts_of_the_profile(profile, clients, expected):
    for seed in range(20):
        assert counts(profile, clients, seed=seed) == expected


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any), st.integers(1, 300))
def test_counts_match_proportions_within_one_client(parts, clients):
    shares = tuple(part / sum(parts) for part in parts)
    for count, share in zip(counts("custom", clients, shares), shares, strict=True):
        assert abs(count - clients * share) < 1 + 1e-9
        assert count == 0 or share > 0


def test_the_seed_draws_which_clients_are_limited():
    profile = "skewed-right"
    full = [capacities(profile, seed, 20).index(1.0) for seed in range(400)]
    assert np.bincount(full, minlength=20).min() > 5  # 20 each on average
    # The same draw as a named profile of these proportions.
    shares = COMPUTE_PROFILES[profile]
    assert capacities("custom", 3, 20, shares) == capacities(profile, 3, 20)


def test_clients_of_a_run_have_custom_capacities(cache):
    experiment = load_experiment(None, ["model.init=random", *CUSTOM, f"storage.cache={cache}"])
    context = InlineExecutor(experiment, prepare_run(experiment)).context
    start = context.method.initial_state(context.model.layout, context.initial, {}).map(to_array)
    capacities = {new_run(context, start, 1, client).capacity for client in range(10)}
    assert capacities == {0.5, 0.75}
    assert new_run(context, start, 1, None).capacity == 1.0


def test_the_central_twin_has_full_capacity():
    twin = central_twin(load_experiment(None, CUSTOM))
    assert twin.federation.compute == "full" and twin.federation.compute_shares is None
    assert load_experiment(None, CUSTOM).id != load_experiment().id


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["federation.compute=custom"], "set shares if and only if compute=custom"),
        (["federation.compute_shares=[1, 0, 0, 0]"], "set shares if and only if compute=custom"),
        ([CUSTOM[0], "federation.compute_shares=[1, 1, 0, 0]"], "that sum to 1"),
        ([CUSTOM[0], "federation.compute_shares=[1.5, -0.5, 0, 0]"], "0 or more"),
        ([CUSTOM[0], "federation.compute_shares=[1, 0]"], "federation.compute_shares"),
        (["method=fedit", *CUSTOM], "federation.compute='custom' needs a method"),
    ],
)
def test_invalid_shares_are_reported_in_one_line(overrides, message):
    with pytest.raises(InputError) as caught:
        load_experiment(None, overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def evaluated_rows(small):
    """``evaluated_rows("seed=1", ...)`` returns the test rows that a run evaluates."""

    def rows(*overrides):
        experiment = small(*overrides)
        return build_context(experiment, prepare_run(experiment)).scored["test"][1]

    return rows


def test_seeds_and_methods_share_evaluation_rows(evaluated_rows):
    first = evaluated_rows("seed=0")
    assert len(first) == len(np.unique(first)) == 64
    for overrides in (["seed=1"], ["seed=2", "method=fedit"], ["seed=3", "budget=2"]):
        assert evaluated_rows(*overrides).tolist() == first.tolist()
    # A subset drawn from all rows, instead of the first rows.
    assert first.max() > 400 and first.tolist() != list(range(64))


def test_seeds_methods_and_partitions_share_validation_rows(small):
    share = "data.validation_share=0.2"

    def rows(*overrides, change=lambda experiment: experiment):
        experiment = change(small(share, *overrides))
        prepared = prepare_run(experiment)
        split, chosen = build_context(experiment, prepared).scored["validation"]
        trained = min(len(prepared.dataset.train), experiment.data.train_limit or 10**9)
        assert prepared.shards.sizes.sum() == trained
        return split.fingerprint, chosen.tolist(), prepared.sources["rows"]

    first = rows("seed=0")
    assert len(first[1]) == 64
    for overrides in (["seed=1", "method=fedit"], ["partition.kind=iid", "federation.clients=7"]):
        assert rows(*overrides) == first
    assert rows("data.train_limit=100", change=central_twin) == first
    assert rows("evaluation.limit=null")[1] == list(range(200))
    # The test rows equal those of a run without validation rows.
    limited = small(share)
    alone = build_context(small(), prepare_run(small())).scored
    split, chosen = build_context(limited, prepare_run(limited)).scored["test"]
    assert alone.keys() == {"test"} and chosen.tolist() == alone["test"][1].tolist()
    assert split.fingerprint == alone["test"][0].fingerprint


def test_model_bound_once_scores_like_model_rebound(small):
    experiment = small("method=trishul", "federation.local_steps=2", "evaluation.limit=24")
    executor = InlineExecutor(experiment, prepare_run(experiment))
    model, vector = executor.context.model, executor.context.initial
    first = executor.context.method.initial_state(model.layout, vector, {}).map(to_array)
    moved = replace(first, shared=first.shared + np.float32(0.05))

    def scored(state, start, fresh=False):
        if fresh:
            each = EvaluatedModel(executor.context)
            report = evaluate_chunk(each, state, EvalJob(1, start, start + 8))
            each.release()
            return report.sums.loss
        return executor.evaluate(state, EvalJob(1, start, start + 8)).sums.loss

    wanted = [(first, 0), (first, 8), (moved, 0), (moved, 8), (first, 16)]
    losses = [scored(*each) for each in wanted]
    bound = model.bound[0]
    executor.evaluate(replace(first, shared=first.shared.copy()), EvalJob(1, 0, 8))
    assert model.bound[0] is bound  # The same model in other arrays, as in every call on Ray.
    executor.train(first, [TrainJob(round=1, client=0)])
    assert model.bound is None
    assert losses == [scored(*each, fresh=True) for each in wanted]
    assert len(set(losses)) == len(losses)
