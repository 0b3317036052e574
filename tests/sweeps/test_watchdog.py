"""A trial without progress is ended; one with long rounds, or one that is over, is not."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from trishul_ray.sweeps import watchdog
from trishul_ray.sweeps.trial import BUSY, ROUND
from trishul_ray.sweeps.watchdog import AGAIN_SECONDS, LOADING_SECONDS, MEDIAN_ROUNDS, Watchdog


@dataclass
class FakeTrial:
    trial_id: str
    temporary_state: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(ray_actor=None)
    )
    finished: bool = False

    def is_finished(self):
        return self.finished


class Watched:
    """A watchdog with a limit of a minute, a clock that is set, and what it has ended."""

    def __init__(self, monkeypatch):
        self.now, self.killed = 0.0, []
        monkeypatch.setattr(watchdog.ray, "kill", self.killed.append)
        self.starting = []
        monkeypatch.setattr(watchdog, "starting_actors", lambda name: self.starting)
        monkeypatch.setattr(watchdog, "end_actor", self.killed.append)
        self.dog = Watchdog(60.0, lambda: self.now)
        self.trials = []

    def start(self, name, *, loaded=True):
        trial = FakeTrial(name)
        trial.temporary_state.ray_actor = object()
        self.trials.append(trial)
        self.dog.on_trial_start(0, self.trials, trial)
        if loaded:
            self.report(trial, {})
        return trial

    def report(self, trial, result={ROUND: 1}):  # noqa: B006  # read only
        self.dog.on_trial_result(0, self.trials, trial, result)

    def at(self, now):
        self.now = now
        self.dog.on_step_end(0, self.trials)
        return self.killed


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


def test_a_silent_trial_is_ended_once_and_again_if_that_did_not_help(watched):
    silent, busy = watched.start("silent"), watched.start("busy")
    assert watched.at(59) == []
    watched.report(busy)
    assert watched.at(61) == [silent.temporary_state.ray_actor]
    assert watched.dog.reasons == {"silent": "no progress for 1 min 01 s: ended by the watchdog"}
    assert len(watched.at(100)) == 1
    watched.report(busy)
    assert watched.at(61 + AGAIN_SECONDS + 1) == [silent.temporary_state.ray_actor] * 2


def test_a_trial_that_was_started_again_has_new_time(watched):
    trial = watched.start("again")
    assert len(watched.at(61)) == 1
    trial.temporary_state.ray_actor = object()
    watched.dog.on_trial_start(0, watched.trials, trial)
    watched.report(trial, {})
    assert len(watched.at(61 + 59)) == 1
    assert watched.at(61 + 61) == [watched.killed[0], trial.temporary_state.ray_actor]


def test_an_actor_that_is_being_handed_to_the_next_trial_is_watched_too(watched):
    trial = FakeTrial("reset")
    watched.trials.append(trial)
    assert watched.at(100) == []  # waits for resources
    trial.temporary_state.ray_actor = object()
    assert watched.at(101) == []
    assert watched.at(101 + LOADING_SECONDS) == []
    assert watched.at(102 + LOADING_SECONDS) == [trial.temporary_state.ray_actor]


def test_rounds_may_be_longer_than_the_limit(watched):
    trial = watched.start("long")
    for end in (50, 100, 200):  # the longest has 100 seconds, the median 50
        watched.at(end)
        watched.report(trial)
    assert watched.at(200 + MEDIAN_ROUNDS * 50) == []
    assert len(watched.at(200 + MEDIAN_ROUNDS * 50 + 1)) == 1


def test_one_round_that_took_hours_does_not_make_the_next_stall_as_long(watched):
    trial = watched.start("storage was gone")
    watched.dog.limit = 1e9
    for end in (10, 20, 3620, 3630, 3640):
        watched.at(end)
        watched.report(trial)
    watched.dog.limit = 60.0
    assert watched.at(3640 + 7200) == []  # twice the longest
    assert len(watched.at(3640 + 7201)) == 1


def test_loading_and_waiting_for_another_process_are_no_stall(watched):
    trial = watched.start("loads", loaded=False)
    assert watched.at(1000) == []
    watched.report(trial, {BUSY: True})
    assert watched.at(1000 + LOADING_SECONDS) == []  # the other has ended, this one loads
    watched.report(trial, {})
    assert watched.at(1000 + LOADING_SECONDS + 60) == []
    assert watched.at(1000 + LOADING_SECONDS + 61) == [trial.temporary_state.ray_actor]


def test_a_finished_trial_is_not_ended(watched):
    trial = watched.start("done")
    trial.finished = True
    assert watched.at(1000) == []


def test_an_actor_whose_constructor_hangs_is_ended(watched):
    watched.trials.append(FakeTrial("pending"))  # Tune shows no actor
    watched.starting = ["slow", "hangs"]
    assert watched.at(10) == []
    watched.starting = ["hangs"]
    assert watched.at(9 + LOADING_SECONDS) == []
    assert watched.at(15 + LOADING_SECONDS) == ["hangs"]
    reason = "not started, no progress for 30 min 05 s: ended by the watchdog"
    assert watched.dog.reasons == {"hangs": reason}
    assert watched.at(10 + 2 * LOADING_SECONDS) == ["hangs"]
    assert watched.at(20 + 2 * LOADING_SECONDS) == ["hangs", "hangs"]
