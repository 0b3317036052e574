"""A run driven step by step: closed early, resumed, without extras, and with a checked result."""

import hashlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console
from safetensors import SafetensorError
from tiny_run import TINY

from trishul_ray.errors import ArtifactsError, CorruptFileError, InputError, RunError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import run_folder
from trishul_ray.report.summary import ATTEMPT, TABLES, RunSummary, read_metrics, read_note
from trishul_ray.runs.folder import open_run
from trishul_ray.runs.runner import run_experiment, run_steps
from trishul_ray.tracking.progress import RunProgress, format_bytes


@pytest.fixture
def tiny(cache, tmp_path):
    """``tiny("method=fedit", ..., runs="runs")`` returns an inline experiment of two rounds."""

    def make(*overrides, runs="runs"):
        paths = [f"storage.cache={cache}", f"storage.runs={tmp_path / runs}"]
        return load_experiment(None, [*TINY, *paths, *overrides])

    return make


def quiet():
    return RunProgress(2, Console(file=io.StringIO()))


def drain(steps):
    """Return all reports of a run, and its result."""
    reports = []
    while True:
        try:
            reports.append(next(steps))
        except StopIteration as end:
            return reports, end.value


def numbers_alone(experiment, progress=None):
    """Return the result of a run without an exported model."""
    return drain(run_steps(experiment, progress or quiet(), extras=False))[1]


@pytest.mark.parametrize(("field", "warned"), [("local_steps=2", 1), ("local_epochs=1", 0)])
def test_batches_beyond_a_shard_are_reported(tiny, field, warned):
    shown = io.StringIO()
    progress = RunProgress(2, Console(file=shown, width=1000))
    numbers_alone(tiny(field, "batch_size=1000"), progress)
    text = "a batch contains a row up to 4 times and a round is 6 epochs"
    assert shown.getvalue().count(text) == warned


