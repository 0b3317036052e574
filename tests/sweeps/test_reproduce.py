"""Sweeps under Ray Tune: the bytes of single runs, failures, retries, one MLflow run per cell."""

import io
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import psutil
import pytest
from damage import unlisted
from rich.console import Console

from trishul_ray.errors import InputError
from trishul_ray.federation.checkpoint import run_folder
from trishul_ray.report.summary import read_metrics
from trishul_ray.report.tables import build_tables
from trishul_ray.sweeps import tuner
from trishul_ray.sweeps.cells import TuneOptions
from trishul_ray.sweeps.loading import load_sweep
from trishul_ray.sweeps.run import reproduce
from trishul_ray.tracking.progress import SweepProgress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("local_ray", "mlflow_store"),
    pytest.mark.timeout(900),  # Processes start several times.
]

#: Five cells, of which one always fails: its update is not finite. Four need one process each.
CASES = """
    base: {resources.backend: inline, optimizer.lr: 0.01}
    axes:
      case:
        trishul: {method: trishul}
        other seed: {method: trishul, seed: 1}
        fedit: {method: fedit}
        broken: {method: fedit, optimizer.lr: 1.0e+30}
        scaffold: {method: scaffold, resources.backend: ray}
    """


#: A search for a rate; a text replaces the key.
SEARCH = """
    base: {{data.validation_share: 0.2}}
    search: {{{}, space: {{optimizer.lr: {{log: [1.0e-6, 0.1]}}}}}}
    """


class Followed(SweepProgress):
    """Progress without a terminal that records, and may call a function at a round."""

    def __init__(self, strike=lambda: None):
        self.text = io.StringIO()
        super().__init__(Console(file=self.text, width=200))
        self.strike, self.retries, self.ended = strike, [], {}

    def round(self, id, round_, metrics, primary_metric):
        super().round(id, round_, metrics, primary_metric)
        if round_ == 1:
            strike, self.strike = self.strike, lambda: None
            strike()

    def retry(self, id, why, attempt, attempts):
        super().retry(id, why, attempt, attempts)
        self.retries.append((id, why))

    def end(self, id, *, failure=None):
        super().end(id, failure=failure)
        assert id not in self.ended
        self.ended[id] = failure


