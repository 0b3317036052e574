"""What is said about trials, beyond what the tests of whole sweeps see."""

from types import SimpleNamespace

import pytest
from ray.tune.experiment import Trial

from trishul_ray.sweeps import tuner
from trishul_ray.sweeps.cells import TuneOptions
from trishul_ray.sweeps.tuner import WAITING_NOTICE_SECONDS, Monitor


@pytest.fixture
def notes_after(monkeypatch):
    """``notes_after((seconds, statuses), ...)`` -> what was said at these times."""

    def look(*moments):
        notes = []
        progress = SimpleNamespace(note=notes.append)
        watched = Monitor(lambda config: None, TuneOptions(), progress, None)
        for seconds, statuses in moments:
            monkeypatch.setattr(tuner.time, "monotonic", lambda seconds=seconds: seconds)
            watched.on_step_end(0, [SimpleNamespace(status=status) for status in statuses])
        return notes

    reasons = ["cannot start gpu: InsufficientInstanceCapacity"]
    monkeypatch.setattr(tuner, "launch_failures", lambda: reasons)
    return look


def test_a_sweep_whose_nodes_do_not_come_says_why_once(notes_after):
    late = 1 + WAITING_NOTICE_SECONDS
    waits, some = [Trial.PENDING, Trial.PENDING], [Trial.RUNNING, Trial.PENDING]
    assert notes_after((0, waits), (1, waits), (late, waits), (10 * late, waits)) == [
        "no cell is running: waiting for resources on the cluster; "
        "cannot start gpu: InsufficientInstanceCapacity"
    ]
    assert notes_after((0, some), (late, some), (2 * late, waits)) == []
