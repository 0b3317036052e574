"""Synthetic datasets: the schema of the real datasets, the same rows everywhere, learnable."""

import pytest
from public_mirror import write_mirror

from trishul_ray.data.datasets.glue import MNLI, QNLI, QQP, RTE, SST2
from trishul_ray.data.datasets.mrqa import MRQA, SUBSETS
from trishul_ray.data.datasets.newsgroups import NEWSGROUPS
from trishul_ray.data.datasets.synthetic import SYNTHETIC
from trishul_ray.data.prepare import prepare
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run

#: Synthetic text datasets, with their real datasets.
REAL = dict(
    zip(
        ["topics", "questions", "mnli", "qnli", "qqp", "rte", "sst2"],
        [NEWSGROUPS, MRQA, MNLI, QNLI, QQP, RTE, SST2],
        strict=True,
    )
)


def schema(split):
    def kind(name):
        return split.column(name).dtype if name in ("label", "group") else split.texts(name).type

    return {name: kind(name) for name in split.columns}


@pytest.mark.parametrize("name", REAL)
def test_schema_matches_the_real_dataset(name, tmp_path):
    write_mirror(tmp_path / "hub", REAL[name], {"train": 6, "test": 6})
    real = prepare(REAL[name].name, cache=tmp_path, hub=tmp_path / "hub")
    ours = prepare(f"synthetic/{name}", cache=tmp_path, hub=None)
    for split in ("train", "test"):
        assert schema(ours.split(split)) == schema(real.split(split))
    assert (ours.info.kind, ours.info.fields) == (real.info.kind, real.info.fields)
    assert (ours.info.groups, ours.info.num_classes) == (real.info.groups, real.info.num_classes)
    if name != "topics":
        assert ours.info.classes == real.info.classes
    for groups in [ours.test.column("group")] if ours.info.groups else []:
        assert set(groups) == set(range(len(ours.info.groups)))


def test_the_same_rows_on_any_machine(tmp_path):
    found = {s.name: prepare(s.name, cache=tmp_path, hub=None).fingerprint[:8] for s in SYNTHETIC}
    # If the rows change, increment the number in SyntheticDataset.key.
    assert found == {
        "synthetic/topics": "91b77851",
        "synthetic/questions": "f5e47e59",
        "synthetic/instructions": "49c22a92",
        "synthetic/mnli": "3d657ab1",
        "synthetic/qnli": "8a5a3ac8",
        "synthetic/qqp": "7ccb1b09",
        "synthetic/rte": "b3340f0c",
        "synthetic/sst2": "0d8a8e3f",
        "synthetic/stsb": "8d603187",
        "synthetic/shapes": "45580976",
    }


@pytest.fixture
def experiment(cache, tmp_path):
    """``experiment("mnli", ...)`` returns a tiny run with the preset of a synthetic dataset."""
    tiny = ["federation.local_steps=8", "federation.batch_size=8", "evaluation.limit=64"]
    paths = [f"storage.cache={cache}", f"storage.runs={tmp_path}", "tracking.mlflow=false"]

    def make(name, *words):
        return load_experiment(None, [f"dataset=synthetic/{name}", *tiny, *paths, *words])

    return make


@pytest.mark.parametrize("name", REAL)
def test_preset_lengths_do_not_cut_texts(name, experiment):
    longer = experiment(name, "task.max_length=256", "task.target_length=64")
    tokens = [prepare_run(made).sources["tokens"] for made in (experiment(name), longer)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("name", "metric", "groups"),
    [
        ("topics", "accuracy", 0),
        ("questions", "f1", len(SUBSETS)),
        ("mnli", "accuracy", 2),
        ("shapes", "accuracy", 0),
    ],
)
def test_round_has_metrics_of_the_real_dataset(name, metric, groups, experiment, drive_to_end):
    words = ["model.init=random", "federation.rounds=1", "federation.local_steps=1"]
    made = experiment(name, *words)
    before, after = drive_to_end(InlineDriver(made, prepare_run(made), "a")).checkpoint.records
    assert before.scores["loss"] != after.scores["loss"] and 0 <= after.scores[metric] <= 1
    assert sum(name.startswith(f"{metric}_") for name in after.scores) == groups


@pytest.mark.parametrize("method", ["trishul", "fedit"])
def test_a_few_steps_learn_the_rule(method, experiment, drive_to_end):
    made = experiment("sst2", f"method={method}", "federation.rounds=2", "optimizer.lr=0.01")
    final = drive_to_end(InlineDriver(made, prepare_run(made), "a")).checkpoint.records[-1]
    assert final.scores["accuracy"] > 0.75
