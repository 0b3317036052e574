"""Commands that list methods, models, datasets and runs, and show or remove a run."""

import functools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from method_runs import SINGLE
from mlflow.tracking import MlflowClient
from tiny_run import TINY

from trishul_ray.cli import output
from trishul_ray.cli.fields import allowed, field_list
from trishul_ray.cli.run import _describe_scores
from trishul_ray.config.fields import FederationConfig
from trishul_ray.data.partition import count_labels
from trishul_ray.data.prepare import dataset_names
from trishul_ray.experiment.loading import field_names, load_experiment
from trishul_ray.federation.prepare import prepare_rows, prepare_run
from trishul_ray.methods.base import method_names
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.stages import STAGES
from trishul_ray.tasks.base import task_kinds


@pytest.fixture
def listed(monkeypatch, called, cache):
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    monkeypatch.delenv("TRISHUL_HUB", raising=False)
    monkeypatch.setattr(output.out, "_width", 120)
    return functools.partial(called, "list")


def test_help_fits_one_screen(start):

    program = Path(sys.executable).with_name("trishul")
    code, out, error = start(program, "--help", COLUMNS="80").end()
    assert code == 0, error
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 80


def test_every_method_and_dataset_is_listed(listed):
    for kind, names in (("methods", method_names()), ("datasets", dataset_names())):
        code, out, error = listed(kind, "--json")
        assert code == 0, error
        assert {row["name"] for row in json.loads(out)} == set(names)
        code, out, _ = listed(kind)
        assert code == 0 and all(f" {name} " in out for name in names)


def test_models_are_listed_with_their_source(listed):
    rows = {row["name"]: row for row in json.loads(listed("models", "--json")[1])}
    assert {*BUILTINS, "all-MiniLM-L6-v2", "meta-llama/Llama-3.2-1B"} <= set(rows)
    vit = rows["google/vit-base-patch16-224-in21k"]
    assert [*vit.values()][1:] == ["vit-b16", "mirror or hub"]


def test_rows_of_each_client_are_shown(listed):
    code, out, error = listed("datasets", "digits", "partition.alpha=0.1", "federation.clients=2")
    assert code == 0, error
    assert out.startswith("2 clients, Dirichlet(0.1); all of digits: 1,000 training rows")
    words = ["datasets", "digits", "federation.clients=40", "--json"]
    rows = json.loads(listed(*words)[1])
    assert [row["client"] for row in rows[-3:]] == ["29", "10 others", "all"]
    assert sum(row["rows"] for row in rows[:-1]) == rows[-1]["rows"] == 1000
    code, _, error = listed("methods", "digits")
    assert code == 2 and "only `trishul list datasets` accepts a name" in error


def test_partition_of_own_questions_needs_no_backbone(listed, tmp_path):
    rows = [
        {"question": f"q{n}?", "context": "c", "answers": ["a"], "client": n % 4,
         "group": ["web [x]", "books"][n % 3 == 0]}
        for n in range(60)
    ]  # fmt: skip
    file = tmp_path / "qa.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    words = ["datasets", "table", f"data.path={file}", "federation.clients=4"]
    code, out, error = listed(*words)
    assert code == 0 and "4 clients, Dirichlet(0.3)" in out and "web [x]: " in out, error
    code, out, _ = listed(*words, "partition.kind=natural")
    assert code == 0 and "4 clients, natural" in out
    code, _, error = listed(*words[:3], "partition.kind=natural")
    assert code == 2 and "exceeds the 4 natural clients of the training rows" in error


def test_tokens_of_a_row_are_shown(listed):
    words = ["datasets", "synthetic/instructions", "--row", "0", "--json"]
    tokens = json.loads(listed(*words)[1])
    assert [token["position"] for token in tokens] == list(range(len(tokens)))
    assert {token["label"] for token in tokens} == {"", "yes"}
    assert listed("datasets", "digits", "--row", "0")[0] == 2


def test_listed_partition_equals_the_partition_of_a_run(small):
    experiment = small("partition.alpha=0.5", "data.train_limit=300")
    shown, run = prepare_rows(experiment), prepare_run(experiment)
    np.testing.assert_array_equal(shown.shards.permutation, run.shards.permutation)
    held = count_labels(shown.dataset.train, shown.shards, experiment.partition)
    labels = shown.dataset.train.labels
    for client in range(4):
        want = np.bincount(labels[shown.shards.shard(client)], minlength=10)
        np.testing.assert_array_equal(held.counts[client], want)


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_run_is_listed_shown_and_removed(called, listed, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = called("run", *TINY, "tracking.mlflow=true", f"storage.cache={cache}")
    assert code == 0, error
    (row,) = json.loads(listed("runs", "--json")[1])
    assert row["method"] == "trishul" and row["result"].startswith("accuracy ")
    id = row["id"]
    assert id in listed("runs")[1]
    code, shown, error = called("show", id[:6])
    assert code == 0, error
    assert id in shown and f"result    {tmp_path}/runs/{id}/result.json" in shown
    assert json.loads(called("show", id, "--json")[1])["id"] == id
    (tmp_path / "runs" / id / "result.json").unlink()
    assert "2 of 2; the run has not finished" in called("show", id)[1]
    assert called("rm", id, "--yes")[:2] == (0, f"removed {tmp_path}/runs/{id}\n")
    assert not (tmp_path / "runs" / id).exists()
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    assert client.search_runs([e.experiment_id for e in client.search_experiments()]) == []
    assert called("show", id)[0] == 2 and listed("runs")[1] == "no runs in runs\n"


@pytest.mark.parametrize("method", SINGLE)
def test_every_field_is_listed(method):
    text = field_list(load_experiment(None, [f"method={method}", "budget=2"]), width=90)
    entries = re.findall(r"^(\S+?)=(.*?)  \((.*)\)((?:\n    .*)*)$", text, re.MULTILINE)
    assert [name for name, *_ in entries] == list(field_names(method))
    assert "<class" not in text and "typing" not in text
    # Without a run of this name, it is the method's name.
    assert [name for name, _, _, meaning in entries if not meaning] == ["method.name"]
    assert f"task.kind=auto  ({' | '.join(task_kinds())})" in text
    assert "tracking.mlflow=true  (true or false; not in the id)" in text
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 90


def test_fields_of_named_sections_are_listed(called):
    _, text, _ = called("run", "--fields", "privacy", "rounds=2")
    assert {line.partition("=")[0] for line in text.splitlines() if line[0] != " "} == {
        f"privacy.{name}" for name in STAGES["privacy"].Config.model_fields
    }


def test_allowed_values_of_fields_are_described():
    fields = FederationConfig.model_json_schema()["properties"]
    assert allowed(fields["quorum"]) == "number > 0, <= 1"
    assert allowed(fields["clients_per_actor"]) == "integer >= 1 or auto"
    assert allowed(fields["compute_shares"]) == "list of 4 numbers or null"


def test_clients_are_named_worst_first():
    scores = {"Bern": 0.5, "Genf": 0.25} | {str(n): 0.75 for n in range(2)}
    shown_text = "mean accuracy of 4: 56.25%; worst: Genf 25.00%, Bern 50.00%, 0 75.00%"
    assert _describe_scores(scores, "accuracy") == shown_text
