"""Names, groups and parameters of runs in MLflow."""

from types import SimpleNamespace

import pytest

from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.runs.mlflow_log import describe, grouped_metrics, run_name
from trishul_ray.tasks.build import unread_fields


def test_names_distinguish_runs():
    changes = [
        [],
        ["method.lam=0.1"],
        ["partition.alpha=0.1"],
        ["partition.kind=iid"],
        ["budget=8"],
        ["seed=1"],
        ["method=ravan"],
        ["name=mine"],
    ]
    names = [run_name(load_experiment(None, words)) for words in changes]
    assert names[0] == "trishul λ=0.01 α=0.3 rank=4 seed=0 quickstart"
    assert len(set(names)) == len(names)
    rates = [run_name(load_experiment(None, [f"optimizer.lr={lr}"])) for lr in (0.0123, 0.0456)]
    assert rates[0] == "trishul λ=0.01 α=0.3 rank=4 lr=0.0123 seed=0 quickstart"
    assert rates[0] != rates[1]
    data = Experiment(data={"name": "table", "path": "/somewhere/notes.csv"})
    assert run_name(data).endswith("seed=0 notes.csv")
    assert run_name(data.model_copy(update={"name": "mine"})).endswith("seed=0 mine")
    full = run_name(load_experiment(None, ["method=fullft"]))
    assert full == "fullft α=0.3 seed=0 quickstart"  # which has no budget


def test_description_names_codec_and_stages():
    words = ["uploads.codec=int4", "uploads.error_feedback=true", "server.optimizer=adam"]
    stages = ", server.optimizer=adam, uploads.codec=int4, uploads.error_feedback=True, id "
    assert stages in describe(load_experiment(None, words))
    assert "uploads" not in describe(load_experiment(None, []))


def test_metrics_are_in_groups():
    record = {
        "round": 3.0, "accuracy": 1.0, "train_loss": 2.0, "seconds": 3.0, "client_seconds": 4.0,
        "uploaded_bytes": 5.0, "refused_uploads": 6.0, "svt_zeroed": 7.0, "zeroed": 8.0,
        "delta_zeroed": 9.0, "aggregation_error": 11.0,
    }  # fmt: skip
    assert grouped_metrics(record) == {
        "Score/accuracy": 1.0, "Score/train_loss": 2.0, "seconds/round": 3.0, "seconds/client": 4.0,
        "traffic/uploaded_bytes": 5.0, "traffic/refused_uploads": 6.0, "svt/zeroed": 7.0,
        "cores/zeroed": 8.0, "cores/aggregation_error": 11.0, "delta/zeroed": 9.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "model", "unread"),
    [
        ("text", "llama-tiny", {"target_length", "answer_pattern", "turns", "loss"}),
        ("qa", "t5-tiny", {"verbalizers", "answer_pattern", "turns", "loss"}),
        ("instruction", "llama-tiny", {"verbalizers"}),
    ],
)
def test_fields_that_a_task_does_not_read(rows, model, unread):
    kind = "instruction" if rows == "instruction" else "auto"
    experiment = load_experiment(None, [f"model={model}", f"task.kind={kind}"])
    info = SimpleNamespace(kind=rows, name="mine")
    backbone = backbone_of(experiment.model, experiment.storage.paths)
    found = unread_fields(experiment.task, info, backbone)
    assert set(found) == {f"task.{name}" for name in unread}
