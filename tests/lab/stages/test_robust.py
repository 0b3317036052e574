"""Attackers, and the rules with which the server can replace the mean."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from method_runs import run

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.robust import bounded_mean, harmful_of, krum, trimmed_mean

rows = arrays(np.float64, st.tuples(st.integers(7, 9), st.integers(1, 5)),
              elements=st.floats(-8, 8, width=32))  # fmt: skip


@given(rows=rows, harmful=st.integers(0, 2))
def test_trimmed_mean_excludes_extremes(rows, harmful):
    found = trimmed_mean(rows, harmful)
    for column, value in zip(rows.T, found, strict=True):
        kept = sorted(column.tolist())[harmful : len(column) - harmful]
        assert value == pytest.approx(math.fsum(kept) / len(kept), abs=1e-12)
    np.testing.assert_allclose(trimmed_mean(rows, 0), rows.mean(axis=0), atol=1e-12)


@given(rows=rows, harmful=st.integers(1, 2))
def test_krum_selects_rows_with_nearest_neighbors(rows, harmful):
    count = len(rows)
    scores = []
    for i in range(count):
        far = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(count) if j != i)
        scores.append(math.fsum(far[: count - harmful - 2]))
    kept = krum(rows, harmful)
    assert len(kept) == count - harmful and list(kept) == sorted(set(kept.tolist()))
    left = [score for i, score in enumerate(scores) if i not in kept]
    assert max(scores[i] for i in kept) <= min(left) + 1e-9


@given(rows=rows, bound=st.floats(0.5, 4))
def test_no_row_counts_with_more_than_the_bound(rows, bound):
    norms = np.linalg.norm(rows, axis=1)
    found, cut = bounded_mean(rows, bound)
    short = rows * np.minimum(1, bound / np.maximum(norms, 1e-300))[:, None]
    np.testing.assert_allclose(found, short.mean(axis=0), atol=1e-9)
    assert cut == (norms > bound).sum() and np.linalg.norm(found) <= bound * (1 + 1e-9)


@given(rows=rows, place=st.integers(0, 6), sign=st.sampled_from([-1, 1]))
def test_one_large_row_stays_within_the_others(rows, place, sign):
    attacked = rows.copy()
    attacked[place] = sign * 1e6 * (1 + np.abs(rows[place]))
    honest = np.delete(rows, place, axis=0)
    low, high = honest.min(axis=0) - 1e-9, honest.max(axis=0) + 1e-9
    for found in (
        np.median(attacked, axis=0),
        trimmed_mean(attacked, 1),
        attacked[krum(attacked, 1)].mean(axis=0),
    ):
        assert (low <= found).all() and (found <= high).all()
    found, _ = bounded_mean(attacked, "median")
    longest = np.linalg.norm(honest, axis=1).max()
    assert np.linalg.norm(found) <= longest + 1e-9


def test_a_share_of_a_cohort_is_rounded_up():
    assert [harmful_of(0.2, m) for m in (5, 6, 10)] == [1, 2, 2] and harmful_of(0.1, 30) == 3


WIDE = ["federation.clients=8", "federation.clients_per_round=8", "partition.kind=iid"]


def test_trimmed_mean_resists_few_attackers(executor, tmp_path):
    def end(*words):
        return run(executor("method=fedit", *WIDE, *words), tmp_path).checkpoint

    plain = end().state.shared
    same = end("robust.rule=trimmed", "robust.share=0").state.shared
    np.testing.assert_allclose(same, plain, rtol=1e-5, atol=1e-6)
    attack = ["attack.share=0.2", "attack.scale=1e6"]
    assert np.abs(end(*attack).state.shared - plain).max() > 100
    for rule in ("median", "trimmed", "krum"):
        kept = end(*attack, f"robust.rule={rule}")
        assert [record.stages["attackers"] for record in kept.records[1:]] == [2, 2]
        assert np.abs(kept.state.shared - plain).max() < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=fedex"], "robust: needs a method whose next state is a function of the mean"),
        (["robust.rule=krum"], r"robust.rule='krum' with robust.share=0.2 needs 5 clients"),
        (["privacy.noise=1"], "which the section privacy hides"),
        (["federation.weighting=size"], "federation.weighting='size' must be full and uniform"),
        (["federation.compute=uniform"], "federation.compute='uniform'"),
        (["robust.bound=1"], "bound=1.0 has no effect with rule='median'"),
        (["attack.scale=2"], "scale=2.0 has no effect with share=0"),
    ],
)
def test_unsupported_combinations_of_rules_are_rejected(words, message):
    with pytest.raises(InputError, match=message):
        load_experiment(None, ["robust.rule=median", *words])