def test_steps_are_rounds_and_return_the_result(tiny):
    experiment, twin = tiny(), tiny(runs="twin")
    reports, finished = drain(run_steps(experiment, quiet()))
    assert [report.round for report in reports] == [0, 1, 2, 2]
    assert [report.finished for report in reports] == [False, False, False, True]
    records = [record for report in reports for record in report.records]
    assert [record.round for record in records] == [0, 1, 2]
    whole = run_experiment(twin, quiet())
    assert finished.summary.state_sha256 == whole.summary.state_sha256
    assert set(finished.summary.files) == set(whole.summary.files)
    # Numbers of rounds stay integers in the file and its readers.
    assert RunSummary.read(finished.home) == finished.summary
    assert finished.home.read("result.json") == finished.summary.to_json()
    assert str(finished.summary.final["round"]) == "2"
    # A finished run has no steps.
    reports, again = drain(run_steps(experiment, quiet()))
    assert reports == [] and again.repeated


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_run_closed_early_is_continued(tiny, monkeypatch):
    from mlflow.tracking import MlflowClient

    experiment = tiny("tracking.mlflow=true")
    steps = run_steps(experiment, quiet(), tags={"trishul.sweep": "mine"})
    assert [next(steps).round, next(steps).round] == [0, 1]
    monkeypatch.setattr("trishul_ray.storage.locks.LOCK_SECONDS", 0)
    with pytest.raises(RunError, match="is being driven by another process"):
        next(run_steps(experiment, quiet()))
    steps.close()
    home = run_folder(experiment)
    assert not list(Path(home.root).parent.glob(".*.lock"))
    assert not home.exists("result.json") and home.child("checkpoints").names()
    client = MlflowClient(f"sqlite:///{home.root}/../mlflow.db")
    (stopped,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert stopped.info.status == "KILLED" and stopped.data.tags["trishul.sweep"] == "mine"
    home.write("failure.json", b"{}")
    reports, finished = drain(run_steps(experiment, quiet()))
    assert [report.round for report in reports] == [1, 2, 2]
    undisturbed = run_experiment(tiny(runs="twin"), quiet())
    assert finished.summary.state_sha256 == undisturbed.summary.state_sha256
    (run,) = client.search_runs([stopped.info.experiment_id])
    assert run.info.run_id == stopped.info.run_id and run.info.status == "FINISHED"
    assert not home.exists("failure.json")


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_finished_run_is_logged_once_per_store(tiny, tmp_path):
    from mlflow.tracking import MlflowClient

    first = run_experiment(tiny("tracking.mlflow=true"), quiet())
    assert not first.repeated
    elsewhere = [
        (f"sqlite:///{tmp_path}/runs/mlflow.db", "other"),
        (f"sqlite:///{tmp_path}/my.db", "trishul"),
    ]
    for uri, name in elsewhere * 2:
        place = [f"tracking.uri={uri}", f"tracking.experiment={name}"]
        again = run_experiment(tiny("tracking.mlflow=true", *place), quiet())
        assert again.repeated
        client = MlflowClient(uri)
        group = client.get_experiment_by_name(name)
        (run,) = client.search_runs([group.experiment_id])
        assert run.data.tags["trishul.reused"] == "True" and run.info.status == "FINISHED"
        history = client.get_metric_history(run.info.run_id, "Score/accuracy")
        assert sorted(point.step for point in history) == [0, 1, 2]
        assert run.data.params["federation.rounds"] == "2"
        assert run.data.params["task.kind"] == "auto" and "task.template" not in run.data.params
        assert run.info.run_name == "trishul λ=0.01 α=0.3 rank=4 seed=0 quickstart"
        assert run.data.tags["mlflow.note.content"].startswith("trishul (λ=0.01) on digits")
        assert run.data.metrics.keys() >= {"Score/accuracy", "traffic/uploaded_bytes", "svt/zeroed"}
        assert "result.json" in {file.path for file in client.list_artifacts(run.info.run_id)}
    client = MlflowClient(elsewhere[0][0])
    group = client.get_experiment_by_name("trishul")
    run_experiment(tiny("tracking.mlflow=true"), quiet())
    (original,) = client.search_runs([group.experiment_id])
    assert "trishul.reused" not in original.data.tags
    for each in (original, run):
        summary = first.summary
        assert each.data.metrics["total/uploaded_bytes"] == summary.uploaded_bytes
        assert each.data.metrics["total/wall_seconds"] == summary.wall_seconds
        assert each.data.metrics.keys() >= run.data.metrics.keys()
        assert each.data.metrics["best_on_test/accuracy"] == summary.best["accuracy"]
        assert each.data.metrics["untuned/accuracy"] == summary.untouched["accuracy"]
        assert each.data.tags["hardware.processor"] == summary.hardware.processor
        assert each.data.tags["source.rows"] == summary.sources["rows"]
        assert {i.dataset.name for i in each.inputs.dataset_inputs} >= {
            "digits train", "digits test",
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_model_exported_later_is_in_mlflow(tiny):
    from mlflow.tracking import MlflowClient

    experiment = tiny("tracking.mlflow=true")
    first = drain(run_steps(experiment, quiet(), extras=False))[1].summary
    client = MlflowClient(f"sqlite:///{run_folder(experiment).root}/../mlflow.db")
    before = client.get_run(first.mlflow_run_id)
    again = run_experiment(experiment, quiet())
    assert again.repeated
    (after,) = client.search_runs([before.info.experiment_id])
    assert after.info.run_id == before.info.run_id and after.info.status == "FINISHED"
    assert after.info.end_time == before.info.end_time
    assert after.data.tags["trishul.result"] == again.summary.checksum
    artifacts = Path(after.info.artifact_uri.removeprefix("file://"))
    for name in (*again.summary.files, "result.json"):
        assert (artifacts / name).read_bytes() == again.home.read(name)
    assert "adapter/README.md" in again.summary.files


@pytest.mark.slow
def test_finished_run_is_logged_to_a_new_database(tiny, mlflow_store, empty_store):
    from mlflow.tracking import MlflowClient

    experiment = tiny("tracking.mlflow=true")
    run_experiment(experiment, quiet())
    shutil.copy(empty_store, mlflow_store)
    assert run_experiment(experiment, quiet()).repeated
    client = MlflowClient(f"sqlite:///{mlflow_store}")
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.data.tags["trishul.id"] == experiment.id and run.info.status == "FINISHED"


@pytest.mark.slow
def test_rejected_start_leaves_no_mlflow_run(tiny, monkeypatch, mlflow_store):
    from mlflow.tracking import MlflowClient

    def reject(*_, **__):
        raise InputError("too large")

    monkeypatch.setattr("trishul_ray.runs.runner.ensure_pretrained", reject)
    with pytest.raises(InputError, match="too large"):
        run_experiment(tiny("tracking.mlflow=true"), quiet())
    client = MlflowClient(f"sqlite:///{mlflow_store}")
    assert client.search_runs([each.experiment_id for each in client.search_experiments()]) == []


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_run_that_starts_over_is_logged_once(tiny):
    from mlflow.entities import ViewType
    from mlflow.tracking import MlflowClient

    first = run_experiment(tiny("tracking.mlflow=true"), quiet()).summary
    other = run_experiment(tiny("tracking.mlflow=true", "seed=1"), quiet()).summary
    again = run_experiment(tiny("tracking.mlflow=true"), quiet(), fresh=True).summary
    client = MlflowClient(f"sqlite:///{run_folder(tiny()).root}/../mlflow.db")
    groups = [e.experiment_id for e in client.search_experiments()]
    listed = {run.info.run_id for run in client.search_runs(groups)}
    assert listed == {other.mlflow_run_id, again.mlflow_run_id}
    (deleted,) = client.search_runs(groups, run_view_type=ViewType.DELETED_ONLY)
    assert deleted.info.run_id == first.mlflow_run_id
    assert again.attempt != first.attempt


def numbers(finished):
    rows = read_metrics(finished.home)
    return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]


@pytest.mark.parametrize(
    ("shorter", "more", "expected"),
    [
        (2, [], [2, 3, 3]),
        (2, ["optimizer.schedule=cosine"], [0, 1, 2, 3, 3]),
        (2, ["privacy.noise=1"], [2, 3, 3]),
        (2, ["privacy.epsilon=8"], [0, 1, 2, 3, 3]),  # more rounds need more noise in each
        (1, ["evaluation.diagnostics_every=2"], [0, 1, 2, 3, 3]),  # as the last, it has some
    ],
)
def test_longer_run_extends_a_shorter_run(tiny, shorter, more, expected):
    numbers_alone(tiny(*more, f"federation.rounds={shorter}"))
    longer = [*more, "federation.rounds=3"]
    console = Console(file=io.StringIO(), width=300)
    reports, extended = drain(run_steps(tiny(*longer), RunProgress(3, console), extras=False))
    assert [report.round for report in reports] == expected
    shown = console.file.getvalue()
    assert ("extending run" in shown) == (expected[0] > 0)
    rounds = [f"round {number}" for number in range(expected[0] or 1, 4)]
    assert re.findall(r"^(?:training|round \d)", shown, re.MULTILINE) == ["training", *rounds]
    whole = drain(run_steps(tiny(*longer, runs="twin"), quiet(), extras=False))[1]
    assert extended.summary.state_sha256 == whole.summary.state_sha256
    assert extended.summary.attempt == read_note(extended.home, ATTEMPT)
    assert numbers(extended) == numbers(whole)


def test_numbers_do_not_depend_on_scored_rounds(tiny):
    runs = {
        every: numbers_alone(
            tiny("federation.rounds=3", f"evaluation.every={every}", runs=str(every))
        )
        for every in (1, 2, 0)
    }
    scored = {every: run.summary.scored_rounds for every, run in runs.items()}
    assert scored == {1: [0, 1, 2, 3], 2: [0, 2, 3], 0: [0, 3]}
    whole = runs.pop(1)
    for every, run in runs.items():
        for name in ("id", "final", "untouched", "state_sha256", "diagnostics"):
            assert getattr(run.summary, name) == getattr(whole.summary, name), name
        for mine, full in zip(numbers(run), numbers(whole), strict=True):
            assert mine.items() <= full.items()
            assert ("accuracy" in mine) == (mine["round"] in scored[every])


def test_result_serves_fewer_but_not_more_scores(tiny):
    few, all_ = (tiny("federation.rounds=3", f"evaluation.every={every}") for every in (0, 1))
    first = numbers_alone(few)
    console = Console(file=io.StringIO(), width=200)
    second = numbers_alone(all_, RunProgress(3, console))
    assert not second.repeated and second.summary.scored_rounds == [0, 1, 2, 3]
    said = "no score of round 1 and 1 more, which evaluation.every=1 requires: restarting the run"
    assert said in console.file.getvalue()
    assert second.summary.state_sha256 == first.summary.state_sha256
    assert second.summary.attempt != first.summary.attempt  # another run in MLflow
    again = numbers_alone(few)
    assert again.repeated and again.summary.scored_rounds == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("before", "now", "expected"), [(0, 1, [0, 1, 2, 3, 3]), (1, 0, [2, 3, 3])]
)
def test_stopped_run_without_scores_starts_over(tiny, before, now, expected):
    words = ["federation.rounds=3"]
    steps = run_steps(tiny(*words, f"evaluation.every={before}"), quiet(), extras=False)
    assert [next(steps).round for _ in range(3)] == [0, 1, 2]
    steps.close()
    goes_on = run_steps(tiny(*words, f"evaluation.every={now}"), quiet(), extras=False)
    reports, finished = drain(goes_on)
    assert [report.round for report in reports] == expected
    assert finished.summary.scored_rounds == ([0, 1, 2, 3] if now else [0, 1, 3])


