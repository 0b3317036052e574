"""The MLflow run of a sweep: found again, and the runs of its cells in line with their results."""

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from trishul_ray.tracking.mlflow_run import MlflowRun
from trishul_ray.tracking.sweep_run import SweepRun


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def open_parent(uri, name):
    tags = {"sweep": name, "profile": "smoke"}
    return SweepRun.open(uri, "trishul", f"sweep-{name}", name, {"axis.seed": "0, 1"}, tags)


def open_cell(uri, id, name, parent=None):
    marks = {"trishul.id": id, **({f"sweep.{name}": "smoke"} if name else {})}
    return MlflowRun.open(uri, "trishul", f"attempt-{id}", id, {}, marks, parent)


def test_every_run_is_settled_by_what_its_cell_became(uri):
    parent = open_parent(uri, "first")
    for id in ("done", "killed-at-the-end", "failed", "running", "stopped"):
        open_cell(uri, id, "first", parent.run_id).log_round(0, {"accuracy": 0.1})
    open_cell(uri, "interrupted", "first", parent.run_id).finish("FAILED")
    done = open_cell(uri, "done", "first")
    done.finish("FINISHED")
    single = open_cell(uri, "single", None)
    single.finish("FINISHED")
    rounds = [{"round": 0, "accuracy": 0.1}, {"round": 1, "accuracy": 0.2, "loss": 1.5}]
    tags = {"sweep.first": "smoke", "table": "t"}
    cells = dict.fromkeys(
        ("done", "killed-at-the-end", "failed", "running", "stopped", "interrupted", "single"),
        tags,
    )
    finished = {"done": done.run_id, "killed-at-the-end": None, "single": single.run_id}
    finished["elsewhere"] = "0" * 32  # logged to another store
    cells["elsewhere"] = tags

    def settle():
        return parent.settle(
            cells,
            finished,
            lambda id: id == "failed",
            lambda id: rounds if id in finished else None,
            {"stopped": "stopped early after round 1"},
        )

    assert settle() == []
    counts = {"finished": 3, "failed": 1, "missing": 1}
    assert parent.close(counts, "FAILED") == []

    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "trishul"]
    runs = {
        r.data.tags.get("trishul.id"): r for r in client.search_runs([experiment.experiment_id])
    }
    assert {id: run.info.status for id, run in runs.items()} == {
        None: "FAILED",
        "done": "FINISHED",
        "killed-at-the-end": "FINISHED",
        "failed": "FAILED",
        "running": "KILLED",
        "stopped": "KILLED",
        "interrupted": "KILLED",
        "single": "FINISHED",
    }
    completed = runs["killed-at-the-end"].info.run_id
    history = client.get_metric_history(completed, "accuracy")
    assert sorted((p.step, p.value) for p in history) == [(0, 0.1), (1, 0.2)]
    assert runs[None].data.metrics == {f"cells.{name}": n for name, n in counts.items()}
    assert runs["stopped"].data.tags["trishul.stopped"] == "stopped early after round 1"
    # A run of its own keeps that it has no parent.
    assert runs["single"].data.tags.items() >= tags.items()
    assert "mlflow.parentRunId" not in runs["single"].data.tags
    assert "table" not in runs["done"].data.tags  # its tags were set when it began


class FailsOnce:
    """A client whose methods each fail once, as they do while a server is gone."""

    def __init__(self, client):
        self._client = client
        self.failed = set()

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if name not in self.failed:
                self.failed.add(name)
                raise MlflowException("no answer")
            return getattr(self._client, name)(*args, **kwargs)

        return call


def test_a_sweep_ends_while_its_server_is_gone_for_a_moment(uri, monkeypatch):
    monkeypatch.setattr("trishul_ray.tracking.mlflow_run._patience", lambda uri: 60.0)
    parent = open_parent(uri, "outage")
    cell = open_cell(uri, "killed-in-outage", "outage", parent.run_id)
    single = open_cell(uri, "single-in-outage", None)
    single.finish("FINISHED")
    parent._client = client = FailsOnce(parent._client)
    tags = {"sweep.outage": "smoke"}
    rejected = parent.settle(
        {"killed-in-outage": tags, "single-in-outage": tags},
        {"killed-in-outage": None, "single-in-outage": single.run_id},
        lambda id: False,
        lambda id: [{"round": 0, "accuracy": 0.1}],
    )
    assert rejected + parent.close({"finished": 2}, "FINISHED") == []
    assert client.failed >= {"search_runs", "get_run", "set_tag", "log_batch", "set_terminated"}

    store = MlflowClient(uri)
    runs = [store.get_run(run.run_id) for run in (parent, cell, single)]
    assert [run.info.status for run in runs] == ["FINISHED"] * 3
    assert runs[0].data.metrics == {"cells.finished": 2}
    assert [p.value for p in store.get_metric_history(cell.run_id, "accuracy")] == [0.1]
    assert runs[2].data.tags.items() >= tags.items()


def test_a_repeated_sweep_has_the_same_run(uri):
    first = open_parent(uri, "again")
    first.close({"finished": 0}, "KILLED")
    second = open_parent(uri, "again")
    assert second.run_id == first.run_id
    assert MlflowClient(uri).get_run(first.run_id).info.status == "RUNNING"
    assert open_parent(uri, "another").run_id != first.run_id
