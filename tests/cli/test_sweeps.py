"""`trishul table`, `sweep` and `report`: invalid input ends them before any actor starts."""

import pytest
from tiny_run import TINY

from trishul_ray.federation.on_ray import session


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    def start():
        raise AssertionError("Ray was started")

    monkeypatch.setattr(session, "ray_session", start)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table", "federation.rounds=2"], "name tables (or all) or sweep files, or use --axis"),
        (["table", "visoin", "--profile", "smoke"], "no sweep 'visoin'; did you mean 'vision'?"),
        (["table", "all", "--profile", "big"], "profile 'big' has no sweeps"),
        (["table", "vision", "--profile", "smoke", "federation.round=2"], "'federation.rounds'"),
        (["table", "vision", "--retries", "-1"], "'--retries'"),
        (["report"], "name tables (or all) or sweep files"),
        (["report", "visoin", "--profile", "smoke"], "no sweep 'visoin'; did you mean 'vision'?"),
        (["report", "missing.yaml"], "missing.yaml"),
        (["sweep"], "name tables (or all) or sweep files, or use --axis"),
        (["sweep", "a.yaml", "--axis", "seed=0"], "sweep files, or use --axis field=value,value"),
        (["sweep", "vision", "--plan", "--device", "x"], "--device 'x' is unknown"),
        (["sweep", "vision", "--rates", "r.yaml"], "--rates requires an axis"),
        (["sweep", "missing.yaml"], "missing.yaml"),
        (["sweep", "--axis", "method.lamb=0,1"], "method.lam"),
        (
            ["sweep", "--axis", "seed=0,1", "dataset=images", "data.path=nowhere"],
            "'nowhere' does not exist",
        ),
        (["sweep", "--axis", "seed=0,1", "model=vit-digit"], "did you mean 'vit-digits'?"),
        (["sweep", "--axis", "seed="], "axis 'seed' is empty"),
        (["sweep", "--axis", "budget=8,4000"], "cell 'sweep: budget=4000': adapter.heads x rank"),
    ],
)
def test_wrong_input_is_one_line(called, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    paths = ["storage.runs=runs", "model.init=random", "tracking.mlflow=false"]
    code, out, error = called(*words, *paths)
    assert (code, out) == (2, ""), error
    last = error.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("plan", [["--plan"], []])
def test_adapters_that_do_not_fit_name_the_cell(called, tmp_path, plan):
    file = tmp_path / "ranks.yaml"
    file.write_text("base: {method: fedit}\naxes: {adapter.rank: [4, 65]}\n")
    code, _, error = called("sweep", *plan, file, f"storage.runs={tmp_path}/runs")
    assert code == 2 and "cell 'ranks: adapter.rank=65': adapter.rank=65 gives fedit" in error


def test_plan_needs_no_models_and_no_gpu(called, tmp_path):
    (tmp_path / "hub").mkdir()
    paths = [f"storage.runs={tmp_path}/runs", f"storage.hub={tmp_path}/hub"]
    words = ["model=nobody/nothing", "resources.device=cuda", *paths]
    code, out, error = called("sweep", "--plan", "--axis", "seed=0,1", *words)
    assert code == 0, error
    assert "2 runs of unknown duration: model.name='nobody/nothing' not found" in out


def test_rejected_user_data_name_the_cell(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("text,label\n" + 9 * "a,yes\n")
    words = ["dataset=table", "data.path=x.csv", "model=bert-tiny"]
    code, _, error = called("sweep", "--axis", "seed=0,1", *words)
    assert code == 2 and "cell 'sweep: seed=0': " in error
    assert "all rows have class 'yes'" in error and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["report", "sweep"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "axes: {seed: {0: {seed: 0, metric: acuracy}}}",
            "a.yaml: axes -> seed -> 0 -> metric: unknown",
        ),
        (
            "search: {kind: random, metric: los, samples: 2, space: {seed: {int: [0, 9]}}}"
            "\nbase: {data.validation_share: 0.1}",
            "a.yaml: search -> metric: unknown metric 'los'; did you mean",
        ),
        ("base: {data: {name: table, path: notes.xlsx}}\naxes: {seed: [0]}", "must be one of"),
        (f"base: {900 * '['}{900 * ']'}", "maximum recursion depth"),
    ],
)
def test_sweep_is_rejected_before_ray(called, monkeypatch, tmp_path, command, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(f"{content}\n")
    (tmp_path / "notes.xlsx").write_bytes(b"PK")
    code, out, error = called(command, "a.yaml", "tracking.mlflow=false")
    assert (code, out) == (2, "") and message in error.strip().splitlines()[-1]


def test_empty_sweep_is_rejected(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    code, out, error = called("sweep", "empty.yaml")
    assert (code, out) == (2, "") and "empty.yaml: the sweep file is empty" in error
    (tmp_path / "report").write_text("mine")
    code, out, error = called("sweep", "--axis", "seed=0,1", *TINY)
    assert (code, out) == (2, "") and "--report: " in error and "cannot be written" in error
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty.yaml", "report"]


SWEEP = """
title: Mine
axes:
  method: [trishul, ravan]
  seed: [0, 1]
tables:
  - {name: mine, title: Mine, rows: [method], columns: []}
"""


def test_report_shows_finished_runs_and_runs_nothing(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(SWEEP)
    code, _, error = called("run", "method=ravan", "seed=1", *TINY)
    assert code == 0, error
    code, out, error = called("report", "mine.yaml", "--output", "page", *TINY)
    assert (code, "1 of 4 finished" in out) == (0, True), error
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "1 of 4 runs finished, 3 missing" in page
    assert "Profile custom." in page
    # The report can be written to shared storage, like the report of a job.
    monkeypatch.setenv("TRISHUL_REPORT", f"file://{tmp_path}/shared/page")
    code, out, error = called("report", "mine.yaml", *TINY)
    assert f"report    file://{tmp_path}/shared/page/report.html" in out, error
    names = [
        {path.relative_to(folder) for path in folder.rglob("*")}
        for folder in (tmp_path / "page", tmp_path / "shared/page")
    ]
    assert names[0] == names[1]
    monkeypatch.delenv("TRISHUL_REPORT")
    # Another folder has no runs.
    code, out, error = called("report", "mine.yaml", "--runs", "elsewhere", *TINY)
    assert "report    report/mine/report.html" in out
    assert (code, "0 of 4 finished" in out) == (0, True), error
    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_adaptive_search_needs_runs_for_a_report(called, tmp_path):
    search = "search: {kind: optuna, rows: test, space: {method.lam: {log: [0.001, 1]}}}\n"
    (tmp_path / "mine.yaml").write_text(f"axes: {{seed: [0]}}\n{search}")
    code, out, error = called("report", tmp_path / "mine.yaml", *TINY)
    assert (code, out) == (2, "")
    assert "mine: the samples of an Optuna search depend on its results" in error
