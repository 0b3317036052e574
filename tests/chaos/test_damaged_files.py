"""Damage every kind of stored file as a power cut or a worn disk does: results do not change."""

import shutil
from pathlib import Path

import pytest
from crashes import ALL, CRASHED, Place
from damage import DAMAGE, ELSEWHERE, RUN_AGAIN, unlisted

from trishul_ray.experiment.loading import load_experiment

#: With all files of a run: client states, prepared rows and weights, a pretrained backbone.
WORDS = [
    "federation.clients=3", "federation.clients_per_round=2", "federation.rounds=2",
    "federation.local_steps=1", "federation.batch_size=4", "evaluation.limit=16",
    "evaluation.batch_size=16", "resources.backend=inline", "uploads.codec=int4",
    "uploads.error_feedback=true",
]  # fmt: skip
_WAYS = list(DAMAGE)
#: Kinds of files and of damage; without ALL, two kinds of damage per file, alternately.
CASES = [
    (*kind, _WAYS[(number + further) % len(_WAYS)])
    for number, kind in enumerate(RUN_AGAIN)
    for further in (range(len(_WAYS)) if ALL else (0, 2))
]


@pytest.fixture(scope="module")
def world(tmp_path_factory, fork_environment):
    """Create runs, the id of one, its expected outcome, and a template of each state."""
    place = Place(tmp_path_factory.mktemp("damaged"))
    id, want = load_experiment(None, WORDS).id, {}

    def keep(name):
        template = Place(place.root / name)
        template.root.mkdir()
        template.restore(place.root)

    (place.root / "tmp").mkdir()
    for name, extras in (("cached", False), ("finished", True)):
        place.restore(place.root / "nothing")
        done = place.run(WORDS, extras=extras)
        assert done.code == 0, done.said
        want[name] = place.observe(id)
        if name == "finished":
            keep(name)
    for run in (place.root / "runs").iterdir():
        if run.is_dir():
            shutil.rmtree(run)
        else:
            run.unlink()
    keep("cached")
    calls = place.run(WORDS).calls
    place.restore(place.root / "cached")
    at = next(n for n, call in enumerate(calls, 1) if "/.result.json" in call)
    assert place.run(WORDS, crash=at).code == CRASHED
    keep("broken off")
    return place, id, want | {"broken off": want["cached"]}


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(900)  # The first case makes the runs.
@pytest.mark.parametrize(("pattern", "state", "damage"), CASES)
def test_a_damaged_file_changes_nothing(world, pattern, state, damage):
    place, id, want = world
    place.restore(place.root / state)
    # Named by the stamps of the backbone's current links.
    if pattern.startswith("cache/weights"):
        assert place.run(WORDS).code == 0
        shutil.rmtree(place.root / "runs")
        (place.root / "runs").mkdir()
    file = max(place.root.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))
    data = file.read_bytes()
    file.unlink()  # The template has a link to the same file.
    file.write_bytes(DAMAGE[damage](data))
    again = place.run(WORDS, extras=state == "finished")
    assert again.code == 0, again.said
    got = place.observe(id)
    unlike = {name for name in got if got[name] != want[state][name]}
    assert unlike <= {"files"}, unlike
    if state != "broken off" and Path(pattern).name not in ("result.json", "metrics.parquet"):
        assert file.read_bytes() == data
    if state == "cached":
        assert f"{file.parent} is damaged (" in again.said


@pytest.mark.slow
@pytest.mark.chaos
def test_undamaged_files_are_said_to_be_nothing_else(world):
    place, id, want = world
    for state, expected in want.items():
        place.restore(place.root / state)
        again = place.run(WORDS, extras=state == "finished")
        assert again.code == 0 and "damaged" not in again.said and "corrupt" not in again.said
        got = place.observe(id)
        assert {**got, "files": set(got["files"])} == {**expected, "files": set(expected["files"])}


@pytest.mark.slow
@pytest.mark.chaos
def test_every_kind_of_kept_file_is_listed(world):
    place, _, want = world
    for state in want:
        assert unlisted(place.root / state) == []
    tests = Path(__file__).parents[1]
    assert all("in DAMAGE" in (tests / file).read_text() for file in ELSEWHERE.values())