def trials():
    """Return the processes of running trials, oldest first."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "create_time"])
        if any("CellTrial" in word for word in process.info["cmdline"] or [])
    ]
    return sorted(found, key=lambda process: process.info["create_time"])


@pytest.fixture
def sweep_file(tmp_path, cache, small_words):
    """``sweep_file(text, *overrides)`` returns a sweep whose runs are in this test's folder."""

    def make(text, *overrides, name="mine"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(textwrap.dedent(text))
        paths = [f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}"]
        # A field that the file varies cannot be overridden.
        words = [word for word in small_words if word.partition("=")[0] not in text]
        return load_sweep(file, [*words, *paths, "tracking.mlflow=true", *overrides])

    return make


def by_label(sweep, axis="case"):
    return {cell.labels[axis]: cell.experiment for cell in sweep.cells}


def files_of(experiment):
    """Return content and time of the files that a finished run must keep."""
    home = run_folder(experiment).root
    stats = {}
    for name in ("attempt.json", "result.json", "metrics.parquet"):
        with open(f"{home}/{name}", "rb") as file:
            stats[name] = file.read(), os.stat(f"{home}/{name}").st_mtime_ns
    return stats


def logged_runs(tmp_path):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    groups = [e.experiment_id for e in client.search_experiments()]
    return client, list(client.search_runs(groups))


def assert_as_inline(experiment, inline_result):
    reference = inline_result(experiment)
    summary = json.loads(run_folder(experiment).read("result.json"))
    assert summary["state_sha256"] == reference.digest
    assert bool(summary["held"]) == (experiment.resources.backend == "ray")
    numbers = [
        {k: v for k, v in r.row().items() if not k.endswith("seconds")}
        for r in reference.checkpoint.records
    ]
    rows = read_metrics(run_folder(experiment))
    assert [{k: row[k] for k in known} for row, known in zip(rows, numbers, strict=True)] == numbers


def test_sweep_with_failing_cells(sweep_file, tmp_path, inline_result):
    sweep = sweep_file(CASES)
    experiments = by_label(sweep)
    broken = experiments.pop("broken")
    progress = Followed(lambda: trials()[-1].kill())
    result = reproduce([sweep], TuneOptions(retries=1), progress)

    # The killed run was retried; the broken run was not, because it would fail again.
    said = progress.text.getvalue()
    killed = [id for id, why in progress.retries if id != broken.id]
    assert len(killed) == 1 and killed[0] in {e.id for e in experiments.values()}, said
    assert broken.id not in [id for id, _ in progress.retries]
    assert list(result.failures) == ["mine: broken"]
    assert "is not finite at round 1" in result.failures["mine: broken"]
    assert "a smaller learning rate (it would fail again)" in result.failures["mine: broken"]
    (outcome,) = result.outcomes
    assert {c.labels["case"]: c.status for c in outcome.cells} == {
        **dict.fromkeys(experiments, "finished"),
        "broken": "failed",
    }
    assert unlisted(tmp_path) == []
    failure = json.loads(run_folder(broken).read("failure.json"))
    assert failure["text"] == result.failures["mine: broken"]
    for experiment in experiments.values():
        assert_as_inline(experiment, inline_result)

    client, runs = logged_runs(tmp_path)
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.info.status == "FAILED"
    assert parent.data.params["axis.case"].startswith("trishul, other seed")
    counts = {"finished": 4, "failed": 1, "missing": 0}
    assert {name: parent.data.tags[f"cells.{name}"] for name in counts} == {
        name: str(n) for name, n in counts.items()
    }
    children = {run.data.tags["trishul.id"]: run for run in runs if run is not parent}
    assert len(children) == len(runs) - 1 == 5
    assert children[broken.id].info.status == "FAILED"
    for label, experiment in experiments.items():
        child = children[experiment.id]
        assert child.info.status == "FINISHED"
        tags = child.data.tags
        assert tags["mlflow.parentRunId"] == parent.info.run_id
        assert (tags["sweep"], tags["profile"]) == ("mine", "custom")
        assert tags["seed"] == str(experiment.seed)
        assert child.info.run_name == child.data.params["axis.case"] == label
        history = client.get_metric_history(child.info.run_id, "Score/accuracy")
        rows = read_metrics(run_folder(experiment))
        assert [(p.step, p.value) for p in sorted(history, key=lambda p: p.step)] == [
            (row["round"], row["accuracy"]) for row in rows
        ]

    # Repeat with another sweep that shares a cell: only the broken cell runs.
    before = {id: files_of(e) for id, e in experiments.items()}
    shared = sweep_file("axes: {method: [scaffold]}", name="shared")
    again = Followed()
    result = reproduce([sweep, shared], TuneOptions(retries=0), again)
    assert result.ran == 1 and list(again.ended) == [broken.id] and again.retries == []
    assert {id: files_of(e) for id, e in experiments.items()} == before
    _, runs = logged_runs(tmp_path)
    assert len(runs) == 7  # a second parent
    (scaffold,) = [r for r in runs if r.data.tags.get("trishul.id") == experiments["scaffold"].id]
    assert scaffold.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert scaffold.data.tags["sweep"] == "mine"
    assert scaffold.data.tags["sweep.shared"] == "custom"
    assert result.outcomes[1].cells[0].value == scaffold.data.metrics["Score/accuracy"]


def test_damaged_cells_are_restored_from_checkpoints(sweep_file, tmp_path):
    from mlflow.entities import ViewType

    sweep = sweep_file("base: {resources.backend: inline}\naxes: {seed: [0, 1, 2, 3]}")
    assert reproduce([sweep], TuneOptions(), Followed()).failures == {}
    experiments = by_label(sweep, "seed")
    before = {seed: files_of(e) for seed, e in experiments.items()}
    homes = {seed: tmp_path / "runs" / e.id for seed, e in experiments.items()}
    (homes["0"] / "metrics.parquet").unlink()
    (homes["1"] / "result.json").write_text("{")
    (homes["2"] / "metrics.parquet").write_bytes(b"PAR1")
    (homes["3"] / "metrics.parquet").write_bytes(b"PAR1")
    for file in (homes["3"] / "checkpoints").iterdir():
        file.write_bytes(b"short")

    progress = Followed()
    result = reproduce([sweep], TuneOptions(), progress)
    assert (result.failures, result.ran) == ({}, 4), progress.text.getvalue()
    said = progress.text.getvalue()
    assert "seed=1 is corrupt and resumes at its last valid checkpoint: /" in said
    after = {seed: files_of(e) for seed, e in experiments.items()}
    content = {s: {n: f[0] for n, f in files.items()} for s, files in after.items()}
    for seed in "012":  # No round ran: its seconds are unchanged.
        for name in ("attempt.json", "metrics.parquet"):
            assert content[seed][name] == before[seed][name][0]
    results = {s: json.loads(files["result.json"]) for s, files in content.items()}
    old = {s: json.loads(files["result.json"][0]) for s, files in before.items()}
    assert results["0"] == old["0"]
    assert results["1"]["round_seconds"] == old["1"]["round_seconds"]
    assert results["3"]["state_sha256"] == old["3"]["state_sha256"]
    assert results["3"]["attempt"] != old["3"]["attempt"]

    client, runs = logged_runs(tmp_path)
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert {run.info.status for run in runs} == {"FINISHED"} and len(children) == 4
    assert {run.info.run_id for run in children} == {r["mlflow_run_id"] for r in results.values()}
    groups = [e.experiment_id for e in client.search_experiments()]
    (replaced,) = client.search_runs(groups, run_view_type=ViewType.DELETED_ONLY)
    assert replaced.info.run_id == old["3"]["mlflow_run_id"]


def test_command_with_nothing_to_do_imports_no_torch(
    tmp_path, cache, small_words, called, monkeypatch
):
    (tmp_path / "mine.yaml").write_text("axes: {seed: [0, 1]}\n")
    paths = [f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}"]
    words = [*small_words, *paths, "tracking.mlflow=true", "resources.backend=inline"]
    command = ["sweep", tmp_path / "mine.yaml", "--report", tmp_path / "report", *words]
    script = (
        "import sys\n"
        "from trishul_ray.cli import main\n"
        "sys.argv = ['trishul', *sys.argv[1:]]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as error:\n"
        "    assert not error.code, error.code\n"
        "print('HEAVY', *({'torch', 'transformers', 'ray', 'datasets'} & sys.modules.keys()))\n"
    )
    monkeypatch.chdir(tmp_path)
    code, first, error = called(*command)
    assert code == 0, error
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*")}
    words = [sys.executable, "-c", script, *map(str, command)]
    again = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert again == f"{first}HEAVY\n"
    assert before and {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.chaos
def test_a_trial_that_hangs_ends_itself_and_finishes(
    sweep_file, inline_result, monkeypatch, tmp_path
):
    marker = tmp_path / "hung"

    class CellTrial(tuner.CellTrial):
        loading_seconds = 60.0

        def _advance(self):
            if self._seconds:
                with suppress(FileExistsError):
                    marker.touch(exist_ok=False)
                    time.sleep(1000)
            return super()._advance()

    monkeypatch.setattr(tuner, "CellTrial", CellTrial)
    sweep = sweep_file("axes: {method: [trishul, fedit]}", "tracking.mlflow=false")
    progress = Followed()
    result = reproduce([sweep], TuneOptions(stall_minutes=0.1), progress)
    assert result.failures == {}, progress.text.getvalue()
    assert marker.exists() and progress.retries
    for cell in sweep.cells:
        assert_as_inline(cell.experiment, inline_result)


def test_an_optuna_search_goes_the_same_way_again(sweep_file):
    pytest.importorskip("optuna")
    text = textwrap.dedent(SEARCH.format("kind: optuna, metric: loss, samples: 5"))
    text += "axes: {method: [fedit]}\n"
    sweep = sweep_file(text, "federation.rounds=4", "resources.backend=inline")
    progress = Followed()
    result = reproduce([sweep], TuneOptions(concurrency=1), progress)
    (outcome,) = result.outcomes
    assert len(outcome.cells) == 5 and result.failures == {}
    (table,) = build_tables(result.outcomes)
    finished = [cell for cell in outcome.cells if cell.status == "finished"]
    losses = {cell.id: cell.summary.final["validation_loss"] for cell in finished}
    best = min(losses, key=losses.get)
    assert table.unit == "validation loss" and table.runs["value"].min() == losses[best]
    counted = [line for line in progress.text.getvalue().splitlines() if re.match(r"\d/", line)]
    assert [line.split()[0] for line in counted] == [f"{n}/5" for n in range(1, 6)]
    before = {cell.id: cell.home.read("attempt.json") for cell in outcome.cells}
    again = Followed()
    (repeated,) = reproduce([sweep], TuneOptions(concurrency=1), again).outcomes
    assert {cell.id: cell.home.read("attempt.json") for cell in repeated.cells} == before
    assert again.ended == progress.ended and again.retries == []


def test_missing_optuna_is_named_before_ray_starts(sweep_file, monkeypatch):
    sweep = sweep_file(SEARCH.format("kind: optuna"))
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(
        "trishul_ray.federation.on_ray.session.ray_session", lambda: pytest.fail("Ray")
    )
    with pytest.raises(InputError, match=r"mine\.yaml: search: .*pip install '\.\[search\]'"):
        reproduce([sweep], TuneOptions(), Followed())