def test_failing_store_does_not_hide_a_result(tiny, tmp_path):
    run_experiment(tiny(), quiet())
    (tmp_path / "my.db").write_text("this is not a database, and long enough not to be empty" * 9)
    console = Console(file=io.StringIO(), width=300)
    place = ["tracking.mlflow=true", f"tracking.uri={tmp_path}/my.db"]
    assert run_experiment(tiny(*place), RunProgress(2, console)).repeated
    assert "not logged to MLflow: tracking.uri=" in console.file.getvalue()


def test_traffic_and_time_are_counted_over_resumptions(tiny, monkeypatch):
    experiment = tiny("federation.rounds=4")
    steps = run_steps(experiment, quiet(), extras=False)
    assert [next(steps).round for _ in range(4)] == [0, 1, 2, 3]
    steps.close()
    # On this clock, the other rounds take no time.
    monkeypatch.setattr("trishul_ray.runs.runner.time", SimpleNamespace(perf_counter=lambda: 0.0))
    console = Console(file=io.StringIO(), width=200)
    finished = drain(run_steps(experiment, RunProgress(4, console), extras=False))[1]
    (last,) = [line for line in console.file.getvalue().splitlines() if line.startswith("round 4")]
    assert f"{format_bytes(finished.summary.uploaded_bytes)} up" in last
    before = sum(finished.summary.round_seconds[:3])
    assert finished.summary.wall_seconds == pytest.approx(before, abs=0.002)


