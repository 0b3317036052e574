"""Runs in a simulated cluster: any order of events and any trouble give the bytes of a quiet run.

A failure names its schedule. ``TRISHUL_TEST_SCHEDULES=237:238`` plays that one again, and
``TRISHUL_TEST_SCHEDULES=0:100000`` as many as there is time for; both with ``-m slow``.
"""

import itertools
import os
from collections import Counter

import pytest
from simulation.faults import FAULTS
from simulation.runs import KINDS, play

from trishul_ray.federation.comparison import Comparison
from trishul_ray.federation.on_ray.work import RoundWork

GIVEN = os.environ.get("TRISHUL_TEST_SCHEDULES")
#: Seeds of the schedules of each kind of run.
FEW, MANY = (range(*map(int, given.split(":"))) for given in (GIVEN or "0:8", GIVEN or "8:128"))
#: Seeds in which a fault must be found.
ENOUGH = range(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRISHUL_CACHE", str(cache))
        yield tmp_path_factory.mktemp("schedules")


def play_all(kind, seeds, folder):
    trouble = Counter()
    for seed in seeds:
        try:
            trouble += play(seed, kind, folder)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed} of {kind!r}: {error}") from error
    return trouble


@pytest.mark.parametrize("kind", KINDS)
def test_a_disturbed_run_ends_with_the_bytes_of_a_quiet_one(kind, folder):
    assert play_all(kind, FEW, folder)


def test_uploads_are_compared_when_the_last_client_has_trained(folder, monkeypatch):
    events, end, begin = [], RoundWork.end, Comparison.begin

    def noted(self, number):
        events.append(self.describe(number).split()[0])
        end(self, number)

    def begun(self, uploads):
        events.append("comparison")
        begin(self, uploads)

    monkeypatch.setattr(RoundWork, "end", noted)
    monkeypatch.setattr(Comparison, "begin", begun)
    play(0, "plain", folder)
    pairs = {*itertools.pairwise(events)}
    assert {first for first, second in pairs if second == "comparison"} == {"client"}
    assert ("comparison", "evaluation") in pairs


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(24 * 3600 if GIVEN else 900)
@pytest.mark.parametrize("kind", KINDS)
def test_many_schedules(kind, folder):
    trouble = play_all(kind, MANY, folder)
    kinds = {"client", "node", "drain", "coordinator", "driver", "disk"}
    assert trouble.keys() == kinds or GIVEN, trouble


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, folder, monkeypatch):
    FAULTS[name].plant(monkeypatch)
    for seed in ENOUGH:
        try:
            play(seed, FAULTS[name].kind, folder)
        except AssertionError:
            return
    pytest.fail(f"{name}: not found in {len(ENOUGH)} schedules")
