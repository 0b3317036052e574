"""Choices of runs that the paper leaves open."""

from summaries import invented_summary

from trishul_ray.experiment import Experiment
from trishul_ray.paper.numbers import PAPER, read_json

UNREAD = ["task.target_length", "task.template", "task.verbalizers"]


def summary(unread=UNREAD, **fields):
    experiment = Experiment.model_validate(fields)
    config, identity = experiment.to_dict(), experiment.identity()
    return invented_summary(config=config, identity=identity, unread_fields=unread)


def read(*summaries):
    return {choice.field: choice.answers for choice in PAPER.open_choices(summaries)}


def test_values_are_counted_if_the_method_reads_them():
    found = read(
        summary(method="trishul"),
        summary(method={"name": "trishul", "lam": 0.1, "prox_on": "change"}),
        summary(method="ravan", adapter={"init": "gram_schmidt"}),
        summary(method="fedit", federation={"weighting": "size"}, partition={"kind": "iid"}),
    )
    assert found["method.lam"] == (("0.01", 1), ("0.1", 1))
    assert found["federation.weighting"] == (("uniform", 3), ("size", 1))
    assert found["method.scalars"] == (("trainable", 3),)
    assert found["partition.variant"] == (("per-client", 3),)
    assert found["evaluation.limit"] == (("default", 4),)
    assert "adapter.sigma" not in found and "optimizer.lr_source" in found
    assert "method.lam" not in read(summary(method="fullft"))


def test_every_choice_is_a_field():
    wild = summary(method="trishul", adapter={"init": "rv_random_normal"})
    words = {"template": "{text}\nTopic:", "verbalizers": ["a", "b"]}
    texts = summary(method="fedit", task=words, unread=[])
    others = [summary(method=name) for name in ("scaffold", "hetlora", "fedsb")]
    assert set(read(wild, texts, *others)) == {
        each["field"] for each in read_json("open_choices.json")
    }
