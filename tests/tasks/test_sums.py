from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, recall_score

from trishul_ray.tasks.sums import (
    EvalSums,
    Metrics,
    RowScores,
    score_by_mix,
    summarize_clients,
)

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)
FIVE = Metrics(("accuracy",), classes=5)


def summed(predicted, labels, metrics=FIVE):
    scores = {"accuracy": predicted == labels}
    rows = RowScores(torch.zeros(len(labels)), scores, predicted=predicted, labels=labels)
    return EvalSums.of(rows, metrics, {})


@given(rows=ROWS, cut=st.integers(0, 60))
def test_f1_and_recall_are_those_of_scikit_learn_however_rows_are_batched(rows, cut):
    labels, predicted = torch.tensor(rows).T
    parts = [(predicted[:cut], labels[:cut]), (predicted[cut:], labels[cut:])]
    sums = [summed(*part) for part in parts]
    want = f1_score(labels, predicted, average="macro", zero_division=0)
    assert FIVE.merge(sums)["macro_f1"] == pytest.approx(want, abs=1e-12)
    recall = FIVE.recall(sums)
    present = sorted(set(labels.tolist()))
    assert [k for k, value in enumerate(recall) if value is not None] == present
    want = recall_score(labels, predicted, labels=present, average=None)
    np.testing.assert_allclose([recall[k] for k in present], want)


def test_a_row_without_a_prediction_is_a_miss_of_its_class_alone():
    one = Metrics(("accuracy",), classes=1)
    sums = [summed(torch.tensor([-1, 0]), torch.tensor([0, 0]), one)]
    assert one.recall(sums) == [0.5]
    assert one.merge(sums)["macro_f1"] == pytest.approx(2 / 3)  # precision 1, recall 1/2


def test_scores_of_clients_are_means_over_their_own_rows():
    metrics = Metrics(("f1",))
    score = torch.tensor([1.0, 0.0, 1.0, 1.0])
    clients = torch.tensor([3, 3, 0, 3])
    sums = [
        EvalSums.of(RowScores(score[part], {"f1": score[part]}), metrics, {"client": clients[part]})
        for part in (slice(0, 2), slice(2, 4))
    ]
    assert metrics.by_client(sums) == {0: 1.0, 3: pytest.approx(2 / 3)}
    assert metrics.recall(sums) == [] and metrics.names == ("f1", "loss")


@given(
    values=st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=30),
    cuts=st.lists(st.integers(0, 29), max_size=4),
    order=st.randoms(),
)
def test_the_total_is_the_same_in_any_order(values, cuts, order):
    metrics, edges = Metrics(("f1",), groups=("a", "b")), [0, *sorted(cuts), len(values)]
    scores, numbers = torch.tensor(values, dtype=torch.float64), torch.arange(len(values)) % 2
    parts = [
        EvalSums.of(
            RowScores(scores[a:z], {"f1": scores[a:z]}),
            metrics,
            {"group": numbers[a:z], "client": numbers[a:z]},
        )
        for a, z in pairwise(edges)
        if a < z
    ]
    first = metrics.merge(parts), metrics.by_client(parts)
    order.shuffle(parts)
    assert (metrics.merge(parts), metrics.by_client(parts)) == first


def test_a_class_mix_weighs_the_recall_of_each_class():
    mix = np.array([[10, 0, 0], [1, 3, 0], [0, 2, 6], [0, 0, 5]])
    # The third class has no test rows: nothing is known of the client that holds it alone.
    assert score_by_mix([0.5, 1.0, None], mix) == {0: 0.5, 1: 0.875, 2: 1.0}


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (40, 4)])
def test_the_worst_decile(clients, worst):
    scores = {c: c / 100 for c in reversed(range(clients))}
    found = summarize_clients("per_client", scores)
    assert found["per_client_mean"] == pytest.approx((clients - 1) / 200)
    assert found["per_client_worst_decile"] == pytest.approx((worst - 1) / 200)
