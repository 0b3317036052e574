"""Progress of cells, read from results and checkpoints, never from logs."""

import os

import pytest

from trishul_ray.federation.checkpoint import run_folder
from trishul_ray.jobs.progress import QUIET_SECONDS, read_progress
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.status import record_failure

NOW = 1_700_000_000.0


def write(experiment, ages):
    """Write checkpoints: ``ages`` are their ages in seconds, by round."""
    home = run_folder(experiment)
    home.write("attempt.json", b"{}")
    os.utime(f"{home.root}/attempt.json", (NOW - 5000, NOW - 5000))
    for round_, age in ages.items():
        name = f"round-{round_:06d}-{'0' * 64}.safetensors"
        home.child("checkpoints").write(name, b"")
        os.utime(f"{home.root}/checkpoints/{name}", (NOW - age, NOW - age))


def test_cells_are_counted_by_what_is_in_the_store(small):
    cells = [small(f"seed={seed}", "federation.rounds=50") for seed in range(5)]
    write(cells[0], {10: 70.0, 11: 10.0})  # a round a minute
    write(cells[1], {4: 35.0, 5: 5.0})  # two rounds a minute
    write(cells[2], {7: QUIET_SECONDS + 60, 8: QUIET_SECONDS + 1})  # its machine is gone
    write(cells[3], {3: 20.0})
    record_failure(cells[3], "no memory", 3)
    progress = read_progress({cell.id: cell for cell in cells}, NOW)
    assert (progress.cells, progress.running) == (5, 2)
    assert progress.states == {"missing": 2, "failed": 1}
    assert 60 * progress.pace.rate == pytest.approx(3.0)
    assert progress.rounds_left == 39 + 45 + 42 + 47 + 50


def test_a_cell_with_long_rounds_runs_although_nothing_is_written(small):
    cell = small("federation.rounds=10")
    write(cell, {1: 5000.0, 2: 1400.0})  # an hour each
    progress = read_progress({cell.id: cell}, NOW)
    assert (progress.running, progress.rounds_left) == (1, 8)


def test_times_are_those_of_the_store(tmp_path, s3_bucket):
    for place in (str(tmp_path), s3_bucket("runs")):
        store = Store.open(place)
        store.write("a", b"1")
        store.child("folder").write("b", b"2")
        ((name, when),) = store.modified().items()
        assert name == "a"
        store.write("c", b"3")
        assert store.modified()["c"] >= when > 1.7e9
    assert Store.open(str(tmp_path / "absent")).modified() == {}
