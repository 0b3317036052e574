from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, matthews_corrcoef, recall_score

from trishul_ray.tasks.sums import (
    EvalSums,
    Metrics,
    RowScores,
    client_metrics,
    group_metrics,
    score_by_mix,
    summarize_clients,
)

ODD_NAMES = (
    *("物理", "化学", "Größe", "Grüße", "größe", "हिन्दी", "मराठी", "a/b", "a_b", "a\\b", "a_b-2"),
    *(".", "..", "!", "", 300 * "x", 300 * "x" + "y"),
)
ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)
FIVE = Metrics(("accuracy",), classes=5)


def summed(predicted, labels, metrics=FIVE):
    scores = {"accuracy": predicted == labels}
    rows = RowScores(torch.zeros(len(labels)), scores, predicted=predicted, labels=labels)
    return EvalSums.of(rows, metrics, {})


@given(rows=ROWS, cut=st.integers(0, 60))
def test_f1_and_recall_equal_scikit_learn(rows, cut):
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


@given(rows=ROWS)
def test_scores_of_two_classes_equal_scikit_learn(rows):
    labels, predicted = (torch.tensor(rows) % 2).T
    metrics = Metrics(("accuracy",), classes=2)
    found = metrics.merge([summed(predicted, labels, metrics)])
    want = f1_score(labels, predicted, zero_division=0)
    assert found["positive_f1"] == pytest.approx(want, abs=1e-12)
    assert found["matthews"] == pytest.approx(matthews_corrcoef(labels, predicted), abs=1e-12)
    assert found.keys() == {*metrics.names}


def test_matthews_counts_rows_without_prediction_apart():
    labels, predicted = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, -1, 1, -1, 0])
    metrics = Metrics(("accuracy",), classes=2)
    found = metrics.merge([summed(predicted, labels, metrics)])["matthews"]
    assert found == pytest.approx(matthews_corrcoef(labels, predicted), abs=1e-12)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1), st.integers(0, 9))
def test_kept_values_do_not_depend_on_batches(rows, cut):
    values, metrics = torch.tensor(rows, dtype=torch.float64), Metrics(("score",))
    sums = [
        EvalSums.of(RowScores(part[:, 0], {"score": part[:, 0]}, kept=part), metrics, {})
        for part in (values[cut:], values[:cut])
        if len(part)
    ]
    total = EvalSums.total(sums).kept
    assert sorted(map(tuple, total.tolist())) == sorted(rows)
    assert np.array_equal(total, EvalSums.total(sums[::-1]).kept)


def test_row_without_prediction_misses_only_its_class():
    one = Metrics(("accuracy",), classes=1)
    sums = [summed(torch.tensor([-1, 0]), torch.tensor([0, 0]), one)]
    assert one.recall(sums) == [0.5]
    assert one.merge(sums)["macro_f1"] == pytest.approx(2 / 3)  # precision 1, recall 1/2


def test_client_scores_average_their_rows():
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


def test_class_mix_weights_recall_per_class():
    mix = np.array([[10, 0, 0], [1, 3, 0], [0, 2, 6], [0, 0, 5]])
    # The third class has no test rows, so the client with only this class has no score.
    assert score_by_mix([0.5, 1.0, None], mix) == {0: 0.5, 1: 0.875, 2: 1.0}


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (40, 4)])
def test_the_worst_decile(clients, worst):
    scores = {c: c / 100 for c in reversed(range(clients))}
    found = summarize_clients("per_client", scores)
    assert found["per_client_mean"] == pytest.approx((clients - 1) / 200)
    assert found["per_client_worst_decile"] == pytest.approx((worst - 1) / 200)


def test_metrics_of_groups_are_distinct():
    metrics = Metrics(("accuracy",), groups := ODD_NAMES)
    assert len({*metrics.names}) == 2 + len(groups)
    scores = torch.arange(len(groups)) / len(groups)
    rows = RowScores(scores, {"accuracy": scores})
    found = metrics.merge([EvalSums.of(rows, metrics, {"group": torch.arange(len(groups))})])
    assert [found[name] for name in metrics.names[2:]] == pytest.approx(scores.tolist())


def test_groups_keep_their_usual_names():
    groups = ("SQuAD", "Natural Questions", "mis-matched", "物理")
    names = [f"f1_{name}" for name in ("squad", "natural_questions", "mis_matched", "物理")]
    assert list(group_metrics("f1", groups)) == names


SCORES = st.lists(st.integers(0, 100), min_size=1, max_size=40)


@given(SCORES)
def test_spread_over_clients_follows_from_all_pairs(found):
    values = np.array(found) / 100
    spread = summarize_clients("own", dict(enumerate(values.tolist())))
    assert spread["own_sd"] == pytest.approx(values.std(), abs=1e-12)
    assert spread["own_min"] == values.min() <= spread["own_worst_decile"] + 1e-12
    assert spread["own_best_decile"] <= values.max() + 1e-12
    pairs = np.abs(values[:, None] - values[None]).mean()
    gini = pairs / (2 * values.mean()) if values.any() else 0.0
    assert spread["own_gini"] == pytest.approx(gini, abs=1e-12)


def test_metrics_over_clients():
    of_global = {"ann": 0.5, "bob": 0.7, "cy": 0.6, "dan": 0.4}
    own = of_global | {"ann": 0.9, "bob": 0.6}
    found = client_metrics(of_global, own, {"ann": 3, "bob": 1, "cy": 0})
    assert found["per_client_mean"] == pytest.approx(0.55)
    assert found["personal_mean"] == pytest.approx(0.625)
    assert found["personal_gain"] == pytest.approx((0.4 - 0.1) / 2)
    assert found["personal_hurt"] == 0.5
    correlation = np.corrcoef([3, 1, 0], [0.9, 0.6, 0.6])[0, 1]
    assert found["participation_correlation"] == pytest.approx(correlation)
    assert found["never_sampled_mean"] == pytest.approx((0.6 + 0.4) / 2)
    assert found["participation_gap"] == pytest.approx(0.6 - 0.4)


def test_personal_score_without_personal_models_is_global():
    found = client_metrics({0: 0.2, 1: 0.6}, {}, {0: 1, 1: 1})
    names = ("mean", "worst_decile", "best_decile", "min", "sd", "gini")
    assert {n: found[f"personal_{n}"] for n in names} == {
        n: found[f"per_client_{n}"] for n in names
    }
    # All clients took part equally often; none is held out or has a personalized model.
    assert len(found) == 2 * len(names)
