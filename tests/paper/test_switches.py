"""Choices of runs that the paper leaves open."""

import pytest
from summaries import invented_summary

from trishul_ray.experiment import Experiment
from trishul_ray.paper.switches import MOST_VALUES, SWITCHES, read_switches

UNREAD = ["task.target_length", "task.template", "task.verbalizers"]


def summary(unread=UNREAD, **fields):
    experiment = Experiment.model_validate(fields)
    config, identity = experiment.to_dict(), experiment.identity()
    return invented_summary(config=config, identity=identity, unread_fields=unread)


def read(*summaries):
    return {switch.field: switch for switch in read_switches(summaries)}


def test_values_are_counted_where_the_method_reads_them():
    found = read(
        summary(method="trishul"),
        summary(method={"name": "trishul", "lam": 0.1, "prox_on": "change"}),
        summary(method="ravan", adapter={"init": "gram_schmidt"}),
        summary(method="fedit", federation={"weighting": "size"}, partition={"kind": "iid"}),
    )
    assert found["method.lam"].values == (("0.01", 1), ("0.1", 1))
    assert found["method.prox_on"].values == (("change", 1), ("core", 1))
    assert found["federation.weighting"].values == (("uniform", 3), ("size", 1))
    assert found["adapter.init"].values == (
        ("gram_schmidt (the default of trishul)", 2),
        ("gram_schmidt", 1),
    )
    assert found["method.scalars"].values == (("trainable", 3),)
    assert found["partition.variant"].values == (("per-client", 3),)
    assert found["model.train_head"].values == (("yes", 4),)
    assert found["evaluation.limit"].values == (("all", 4),)
    assert "adapter.sigma" not in found
    assert "optimizer.lr_source" in found


def test_every_switch_is_a_field():
    wild = summary(method="trishul", adapter={"init": "rv_random_normal"})
    words = {"template": "{text}\nTopic:", "verbalizers": ["a", "b"]}
    texts = summary(method="fedit", task=words, unread=[])
    others = [summary(method=name) for name in ("scaffold", "hetlora", "fedsb")]
    found = read(wild, texts, *others, summary(method="fedit", task=words))
    assert set(found) == {*SWITCHES, ""}
    assert found["task.template"].values == (("{text}\\nTopic:", 1),)
    assert found["task.verbalizers"].values == (("a, b", 1),)
    assert found["adapter.alpha"].values == (("r", 4),)
    assert found["method.option"].values == (("auto", 1),)


def test_what_no_field_decides_is_said_where_it_applies():
    def fixed(*summaries):
        found = [switch for switch in read_switches(summaries) if not switch.field]
        return {switch.question: switch.values for switch in found}

    vision, questions = summary(), summary(data={"name": "mrqa"})
    assert fixed(vision) == {"Which round is reported?": (("the last", 1),)}
    assert fixed(vision, questions, questions)["What is the mean F1 of MRQA over?"] == (
        ("questions, not its six sub-datasets", 2),
    )


def test_profiles_of_compute_name_their_proportions():
    named = summary(federation={"compute": "skewed-right"})
    custom = summary(federation={"compute": "custom", "compute_shares": [0, 0.5, 0.5, 0]})
    values = dict(read(named, custom)["federation.compute"].values)
    assert "skewed-right (50% train 0.25, 30% train 0.5, 15% train 0.75, 5% train 1)" in values
    assert "custom (0% train 0.25, 50% train 0.5, 50% train 0.75, 0% train 1)" in values


def test_many_values_are_counted():
    runs = [summary(optimizer={"lr": 0.1, "lr_source": f"table {i}"}) for i in range(9)]
    sources = read(*runs)["optimizer.lr_source"]
    assert len(sources.values) == MOST_VALUES
    assert sources.others == 9 - MOST_VALUES


@pytest.mark.parametrize("summaries", [[], [summary(method="fullft")]])
def test_few_runs(summaries):
    assert "method.lam" not in read(*summaries)
