"""Validation and summing of uploads: exact means, masks, rejections, and sums in groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.adapters.layout import Layout
from trishul_ray.federation.messages import Expected, Upload
from trishul_ray.federation.reduce import (
    FAN_IN,
    Reducer,
    combine,
    finish,
    groups,
    partial_sum,
    rejection_reason,
    unit_sizes,
)
from trishul_ray.methods.base import method_class
from trishul_ray.methods.base.messages import State

UNITS = np.array([4, 4, 9, 3])
EXPECTED = Expected({"shared": 20}, UNITS)


def by(weighting):
    method = method_class("fedavg")(method_class("fedavg").Config())
    return Reducer(method, Layout.of([("w", (20,))]), weighting, EXPECTED)


def uploads_of(count, seed=0, masked=False):
    rng = np.random.default_rng(seed)
    return [
        Upload(
            client=c,
            rows=int(rng.integers(1, 100)),
            arrays=State(rng.normal(size=20).astype(np.float32)),
            active=rng.random(4) < 0.5 if masked else None,
        )
        for c in range(count)
    ]


def reduce_in_groups(uploads, weighting):
    parts = [
        partial_sum([uploads[i] for i in group], by(weighting))
        for group in groups([u.client for u in uploads])
    ]
    return combine(parts)


@settings(deadline=None, max_examples=50)
@given(
    count=st.integers(1, 3 * FAN_IN),
    seed=st.integers(0, 1000),
    weighting=st.sampled_from(["uniform", "size"]),
    masked=st.booleans(),
)
def test_mean_covers_trained_clients(count, seed, weighting, masked):
    """Theorem 1: the reduced value is the exact weighted mean, per unit."""
    uploads = uploads_of(count, seed, masked)
    before = State(np.full(20, 7.0, dtype=np.float32))
    mean, trained = finish(reduce_in_groups(uploads, weighting), before, by(weighting))
    start = 0
    for unit, size in enumerate(UNITS):
        part = slice(start, start + size)
        start += size
        who = [u for u in uploads if u.active is None or u.active[unit]]
        assert trained[unit] == bool(who)
        if not who:
            assert (mean.shared[part] == 7.0).all()
            continue
        weights = np.array([1.0 if weighting == "uniform" else u.rows for u in who])
        values = np.stack([u.arrays.shared[part].astype(np.float64) for u in who])
        expected = (weights[:, None] * values).sum(0) / weights.sum()
        np.testing.assert_allclose(mean.shared[part], expected, rtol=1e-6, atol=1e-7)


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 3 * FAN_IN), seed=st.integers(0, 1000))
def test_plain_means_ignore_method_weights(count, seed):
    """A key in ``plain_mean`` is unweighted; a classification head has the configured weight."""

    class Weighing(method_class("fedavg")):
        plain_mean = frozenset({"plain"})
        weighs_classifier = False

        def weight(self, upload, layout, weight):
            return float(upload.shared.abs().sum())

    layout = Layout.of([("w", (12,)), ("head:v", (8,))])
    expected = Expected({"shared": 20, "plain": 3, "own": 3}, np.array([12, 8]))
    reducer = Reducer(Weighing(method_class("fedavg").Config()), layout, "size", expected)
    rng = np.random.default_rng(seed)
    uploads = [
        Upload(
            u.client,
            u.rows,
            State(
                u.arrays.shared,
                {k: rng.normal(size=3).astype(np.float32) for k in ("plain", "own")},
            ),
        )
        for u in uploads_of(count, seed)
    ]
    parts = [partial_sum([uploads[i] for i in group], reducer) for group in groups(range(count))]
    mean, _ = finish(combine(parts), State(np.zeros(20, np.float32)), reducer)

    def by_weights(values, weights):
        return np.average(np.stack(values).astype(np.float64), axis=0, weights=weights)

    rows = [u.rows for u in uploads]
    norms = [float(np.abs(u.arrays.shared).sum()) for u in uploads]
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(
        mean.extra["plain"], by_weights([u.arrays.extra["plain"] for u in uploads], None), **close
    )
    np.testing.assert_allclose(
        mean.extra["own"], by_weights([u.arrays.extra["own"] for u in uploads], norms), **close
    )
    np.testing.assert_allclose(
        mean.shared[:12], by_weights([u.arrays.shared for u in uploads], norms)[:12], **close
    )
    np.testing.assert_allclose(
        mean.shared[12:], by_weights([u.arrays.shared for u in uploads], rows)[12:], **close
    )


def test_unit_sizes_count_entries_of_heads_and_tensors():
    layout = Layout.of([("a.core", (3, 2, 2)), ("a.scale", (3,)), ("head:w", (2, 5))])
    assert unit_sizes(layout, ("a.core", "head:w")).tolist() == [4, 4, 4, 10]


def test_groups_contain_only_the_cohort():
    assert [len(g) for g in groups(range(FAN_IN))] == [FAN_IN]
    assert [len(g) for g in groups(range(2 * FAN_IN + 3))] == [FAN_IN, FAN_IN, 3]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(19, np.float32), "shape (19,), expected (20,)"),
        (np.full(20, np.nan, np.float32), "20 non-finite"),
        (np.array([np.inf] + [0] * 19, np.float32), "1 non-finite"),
        (np.full(20, 1e13, np.float32), "above 1e+12"),
    ],
)
def test_unsound_uploads_are_left_out_and_named(array, reason):
    good = uploads_of(3)
    bad = Upload(client=9, rows=5, arrays=State(array))
    assert reason in rejection_reason(bad, EXPECTED)
    total = partial_sum([*good, bad], by("size"))
    assert total.clients == [0, 1, 2]
    assert reason in total.refused[9]
    alone = partial_sum(good, by("size"))
    np.testing.assert_array_equal(total.sums.shared, alone.sums.shared)


def test_unexpected_keys_are_rejected():
    upload = Upload(
        client=0, rows=1, arrays=State(np.zeros(20, np.float32), {"other": np.zeros(3)})
    )
    assert "method's: other" in rejection_reason(upload, EXPECTED)


def test_a_mask_of_another_length_is_rejected():
    upload = Upload(0, 1, State(np.zeros(20, np.float32)), active=np.ones(3, bool))
    assert "3 units, expected 4" in rejection_reason(upload, EXPECTED)
