"""Requests of trials, the notice of a sweep that waits, and stores that all nodes must see."""

from types import SimpleNamespace

import pytest
from ray.tune.experiment import Trial

from trishul_ray.errors import InputError
from trishul_ray.sweeps import monitor, tuner
from trishul_ray.sweeps.cells import TuneOptions
from trishul_ray.sweeps.monitor import WAITING_NOTICE_SECONDS, Monitor
from trishul_ray.sweeps.tuner import check_stores, request

TWO_CORES = [{"CPU": 2.0}]
#: Id of a node that no cluster has.
GONE = "a" * 56


@pytest.mark.parametrize(
    ("words", "nodes", "runs", "bundles"),
    [
        ([], TWO_CORES, 4, [{"CPU": 1.0}]),
        ([], TWO_CORES, 1, [{"CPU": 1.0}] * 2),
        ([], [{"CPU": 16.0}], 1, [{"CPU": 1.0}] * 3),  # clients of a cohort
        (["resources.actors=2"], TWO_CORES, 4, [{"CPU": 1.0}] * 2),
        (["federation.clients_per_actor=2"], TWO_CORES, 4, [{"CPU": 1.0}] * 2),
        (
            ["resources.gpus_per_actor=0.25"],
            [{"CPU": 8.0, "GPU": 1.0}],
            4,
            [{"CPU": 1.0, "GPU": 0.25}],
        ),
    ],
)
def test_trial_requests_its_share_of_the_nodes(small, words, nodes, runs, bundles):
    assert request(small(*words), nodes, runs)[1] == ({}, *bundles)


def test_inline_trial_computes_in_its_own_bundle(small):
    assert request(small("resources.backend=inline"), TWO_CORES, 1)[1] == ({"CPU": 1.0},)


def test_slices_must_fit_on_nodes(small):
    with pytest.raises(InputError, match=r"resources: 1 x \(4 CPU\) do not fit on the nodes"):
        request(small("resources.threads=4"), [{"CPU": 3.0}, {"CPU": 3.0}], 1)


def test_request_waits_for_nodes_that_an_autoscaler_adds(small):
    none = [{"CPU": 0.0}]
    assert request(small(), none, 4, may_grow=True)[1] == ({}, {"CPU": 1.0})
    gpu = small("resources.device=cuda")
    assert request(gpu, none, 4, may_grow=True)[1] == ({}, {"CPU": 1.0, "GPU": 1.0})
    with pytest.raises(InputError, match="exceed the cluster's 0 CPU"):
        request(small(), none, 4)


def test_sweep_whose_nodes_do_not_come_says_so_once(monkeypatch):
    late = 1 + WAITING_NOTICE_SECONDS
    waits, some = [Trial.PENDING, Trial.PENDING], [Trial.RUNNING, Trial.PENDING]

    def notes_after(*moments):
        notes = []
        watched = Monitor(lambda config: None, TuneOptions(), SimpleNamespace(note=notes.append))
        for seconds, statuses in moments:
            monkeypatch.setattr(monitor.time, "monotonic", lambda seconds=seconds: seconds)
            watched.on_step_end(0, [SimpleNamespace(status=status) for status in statuses])
        return notes

    assert len(notes_after((0, waits), (1, waits), (late, waits), (10 * late, waits))) == 1
    assert notes_after((0, some), (late, some), (2 * late, waits)) == []


@pytest.mark.usefixtures("local_ray")
def test_folder_that_a_node_does_not_see_is_rejected(tmp_path, monkeypatch):
    (node,) = tuner.ray.nodes()
    nodes = [node, node | {"NodeID": GONE}]
    monkeypatch.setattr(tuner.ray, "nodes", lambda: nodes)
    check_stores([str(tmp_path)])  # a node that has gone is not asked
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tuner.Store, "write", lambda store, name, data: None)
    with pytest.raises(InputError, match="is not seen by 1 of 2 nodes"):
        check_stores([str(tmp_path)])
