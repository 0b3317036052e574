"""Rounds in which a stage lets clients train from earlier broadcasts."""

import numpy as np
import pytest
from example_plugins import unloaded_after

from trishul_ray.config.section import Section
from trishul_ray.federation.aggregate import UploadReader
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.inline import InlineDriver, InlineExecutor
from trishul_ray.federation.messages import TrainJob, Upload
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.methods.base.messages import State
from trishul_ray.plugins.loading import load_plugin
from trishul_ray.stages import Partial, Stage, Stages, Start

#: A stage whose first client of a round trains from the broadcast of round 1.
LATE = """
from dataclasses import replace

from trishul_ray.config.section import Section
from trishul_ray.methods.base.messages import State
from trishul_ray.stages import Stage, Start, register_stage


class LateConfig(Section):
    on: bool = False


@register_stage("late")
class Late(Stage):
    Config, transforms_changes, alters_mean = LateConfig, False, True

    def broadcast(self, number, sent):
        self.memory.setdefault("first", vars(sent.read))
        return sent

    def cohort(self, number, cohort):
        first = Start(1, State(**self.memory["first"]), cohort.clients[:1])
        return replace(cohort, earlier=[first] if number > 1 else [], discarded=5)

    def rebase(self, total, start, now, *, changes):
        if start.round == now.round:
            return total
        return replace(total, sums=total.sums.map(lambda sums: 0 * sums))
"""


@pytest.fixture
def late(tmp_path):
    """Load the stage as a plug-in, for one test."""
    (tmp_path / "late.py").write_text(LATE)
    with unloaded_after():
        load_plugin(tmp_path / "late.py")
        yield


def test_clients_train_from_the_broadcast_of_their_start(late, small, monkeypatch):
    calls = []
    real = InlineExecutor.run

    def watched(self, broadcast, jobs, *more):
        trained = [(job.round, job.client) for job in jobs if isinstance(job, TrainJob)]
        calls.append((state_digest(broadcast), trained))
        return real(self, broadcast, jobs, *more)

    monkeypatch.setattr(InlineExecutor, "run", watched)
    experiment = small("method=fedit", "late.on=true", "resources.backend=inline")
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    first = state_digest(driver.broadcast())
    size = driver.spec.expected.lengths["shared"]
    driver.step()
    before = driver.broadcast()
    driver.step()
    record = driver.checkpoint.records[2]
    client, *others = record.clients
    assert calls[-2] == (first, [(1, client)])
    assert calls[-1] == (state_digest(before), [(2, each) for each in others])
    assert record.uploaded_parameters == 3 * size + 5
    assert len(record.accepted_uploads) == 3 and "delta_cosine" not in record.diagnostics
    # The late upload is a sum of zeros, and its weight counts.
    outcome = driver.executor.run(before, [TrainJob(2, each) for each in others])
    expected = sum(each.arrays.shared.astype(np.float64) for each in outcome.uploads) / 3
    np.testing.assert_array_equal(driver.checkpoint.state.shared, expected.astype(np.float32))
    driver.close()


@pytest.mark.parametrize("changes", [False, True])
def test_uploads_are_compared_by_their_own_start(changes):
    class Sends(Stage):
        transforms_changes = changes

    def upload(client, *values):
        return Upload(client, 1, State(np.array(values, dtype=np.float32)))

    now = State(np.array([10.0, 20.0], dtype=np.float32))
    start = Start(1, State(np.array([1.0, 2.0], dtype=np.float32)), [3])
    reader = UploadReader(None, Stages([Sends(Section(), None)]))
    sent = [upload(2, 1, 1), upload(3, 1, 1)] if changes else [upload(2, 11, 21), upload(3, 2, 3)]
    for found in reader.values(sent, now, [start]):
        np.testing.assert_array_equal(found.arrays.shared, [11, 21])


def test_a_stage_leaves_sums_unchanged_by_default():
    total = Partial(None, 0.0, np.zeros(1), np.zeros(1))
    start = Start(1, State(np.zeros(1)), [0])
    assert Stages([Stage(Section(), None)]).rebase(total, start, start) is total
