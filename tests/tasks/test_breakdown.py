import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, recall_score

from trishul_ray.tasks.breakdown import (
    class_counts,
    client_counts,
    macro_f1,
    recall_by_class,
    score_by_client,
    score_by_mix,
    summarize_clients,
)

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


@given(rows=ROWS, cut=st.integers(0, 60))
def test_f1_and_recall_are_those_of_scikit_learn_however_rows_are_batched(rows, cut):
    labels, predicted = torch.tensor(rows).T
    parts = [(predicted[:cut], labels[:cut]), (predicted[cut:], labels[cut:])]
    sums = [class_counts(*part) for part in parts if len(part[0])]
    want = f1_score(labels, predicted, average="macro", zero_division=0)
    assert macro_f1(sums) == pytest.approx(want, abs=1e-12)
    recall = recall_by_class(sums, 5)
    present = sorted(set(labels.tolist()))
    assert [k for k, value in enumerate(recall) if value is not None] == present
    want = recall_score(labels, predicted, labels=present, average=None)
    np.testing.assert_allclose([recall[k] for k in present], want)


def test_a_row_without_a_prediction_is_a_miss_of_its_class_alone():
    sums = [class_counts(torch.tensor([-1, 0]), torch.tensor([0, 0]))]
    assert recall_by_class(sums, 1) == [0.5]
    assert macro_f1(sums) == pytest.approx(2 / 3)  # precision 1, recall 1/2


def test_scores_of_clients_are_means_over_their_own_rows():
    score = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    clients = torch.tensor([3, 3, 0, 3])
    sums = [
        client_counts(score[:2], "f1", clients[:2]),
        client_counts(score[2:], "f1", clients[2:]),
    ]
    assert score_by_client(sums, "f1") == {0: 1.0, 3: pytest.approx(2 / 3)}


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
