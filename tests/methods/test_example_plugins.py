"""Contract checks of the methods of example_plugins/; test_battery.py also runs them."""

from dataclasses import replace

import numpy as np
import pytest
from method_runs import Recording, server_of

from trishul_ray.methods.base.messages import State


class Attacked(Recording):
    """An executor in which one client of every round sends huge values."""

    def run(self, broadcast, jobs, *more):
        outcome = super().run(broadcast, jobs, *more)
        if outcome.uploads:
            first = outcome.uploads[0]
            huge = State(np.full_like(first.arrays.shared, 1e9))
            outcome.uploads[0] = replace(first, arrays=huge)
        return outcome


def test_a_median_stays_among_the_honest_uploads(executor, tmp_path):
    attacked = Attacked(executor("method=fedmedian", "federation.rounds=1"))
    server = server_of(attacked, tmp_path)
    server.step()
    honest = np.stack([u.arrays.shared for u in attacked.uploads[1:]])
    found = server.checkpoint.state.shared
    assert (found >= honest.min(axis=0)).all() and (found <= honest.max(axis=0)).all()
    mean = server_of(Attacked(executor("method=fedit", "federation.rounds=1")), tmp_path)
    mean.step()
    assert abs(mean.checkpoint.state.shared).max() > 1e8


def test_the_median_of_equal_uploads_is_their_mean(executor, tmp_path):
    class Alike(Recording):
        def run(self, broadcast, jobs, *more):
            outcome = super().run(broadcast, jobs, *more)
            outcome.uploads = [
                replace(u, arrays=outcome.uploads[0].arrays) for u in outcome.uploads
            ]
            return outcome

    found = []
    for method in ("fedmedian", "fedit"):
        server = server_of(Alike(executor(f"method={method}", "federation.rounds=1")), tmp_path)
        server.step()
        found.append(server.checkpoint.state.shared)
    np.testing.assert_array_equal(*found)


def test_a_wide_round_gives_a_median_every_upload(executor, tmp_path):
    """Test more clients than one group of the tree that adds uploads."""
    options = ["federation.clients=18", "federation.clients_per_round=18", "federation.rounds=1"]
    recording = Recording(executor("method=fedmedian", *options, "federation.local_steps=1"))
    server = server_of(recording, tmp_path)
    server.step()
    sent = np.stack([u.arrays.shared for u in recording.uploads])
    assert len(sent) == 18
    np.testing.assert_allclose(
        server.checkpoint.state.shared, np.median(sent, axis=0), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("stacked", [1, 2])
def test_a_step_may_ask_for_another_gradient(executor, tmp_path, stacked):
    """The first step of plain SGD is along the gradient at the second point, by hand."""
    words = ["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.lr=0.01"]
    words += ["optimizer.clip_norm=null", "federation.rounds=1", "federation.local_steps=1"]
    words += [f"federation.stacked={stacked}"]
    found = {}
    for method in ("fedit", "fedsam"):
        recording = Recording(executor(f"method={method}", *words))
        server_of(recording, tmp_path).step()
        found[method] = [u.arrays.shared - recording.broadcast.shared for u in recording.uploads]
    for plain, sharp in zip(found["fedit"], found["fedsam"], strict=True):
        assert 0 < np.linalg.norm(sharp - plain) < np.linalg.norm(plain)
