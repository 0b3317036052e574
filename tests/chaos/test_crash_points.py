"""Kill a run before any of its writes; after a repetition, its files equal an undisturbed run's."""

import shutil
from dataclasses import dataclass

import pytest
from crashes import ALL, TINY, Place, crash_everywhere

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.summary import RunSummary


@dataclass(frozen=True)
class Scenario:
    """A run, and the files that exist before it.

    Attributes:
        words: Its overrides.
        before: Overrides of an earlier finished run, without figures.
        extras: Whether to draw figures and export the model.
        fresh: Whether the run starts over.
        cold: Whether the cache is empty.
        stride: Number of calls per crash point, unless all calls are tested.
    """

    words: list[str]
    before: list[str] | None = None
    extras: bool = False
    fresh: bool = False
    cold: bool = False
    stride: int = 6


KEPT = [
    *TINY, "uploads.codec=int4", "uploads.error_feedback=true", "server.optimizer=adam",
    "federation.rounds=3",
]  # fmt: skip
SCENARIOS = {
    "run": Scenario(TINY, stride=4),
    "extras": Scenario(TINY, extras=True, stride=21),
    "client memory": Scenario(KEPT),
    "extension": Scenario([*TINY, "federation.rounds=3"], before=TINY),
    "fresh": Scenario(TINY, before=TINY, fresh=True),
    "added model": Scenario(TINY, before=TINY, extras=True, stride=19),
    "cold cache": Scenario(TINY, cold=True),
    "pretrain": Scenario([w for w in TINY if not w.startswith("model")], cold=True),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, fork_environment):
    """Return the folder of the runs; its folder ``warm`` has cache and database of another run."""
    place = Place(tmp_path_factory.mktemp("crashes"))
    (place.root / "tmp").mkdir()
    other = place.run([*TINY, "seed=77"])
    assert other.code == 0, other.said
    warm = Place(place.root / "warm")
    warm.root.mkdir()
    warm.restore(place.root)
    return place


def crash_run(place, scenario, first, stride):
    """Crash a run before calls ``first``, ``first + stride``, ..., and repeat it each time.

    Returns the differences from a run without a crash, keyed by call.
    """
    place.restore(place.root / "warm")
    template = Place(place.root / "template")
    template.root.mkdir(exist_ok=True)
    if scenario.cold:
        shutil.rmtree(place.root / "cache")
    if scenario.before is not None:
        assert place.run(scenario.before).code == 0
    template.restore(place.root)
    id = load_experiment(None, scenario.words).id

    def act(crash):
        return place.run(scenario.words, crash=crash, fresh=scenario.fresh, extras=scenario.extras)

    def look():
        if place.home(id).exists("result.json"):  # then it is finished
            return RunSummary.read(place.home(id)).damaged_files(place.home(id))
        return ()

    wrong = crash_everywhere(
        place, template, act, lambda: place.observe(id), first=first, stride=stride, look=look,
        again=lambda: place.run(scenario.words, extras=scenario.extras),
    )  # fmt: skip
    if not wrong:  # as in the undisturbed run
        found = place.observe(id)
        assert found["statuses"] == ["FINISHED"] and found["logged"] and not found["damaged"]
    return wrong


@pytest.mark.parametrize(("name", "stride"), [("run", 11), ("fresh", 23)])
def test_some_crash_points(place, name, stride):
    assert crash_run(place, SCENARIOS[name], 1, stride) == {}


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(7200 if ALL else 900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_crash_points(place, name):
    # Scenarios share most calls, so each starts at another call.
    first = 1 + list(SCENARIOS).index(name)
    assert crash_run(place, SCENARIOS[name], first, SCENARIOS[name].stride) == {}
