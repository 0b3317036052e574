"""A killed or interrupted driver of a sweep leaves no processes, and repeats no finished cell."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import time

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.usefixtures("mlflow_store")]

CELLS, ROUNDS = 4, 4
METHODS, SEEDS = ["--axis", "method=trishul,fedit"], ["--axis", "seed=0..1"]
#: Seconds for a command to start on a loaded machine.
LONG_WAIT = 280


@pytest.fixture
def sweep(trishul, small_words):
    """``sweep(*words)`` returns the running command."""
    rounds = [f"federation.rounds={ROUNDS}", "federation.local_steps=10"]
    fixed = [*small_words, *rounds, "storage.runs=runs", "tracking.mlflow=true"]

    def begin(*words, axes=(*METHODS, *SEEDS)):
        return trishul("sweep", *axes, *fixed, *words)

    return begin


def finished_cells(tmp_path):
    """Return the parts of each cell's result that must not change."""
    kept = {}
    for result in tmp_path.glob("runs/*/result.json"):
        files = [result.with_name(name) for name in ("attempt.json", "result.json")]
        kept[result.parent.name] = [(f.read_bytes(), f.stat().st_mtime_ns) for f in files]
    return kept


def assert_one_mlflow_run_each(tmp_path, cells=CELLS):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    ids = sorted(path.parent.name for path in tmp_path.glob("runs/*/result.json"))
    assert sorted(run.data.tags["trishul.id"] for run in children) == ids and len(ids) == cells
    for run in children:
        history = client.get_metric_history(run.info.run_id, "Score/accuracy")
        assert sorted(point.step for point in history) == list(range(ROUNDS + 1))
        home = tmp_path / "runs" / run.data.tags["trishul.id"]
        assert json.loads((home / "result.json").read_text())["mlflow_run_id"] == run.info.run_id


@pytest.mark.timeout(900)
def test_repeated_sweep_skips_finished_cells_after_kill(sweep, tmp_path):
    first = sweep()
    first.wait_for(f"1/{CELLS} ", LONG_WAIT)
    first.kill()
    before = finished_cells(tmp_path)  # another cell may have finished before the kill
    assert before and len(before) < CELLS
    second = sweep()
    code, out, errors = second.end(LONG_WAIT)
    assert code == 0, errors
    after = finished_cells(tmp_path)
    assert {id: after[id] for id in before} == before
    assert f"{CELLS - len(before)}/{CELLS - len(before)} " in errors
    for method in ("trishul", "fedit"):  # a mean over two seeds
        assert re.search(rf"│ {method} +│ +[\d.]+ ± [\d.]+ │", out), out
    assert_one_mlflow_run_each(tmp_path)
    assert second.left_behind() == []
    # The third command runs nothing, and does not start Ray.
    third = sweep()
    code, again, errors = third.end(LONG_WAIT)
    assert (code, again) == (0, out), errors
    assert "starting Ray" not in errors
    assert finished_cells(tmp_path) == after
    assert_one_mlflow_run_each(tmp_path)


def test_ctrl_c_leaves_nothing_and_prints_resume_command(sweep, tmp_path):
    from mlflow.tracking import MlflowClient

    command = sweep("federation.rounds=1000", "evaluation.every=1000")
    command.wait_for("starting Ray", LONG_WAIT)
    checkpoints = []
    while not checkpoints:  # during a round
        assert command.process.poll() is None
        checkpoints = list(tmp_path.glob("runs/*/checkpoints/round-000001*"))
    os.killpg(command.process.pid, signal.SIGINT)  # A terminal signals the whole group.
    code, _, errors = command.end(60)
    assert code == 130, errors
    assert command.left_behind() == []
    last = errors.strip().splitlines()[-1]
    assert last.startswith(
        "stopped. Finished cells and rounds are kept; to continue: trishul sweep"
    )
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert {run.info.status for run in runs} == {"KILLED"} and len(runs) > 1


def suspend(processes, database):
    """Stop processes at a moment when none of them has locked the database."""
    deadline = time.monotonic() + LONG_WAIT
    while time.monotonic() < deadline:
        for process in processes:
            process.suspend()
        with contextlib.closing(sqlite3.connect(database, timeout=0)) as connection:
            try:
                connection.execute("BEGIN EXCLUSIVE")
                return
            except sqlite3.OperationalError:
                pass
        for process in processes:
            process.resume()
        time.sleep(0.05)
    raise AssertionError(f"{database} was always locked")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", ["finishes", "is killed"])
def test_cell_of_another_command_is_awaited(sweep, tmp_path, end):
    words = ["federation.local_steps=30"]
    first = sweep(*words, axes=METHODS)
    first.wait_for("starting Ray", LONG_WAIT)
    while not list(tmp_path.glob("runs/*/checkpoints/round-*")):
        assert first.process.poll() is None
        time.sleep(0.1)
    # A fast machine would finish these cells before the second command looks for them.
    workers = first.processes("ray::")
    assert workers
    suspend(workers, tmp_path / "runs" / "mlflow.db")
    second = sweep(*words, axes=METHODS)
    waits = second.wait_for("another process runs it: waiting", LONG_WAIT)
    for worker in workers:
        worker.resume()
    if end == "is killed":
        first.process.kill()
    else:
        code, _, errors = first.end(LONG_WAIT)
        assert code == 0, errors
    code, out, errors = second.end(LONG_WAIT)
    assert code == 0, errors
    assert errors.count(waits) == 1 and "attempt 2" not in errors
    for method in ("trishul", "fedit"):
        assert re.search(rf"│ {method} +│ +[\d.]+ ", out), out
    assert_one_mlflow_run_each(tmp_path, cells=2)
    assert not list(tmp_path.glob("runs/.*.lock"))
