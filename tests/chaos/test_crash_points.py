"""A run that is killed at any of its writes is, once repeated, as if it had not been."""

import shutil
from dataclasses import dataclass

import pytest
from crashes import CRASHED, Place

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
        before: Those of a run that has finished, without figures.
        extras: Whether figures are drawn and the model is exported.
        fresh: Whether the run starts over.
        cold: Whether the cache is empty.
    """

    words: list[str]
    before: list[str] | None = None
    extras: bool = False
    fresh: bool = False
    cold: bool = False


KEPT = [
    *TINY, "uploads.codec=int4", "uploads.error_feedback=true", "server.optimizer=adam",
    "federation.rounds=3",
]  # fmt: skip
SCENARIOS = {
    "run": Scenario(TINY),
    "extras": Scenario(TINY, extras=True),
    "client memory": Scenario(KEPT),
    "extension": Scenario([*TINY, "federation.rounds=3"], before=TINY),
    "fresh": Scenario(TINY, before=TINY, fresh=True),
    "added figures": Scenario(TINY, before=TINY, extras=True),
    "cold cache": Scenario(TINY, cold=True),
    "pretrain": Scenario([w for w in TINY if not w.startswith("model")], cold=True),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, fork_environment):
    """Where runs are made; its folder ``warm`` has the cache and the database of another run."""
    place = Place(tmp_path_factory.mktemp("crashes"))
    (place.root / "tmp").mkdir()
    other = place.run([*TINY, "seed=77"])
    assert other.code == 0, other.said
    warm = Place(place.root / "warm")
    warm.root.mkdir()
    warm.restore(place.root)
    return place


def crash_everywhere(place, scenario, stride):
    """Crash a run before every call of ``stride``, repeat it, and return what is not as it was."""
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
    want, wrong = place.observe(id), {}
    assert want["statuses"] == ["FINISHED"] and want["logged"] and not want["damaged"]
    for number in range(1, len(undisturbed.calls) + 1, stride):
        place.restore(template.root)
        first = place.run(
            scenario.words, crash=number, fresh=scenario.fresh, extras=scenario.extras
        )
        assert first.code == CRASHED, first.said
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


@pytest.mark.parametrize(("name", "stride"), [("run", 9), ("fresh", 11)])
def test_some_crash_points(place, name, stride):
    assert crash_everywhere(place, SCENARIOS[name], stride) == {}


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_crash_point(place, name):
    assert crash_everywhere(place, SCENARIOS[name], 1) == {}
