"""A run that is killed at any of its writes is, once repeated, as if it had not been."""

import shutil
from dataclasses import dataclass

import pytest
from crashes import ALL, CRASHED, Place

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.summary import RunSummary

TINY = [
    "model.init=random", "federation.clients=3", "federation.clients_per_round=2",
    "federation.rounds=2", "federation.local_steps=1", "federation.batch_size=4",
    "evaluation.limit=16", "evaluation.batch_size=16", "resources.backend=inline",
]  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """A run, and what is there before it.

    Attributes:
        words: Its overrides.
        before: Overrides of a run that has finished, without figures.
        extras: Whether figures are drawn and the model is exported.
        fresh: Whether the run starts over.
        cold: Whether the cache is empty.
        stride: Number of calls of which one is a crash point, unless all are asked for.
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
    "added figures": Scenario(TINY, before=TINY, extras=True, stride=19),
    "cold cache": Scenario(TINY, cold=True),
    "pretrain": Scenario([w for w in TINY if not w.startswith("model")], cold=True),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, fork_environment):
    """Folder of the runs; its folder ``warm`` has the cache and the database of another run."""
    place = Place(tmp_path_factory.mktemp("crashes"))
    (place.root / "tmp").mkdir()
    other = place.run([*TINY, "seed=77"])
    assert other.code == 0, other.said
    warm = Place(place.root / "warm")
    warm.root.mkdir()
    warm.restore(place.root)
    return place


def crash_everywhere(place, scenario, first, stride):
    """Crash a run before calls ``first``, ``first + stride``, ..., repeat it each time.

    Returns what is not as it was without a crash, by call.
    """
    place.restore(place.root / "warm")
    template = Place(place.root / "template")
    template.root.mkdir(exist_ok=True)
    if scenario.cold:
        for folder in (place.root / "cache").iterdir():
            shutil.rmtree(folder)
    if scenario.before is not None:
        assert place.run(scenario.before).code == 0
    template.restore(place.root)
    id = load_experiment(None, scenario.words).id
    undisturbed = place.run(scenario.words, fresh=scenario.fresh, extras=scenario.extras)
    assert undisturbed.code == 0, undisturbed.said
    assert undisturbed.unsynced == []
    want, wrong = place.observe(id), {}
    assert want["statuses"] == ["FINISHED"] and want["logged"] and not want["damaged"]
    for number in range(first, len(undisturbed.calls) + 1, stride):
        place.restore(template.root)
        crashed = place.run(
            scenario.words, crash=number, fresh=scenario.fresh, extras=scenario.extras
        )
        assert crashed.code == CRASHED, crashed.said
        faults = []
        if place.home(id).exists("result.json"):  # then it is one
            faults += RunSummary.read(place.home(id)).damaged_files(place.home(id))
        again = place.run(scenario.words, extras=scenario.extras)
        if again.code:
            faults.append(again.said[-1000:])
        else:
            got = place.observe(id)
            faults += [
                f"{k}: {_difference(got.get(k), want[k])}" for k in want if got.get(k) != want[k]
            ]
        if faults:
            wrong[f"{number} {undisturbed.calls[number - 1]}"] = faults
    return wrong


def _difference(got, want):
    if isinstance(want, list) and isinstance(got, list):
        return f"more {[e for e in got if e not in want]}, less {[e for e in want if e not in got]}"
    return f"{got} for {want}"


@pytest.mark.parametrize(("name", "stride"), [("run", 11), ("fresh", 23)])
def test_some_crash_points(place, name, stride):
    assert crash_everywhere(place, SCENARIOS[name], 1, stride) == {}


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(7200 if ALL else 900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_crash_points(place, name):
    scenario = SCENARIOS[name]
    stride = 1 if ALL else scenario.stride
    # Scenarios have most calls in common: each begins at another one.
    first = 1 + list(SCENARIOS).index(name) % stride
    assert crash_everywhere(place, scenario, first, stride) == {}
