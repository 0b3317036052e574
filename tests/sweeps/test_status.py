"""Results of a sweep's cells in the store: only complete, valid and current ones are used."""

import dataclasses
import io
import re
import shutil

import pytest
from damage import DAMAGE
from rich.console import Console
from tiny_files import TINY_TEXT, change_weights, save_bert, write_notes

from trishul_ray.errors import InputError, StorageError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import run_folder
from trishul_ray.report.summary import RunSummary
from trishul_ray.runs.runner import run_steps
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import distinct
from trishul_ray.sweeps.loading import sweep_from_axes
from trishul_ray.sweeps.status import (
    CellState,
    collect,
    examine,
    record_failure,
)
from trishul_ray.tracking.progress import RunProgress

WORDS = ["dataset=hub", "data.path=me/notes", "model=me/bert", *TINY_TEXT]
SELDOM = "evaluation.every=0"


def finish(experiment):
    steps = run_steps(experiment, RunProgress(2, Console(file=io.StringIO())), extras=False)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value.summary


@pytest.fixture(scope="module")
def template(cache, tmp_path_factory):
    """Create a folder with a mirror and the store of one finished run."""
    place = tmp_path_factory.mktemp("template")
    write_notes(place / "hub/me/notes/train.csv")
    save_bert(place / "hub/me/bert")
    finish(experiment_in(place, cache))
    return place


@pytest.fixture
def place(template, tmp_path):
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def cell(place, cache):
    """Return the finished experiment, in a folder of this test."""
    return experiment_in(place, cache)


def experiment_in(place, cache, *overrides):
    words = [f"storage.runs={place}/runs", f"storage.hub={place}/hub", f"storage.cache={cache}"]
    return load_experiment(None, [*WORDS, *words, *overrides])


def state_of(experiment):
    (state,) = examine({experiment.id: experiment}).values()
    return state


def test_only_finished_results_are_used(cell, place, cache):
    other = experiment_in(place, cache, "seed=1")
    states = examine({cell.id: cell, other.id: other})
    assert list(states) == [cell.id, other.id]
    assert states[other.id] == CellState("missing", "not run yet")
    state = states[cell.id]
    assert (state.status, state.reason) == ("finished", "")
    assert state.summary.id == cell.id and state.summary.final["accuracy"] > 0
    (place / f"runs/{other.id}/checkpoints").mkdir(parents=True)
    assert state_of(other) == CellState("missing", "not finished yet")


def flip(file, share):
    """Flip a bit at a fraction of a file's length."""
    content = bytearray(file.read_bytes())
    content[int(share * len(content))] ^= 1
    file.write_bytes(content)


def rewrite(file, **changes):
    """Write a result with the correct checksum."""
    summary = RunSummary.read(Store.open(str(file.parent)))
    file.write_bytes(dataclasses.replace(summary, **changes).to_json())