def test_model_is_exported_later_without_a_round(tiny, monkeypatch):
    experiment = tiny()
    plain = drain(run_steps(experiment, quiet(), extras=False))[1]
    assert plain.summary.files == sorted(TABLES)
    assert not plain.home.exists("adapter")
    again = drain(run_steps(experiment, quiet(), extras=False))[1]
    assert again.repeated and again.summary.files == plain.summary.files
    monkeypatch.setattr("trishul_ray.federation.server.Server.step", None)
    full = run_experiment(experiment, quiet())
    assert full.repeated and full.home.exists("adapter/adapter_model.safetensors")
    recorded = RunSummary.read(full.home)
    assert recorded.export["form"] == "adapter" and plain.summary.export is None
    assert recorded.files == full.summary.files
    assert sorted(recorded.sha256) == recorded.files
    timeless = {"files", "sha256", "checksum", "export"}
    assert {k: v for k, v in vars(recorded).items() if k not in timeless} == {
        k: v for k, v in vars(plain.summary).items() if k not in timeless
    }
    monkeypatch.undo()
    # The files of a run with extras.
    assert run_experiment(tiny(runs="twin"), quiet()).summary.files == recorded.files


def checked(fields):
    """Return a result.json of other fields with the correct checksum."""
    body = json.dumps(fields, indent=2).removesuffix("\n}").encode()
    return body + b',\n  "checksum": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def test_a_corrupt_result_is_named(tiny):
    home = drain(run_steps(tiny(), quiet(), extras=False))[1].home
    summary = RunSummary.read(home)
    assert yaml.safe_load(home.read("config.yaml")) == summary.config
    older = summary.to_dict()
    fields = older | {"checksum": summary.checksum}
    for content, message in [
        (b"{", "result.json is unreadable"),
        (json.dumps(fields | {"wall_seconds": -1}).encode(), r"corrupt \(checksum differs\)"),
        (json.dumps(older, sort_keys=True).encode(), "result.json has no checksum"),
        (summary.to_json() + b" ", r"corrupt \(checksum differs\)"),
        (replace(summary, id="0" * 12).to_json(), "belongs to run 000000000000"),
        (checked(older | {"more": 1}), "has invalid fields"),
    ]:
        home.write("result.json", content)
        with pytest.raises(CorruptFileError, match=message) as caught:
            RunSummary.read(home)
        assert "\n" not in str(caught.value)
    home.remove("result.json")
    with pytest.raises(FileNotFoundError):
        RunSummary.read(home)


