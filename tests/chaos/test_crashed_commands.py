"""Kill sweeps and exports before any write; repeated commands complete them.

A sweep is killed in its driver, before, in and after its cells, which run as described in
:mod:`crashes`.
"""

import re
import sqlite3
from contextlib import closing

import pytest
from crashes import ALL, TINY, Place, crash_everywhere

from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(7200 if ALL else 900)]

METHODS, SEEDS = ("fedit", "trishul"), (0, 1)
SWEEP = [
    "sweep", "--axis", f"method.name={','.join(METHODS)}", "--axis",
    f"seed={','.join(map(str, SEEDS))}", *TINY, "federation.rounds=1", "--report", "out/report",
]  # fmt: skip


@pytest.fixture
def place(tmp_path, fork_environment):
    """Return the folder of the runs; its folder ``template`` is the state before a command."""
    place = Place(tmp_path)
    place.restore(tmp_path / "nothing")
    return place


def keep(place):
    """Return a new template, a copy of a place."""
    template = Place(place.root / "template")
    template.root.mkdir()
    template.restore(place.root)
    return template


def cell(method, seed):
    return [*TINY, "federation.rounds=1", f"method.name={method}", f"seed={seed}"]


def logged(database):
    """Return MLflow's active runs, without times and ids, keyed by own and parent's name."""
    with closing(sqlite3.connect(database)) as base:

        def pairs(table, uuid):
            return dict(base.execute(f"select key, value from {table} where run_uuid = ?", (uuid,)))

        names, found = dict(base.execute("select run_uuid, name from runs")), {}
        for uuid, name, status in base.execute(
            "select run_uuid, name, status from runs where lifecycle_stage = 'active'"
        ).fetchall():
            tags, metrics = pairs("tags", uuid), pairs("latest_metrics", uuid)
            place = f"{names.get(tags.get('mlflow.parentRunId'))} > {name}"
            found.setdefault(place, []).append(
                {
                    "status": status,
                    "tags": sorted(tags),
                    "counts": {k: v for k, v in tags.items() if k.startswith(("axis.", "cells."))},
                    "params": pairs("params", uuid),
                    "metrics": {k: v for k, v in metrics.items() if "second" not in k},
                }
            )
    return {f"{place} {n}": each for place, all in found.items() for n, each in enumerate(all)}


def without_timings(path):
    """Return the content of a report's file, without clock-dependent parts."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return re.sub(r"\d+(\.\d+)? (ms|s|min|h)\b", "", text)


def test_a_sweep_of_four_cells(place):
    """Two cells have finished as single runs before: they keep their MLflow runs."""
    for seed in SEEDS:
        assert place.run(cell(METHODS[0], seed)).code == 0
    template = keep(place)
    ids = [load_experiment(None, cell(m, s)).id for m in METHODS for s in SEEDS]

    def observe():
        found = {id: place.observe(id) | {"files": 0} for id in ids}
        report = place.root / "out/report"
        return found | {
            "files": place.files(),
            "mlflow": logged(place.root / "runs/mlflow.db"),
            "report": {path.name: without_timings(path) for path in report.rglob("[!.]*.*")},
        }

    def act(crash):
        return place.call(*SWEEP, crash=crash)

    assert crash_everywhere(place, template, act, observe, stride=13) == {}
    runs = observe()["mlflow"].values()  # the sweep and its cells
    assert [run["status"] for run in runs] == ["FINISHED"] * (1 + len(ids))


@pytest.mark.parametrize("options", [[], ["--merged"]], ids=["adapter", "merged"])
def test_an_export(place, options):
    done = place.run(TINY)
    assert done.code == 0, done.said
    template, id, folder = keep(place), load_experiment(None, TINY).id, place.root / "out/model"
    whole = {}

    def content():
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    def observe():
        whole.update(content())
        return {"model": content(), "files": place.files()}

    def look():
        return ["a part is there"] if folder.exists() and content() != whole else []

    def act(crash):
        return place.call("export", id, "out/model", *options, crash=crash)

    assert crash_everywhere(place, template, act, observe, look=look) == {}
    assert whole