DAMAGES = {
    "empty": (lambda home: (home / "result.json").write_text(""), "is unreadable"),
    "flipped": (lambda home: flip(home / "result.json", 0.5), "checksum differs|is unreadable"),
    "of another experiment": (
        lambda home: rewrite(home / "result.json", identity={"seed": 5}),
        "belongs to another experiment",
    ),
    "of other numerics": (
        lambda home: rewrite(home / "result.json", versions={"numerics": "0"}),
        "belongs to another experiment",
    ),
    "without metrics": (lambda home: (home / "metrics.parquet").unlink(), "metrics.parquet"),
    "flipped metrics": (
        lambda home: flip(home / "metrics.parquet", 0.1),
        "metrics.parquet is corrupt",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_result_of_this_experiment_is_restored(cell, place, damage):
    harm, named = DAMAGES[damage]
    harm(place / "runs" / cell.id)
    state = state_of(cell)
    other = damage in ("of another experiment", "of other numerics")
    assert state.status == ("stale" if other else "corrupt")
    assert state.summary is None
    assert re.search(named, state.reason), state.reason


def test_result_of_changed_sources_is_stale(cell, place):
    notes = place / "hub/me/notes/train.csv"
    before = notes.read_bytes()
    write_notes(notes, "other")
    state = state_of(cell)
    assert state == CellState("stale", "the data changed after the run")
    change_weights(place / "hub/me/bert")
    reason = "the data and weights of the backbone changed after the run"
    assert state_of(cell).reason == reason
    notes.write_bytes(before)
    reason = "the weights of the backbone changed after the run"
    assert state_of(cell).reason == reason


def test_result_without_a_required_score_is_stale(cell, place, cache):
    seldom = experiment_in(place, cache, SELDOM)
    assert seldom.id == cell.id and state_of(seldom).status == "finished"  # It has more scores.
    few, all_ = (
        experiment_in(place, cache, "seed=3", f"evaluation.every={every}") for every in (0, 1)
    )
    finish(few)
    assert state_of(few).status == "finished"
    state = state_of(all_)
    reason = "no score of round 1, which evaluation.every=1 requires"
    assert (state.status, state.reason) == ("stale", reason)
    # A sweep that shares the cell, and requires fewer scores, uses its result.
    paths = [f"storage.{key}={getattr(cell.storage, key)}" for key in ("runs", "hub", "cache")]
    axes = ["seed=3", "partition.kind=dirichlet"]
    sweeps = [sweep_from_axes(axes, [*WORDS, *paths, *more]) for more in ([], [SELDOM])]
    outcomes = collect(sweeps, examine(distinct(sweeps)))
    assert [each.cells[0].status for each in outcomes] == ["stale", "finished"]


def test_a_failure_is_kept_until_a_run_finishes(place, cache):
    experiment = experiment_in(place, cache, "seed=2")
    record_failure(experiment, "the disk is full")
    assert state_of(experiment) == CellState("failed", "the disk is full")
    note = run_folder(experiment)
    content = note.read("failure.json")
    for damage in DAMAGE:
        note.write("failure.json", DAMAGE[damage](content))
        assert state_of(experiment) == CellState("failed", "the last run failed")
    finish(experiment)
    assert state_of(experiment).status == "finished"
    assert "failure.json" not in run_folder(experiment).names()


def test_a_store_in_a_bucket(cell, place, cache, s3_bucket):
    runs = s3_bucket("runs")
    store = Store.open(runs)
    store.child(cell.id).upload_folder(place / "runs" / cell.id)
    cells = [experiment_in(place, cache, f"storage.runs={runs}", f"seed={n}") for n in range(40)]
    record_failure(cells[1], "out of memory")
    store.child(cells[2].id).write("result.json", b"{}")
    states = examine({e.id: e for e in cells})
    statuses = [state.status for state in states.values()]
    assert statuses == ["finished", "failed", "corrupt", *["missing"] * 37]
    sweep = sweep_from_axes(["seed=0..2"], [*WORDS, f"storage.runs={runs}"])
    outcome = collect([sweep], states)[0].cells[0]
    assert len(outcome.records) == 3 and outcome.value == outcome.summary.final["accuracy"]
    lost = experiment_in(place, cache, f"storage.runs={s3_bucket('runs', 'no-such-bucket')}")
    with pytest.raises(InputError, match=r"bucket 'no-such-bucket' does not exist"):
        examine({lost.id: lost})


def test_unreadable_store_is_an_error(cell, place):
    (place / "runs").rename(place / "kept")
    (place / "runs").write_text("not a folder")
    with pytest.raises(StorageError):
        examine({cell.id: cell})


def test_outcomes_have_the_cells_of_the_sweep(cell, place, cache):
    paths = [f"storage.{key}={getattr(cell.storage, key)}" for key in ("runs", "hub", "cache")]
    sweep = sweep_from_axes(["seed=0..1", "partition.kind=dirichlet"], [*WORDS, *paths])
    experiments = {c.experiment.id: c.experiment for c in sweep.cells}
    (outcome,) = collect([sweep], examine(experiments))
    assert outcome.name == sweep.name and outcome.tables == sweep.tables
    done, missing = outcome.cells
    assert done.labels == {"seed": "0", "partition.kind": "dirichlet"}
    assert (done.status, done.metric) == ("finished", "accuracy") and done.value is not None
    assert [record["round"] for record in done.records] == [0, 1, 2]
    assert all("accuracy" in record for record in done.records)
    assert (missing.status, missing.reason, missing.value) == ("missing", "not run yet", None)
    assert missing.metric == "accuracy" and missing.summary is None
    # A run may have more scores than the sweep requires: only the required ones are shown.
    seldom = sweep_from_axes(["seed=0..1", "partition.kind=dirichlet"], [*WORDS, *paths, SELDOM])
    (outcome,) = collect([seldom], examine(experiments))
    assert ["accuracy" in record for record in outcome.cells[0].records] == [True, False, True]
    assert "uploaded_bytes" in outcome.cells[0].records[1]


def test_missing_data_are_not_compared(cell, place):
    shutil.rmtree(place / "hub/me/notes")
    assert state_of(cell).status == "finished"
    shutil.rmtree(place / "hub/me/bert")
    assert state_of(cell).status == "finished"
