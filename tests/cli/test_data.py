"""``trishul datasets``: one line per dataset, and the rows of each client before training."""

import functools
import json

import numpy as np
import pytest

from trishul_ray.cli import output
from trishul_ray.cli.listing import partition_table
from trishul_ray.data.partition import LabelCounts, count_labels
from trishul_ray.data.prepare import dataset_names
from trishul_ray.federation.prepare import prepare_rows, prepare_run


@pytest.fixture
def datasets(monkeypatch, called, cache):
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    monkeypatch.delenv("TRISHUL_HUB", raising=False)
    monkeypatch.setattr(output.out, "_width", 120)

    return functools.partial(called, "datasets")


def test_every_dataset_has_a_line(datasets):
    code, out, _ = datasets()
    assert code == 0
    for name in dataset_names():
        assert sum(f" {name} " in line for line in out.splitlines()) == 1


def test_rows_of_each_client_by_class(datasets, tmp_path):
    words = ["partition.alpha=0.1", "federation.clients=3", "federation.clients_per_round=2"]
    code, out, _ = datasets("digits", *words)
    assert code == 0
    assert "digits, Dirichlet(0.1) over classes, per-client, 3 clients, 1000 rows" in out
    assert "largest classes" in out and "497 test rows" in out


def test_fewer_clients_than_a_cohort_can_be_shown(datasets):
    code, out, error = datasets("digits", "federation.clients=2")
    assert code == 0, error
    assert "2 clients" in out


def test_partition_in_one_option(datasets):
    few = ["federation.clients=3", "federation.clients_per_round=2"]
    long = datasets("digits", *few, "partition.kind=dirichlet", "partition.alpha=0.1")
    assert datasets("digits", *few, "--partition", "dirichlet:0.1") == long
    assert datasets("digits", *few, "--partition", "iid") == datasets(
        "digits", *few, "partition.kind=iid"
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("iid:0.1", "--partition 'iid:0.1': only dirichlet has an alpha"),
        ("pathological", "partition.kind='pathological': input should be 'iid', 'dirichlet' or"),
        ("dirichlet:0", "partition.alpha=0: input should be greater than 0"),
        ("dirichlet:", "partition.alpha=None: input should be a valid number"),
    ],
)
def test_a_wrong_partition_is_one_line(datasets, word, message):
    code, _, error = datasets("digits", "--partition", word)
    assert code == 2 and message in error and error.count("\n") == 1


def write_questions(file, clients=4):
    rows = [
        {
            "question": f"q{n}?",
            "context": "c",
            "answers": ["a"],
            "group": ["web [x]", "books"][n % 3 == 0],
            "client": n % clients,
        }
        for n in range(60)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_questions_by_sub_dataset_without_any_backbone(datasets, tmp_path):
    file = write_questions(tmp_path / "qa.jsonl")
    few = ["federation.clients=4", "federation.clients_per_round=2"]
    words = [f"data.path={file}", *few]
    code, out, _ = datasets("table", *words)
    assert code == 0 and "Dirichlet(0.3) over sub-datasets, per-client, 4 clients, 48 rows" in out
    assert "web [x]: " in out
    code, out, _ = datasets("table", *words, "partition.kind=natural")
    assert code == 0 and "by natural clients, 4 clients" in out
    code, _, error = datasets("table", f"data.path={file}", *few[1:], "partition.kind=natural")
    assert code == 2 and "the training rows have 4 natural clients; 4 or fewer" in error


def test_unlabelled_rows_are_only_counted(datasets, tmp_path):
    rows = [{"question": "q", "context": "c", "answers": "a"}] * 10
    file = tmp_path / "qa.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    few = ["federation.clients=2", "federation.clients_per_round=2", "partition.kind=iid"]
    code, out, _ = datasets("table", f"data.path={file}", *few)
    assert code == 0 and "table, iid, 2 clients, 8 rows" in out and "largest" not in out


def test_a_missing_dataset_is_one_line(datasets):
    code, _, error = datasets("glue/qqp")
    assert code == 2 and error.strip().splitlines()[-1].startswith("error: dataset glue/qqp ")
    assert "hf download --repo-type dataset nyu-mll/glue" in error and "Traceback" not in error


def test_the_command_shows_the_partition_that_a_run_trains_on(small):
    experiment = small("partition.alpha=0.5", "data.train_limit=300")
    shown, run = prepare_rows(experiment), prepare_run(experiment)
    np.testing.assert_array_equal(shown.shards.permutation, run.shards.permutation)
    held = count_labels(shown.dataset.train, shown.shards, experiment.partition)
    assert held.what == "class" and held.names == tuple("0123456789")
    labels = shown.dataset.train.labels
    for client in range(4):
        want = np.bincount(labels[shown.shards.shard(client)], minlength=10)
        np.testing.assert_array_equal(held.counts[client], want)
    assert held.counts.sum() == 300


def test_many_clients_are_summed_up():
    counts = np.ones((40, 2), dtype=np.int64)
    table = partition_table(LabelCounts(counts, ("a", "b"), "class"))
    assert table.row_count == 32
    assert list(table.columns[-1].cells)[-2:] == ["10 more", "a: 40, b: 40"]


def test_the_heads_of_a_backbone_are_those_of_a_run_and_need_none(called, small, inline_result):
    words = ["model.init=random", "adapter.heads=2", "method.block_scores=all"]
    code, shown, error = called("models", "vit-digits", *words)
    assert code == 0, error
    blueprint = inline_result(small("method=trishul", *words)).blueprint
    printed = [
        line.replace("│", " ").split() for line in shown.splitlines() if "vit.layers" in line
    ]
    assert {block: int(heads) for block, _, heads, _ in printed} == blueprint.heads
    assert {int(rank) for *_, rank in printed} == {16}
    norms = {block: float(norm) for block, norm, *_ in printed}
    assert norms == {b: float(f"{norm:.4g}") for b, norm in blueprint.block_norms.items()}


def test_heads_that_clients_decide_are_not_shown(called):
    code, _, error = called("models", "vit-digits", "method.allocation=gradient")
    assert code == 2 and "by what clients measure before round 1" in error