def test_a_damaged_configuration_is_named_and_restored(tiny):
    experiment = tiny()
    home = drain(run_steps(experiment, quiet(), extras=False))[1].home
    whole = home.read("config.yaml")
    for content in (b"", b"{a", b"[]", b"\xff"):
        home.write("config.yaml", content)
        with pytest.raises(CorruptFileError, match=r"config\.yaml is corrupt; repeat the run"):
            open_run(experiment.id, experiment.storage.runs)
        assert drain(run_steps(experiment, quiet(), extras=False))[1].repeated
        assert home.read("config.yaml") == whole


def test_file_in_place_of_the_folder_is_rejected(tiny):
    experiment = tiny()
    place = Path(experiment.storage.runs) / experiment.id
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    with pytest.raises(InputError, match=r"storage\.runs=.*choose another folder"):
        run_experiment(experiment, quiet())
    assert place.read_text() == "mine"


def test_a_failing_export_costs_no_result(tiny, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    experiment = tiny()
    home = run_folder(experiment)
    monkeypatch.setattr("trishul_ray.runs.export.export_peft", full)
    for _ in range(2):  # The second call only exports the model.
        with pytest.raises(ArtifactsError, match="No space left") as e:
            run_experiment(experiment, quiet())
        assert f"scores are in {home.place('result.json')}" in str(e.value)
        result = RunSummary.read(home)
        assert result.files == sorted(TABLES) and result.damaged_files(home) == {}
        assert not home.exists("adapter")
        monkeypatch.setattr("trishul_ray.federation.server.Server.step", None)
    monkeypatch.undo()
    again = run_experiment(experiment, quiet())
    assert again.repeated and again.summary.damaged_files(home) == {}
    assert home.exists("adapter/adapter_model.safetensors")
    assert again.summary.state_sha256 == result.state_sha256
